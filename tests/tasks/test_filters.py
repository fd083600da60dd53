"""Each measurement against a value worked out by hand, and the order of rules."""

import random
from collections import Counter

import pytest

from tasks import filters
from tasks.filters import MEASURES, Stats, check_rules, duplicate_ngram_share, first_violation, top_ngram_share


@pytest.mark.parametrize(
    "name, text, lang, value",
    [
        ("words", "one two  three\nfour", "en", 4),
        ("words", "今天天气很好 today", "zh", 7),
        ("mean_word_length", "ab abcd", "en", 3),
        ("mean_word_length", "今天天气", "zh", None),
        ("symbol_ratio", "# one two ... \u2026 six", "en", 3 / 6),
        ("bullet_lines", "- a\n\u2022 b\nc\n1. d", "en", 0.75),
        ("ellipsis_lines", "a...\nb\u2026\nc\n\nd", "en", 0.5),
        ("alphabetic_words", "abc 12 a1 --", "en", 0.5),
        ("stop_words", "The cat and dog", "en", 0.5),
        ("stop_words", "Die Katze und Hund", "de", 0.5),
        ("stop_words", "kissa ja koira", "fi", None),
        ("sentence_lines", "A line.\nAnother\n\u5b8c\u3002\nNo", "en", 0.5),
        ("short_lines", "short\n" + "x" * 30, "en", 0.5),
        ("policy_lines", "Privacy Policy\nThe sea\nPlease log in\nRivers", "en", 0.5),
        ("lorem_ipsum", "Lorem ipsum dolor sit amet", "en", 2),
        ("duplicate_line_share", "a\nb\na\n a ", "en", 0.5),
        ("duplicate_paragraph_share", "a\n\nb\n\na\n\nc", "en", 0.25),
        ("duplicate_line_chars", "aaaa\nbb\naaaa", "en", 0.4),
        ("top_2gram", "ab cd ab cd xx", "en", 8 / 10),
        ("top_4gram", "a b c d e", "en", 0),
        ("duplicate_5grams", "a b c d e a b c d e", "en", 0.5),
        ("duplicate_10grams", "a b c d e a b c d e", "en", 0),
        ("hash_ratio", "# a #b c", "en", 2 / 4),
        ("ellipsis_ratio", "a... b \u2026 c", "en", 2 / 4),
        ("different_stop_words", "The cat and the dog of The house", "en", 3),
        ("different_stop_words", "the", "fr", None),
        ("sentences", 'One. Two! "Three?" v1.2 is no end', "en", 3),
        ("sentences", "\u4eca\u5929\u3002\u597d\uff01", "zh", 2),
        ("few_word_lines", "one two\none two three\nx\na b c d", "en", 0.5),
        ("few_word_lines", "\u4eca\u5929", "zh", None),
        ("curly_brackets", "a { b } c", "en", 2 / 5),
        ("javascript_lines", "Enable JavaScript\na\nb\nc", "en", 0.25),
        ("newline_ratio", "a b\nc d\n", "en", 0.5),
        ("duplicate_paragraph_chars", "aaa\n\nb\n\naaa\n\nccc", "en", 0.3),
        ("top_3gram", "ab c d ab c d x", "en", 8 / 9),
        ("top_3gram", "\u4eca\u5929\u597d\u4eca\u5929\u597d", "zh", 1.0),
        ("duplicate_6grams", "a b c d e f a b c d e f", "en", 0.5),
        ("duplicate_7grams", "a b c d e f a b c d e f", "en", 0),
        ("duplicate_8grams", "a b c d e f g h x a b c d e f g h", "en", 8 / 17),
        ("duplicate_9grams", "a b c d e f g h x a b c d e f g h", "en", 0),
    ],
)
def test_measurements(name, text, lang, value):
    assert MEASURES[name](Stats(text, lang)) == (None if value is None else pytest.approx(value))


def test_every_measurement_is_tested_and_stands_an_empty_text():
    tested = {case[0] for case in test_measurements.pytestmark[0].args[1]}
    assert tested == set(MEASURES)
    for lang in ("en", "zh", ""):
        assert all(value in (0, None) for value in (f(Stats("", lang)) for f in MEASURES.values()))


def test_overlapping_repeats_are_counted_once():
    stats = Stats("a " * 10, "en")
    assert duplicate_ngram_share(stats, 2) == pytest.approx(9 / 10)  # the second 2-gram on: words 2..10
    assert top_ngram_share(stats, 2) == 1.0


def test_ngram_shares_equal_a_plain_count():
    """Against the definitions spelled out with tuples, on random words of different lengths."""
    rng = random.Random(0)
    for trial in range(30):
        words = [rng.choice(["a", "bb", "ccc", "dddd"][: 2 + trial % 3]) for _ in range(rng.randrange(1, 60))]
        total = sum(map(len, words))
        for n in (2, 3, 5):
            grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
            counts = Counter(grams)
            best = max(((c, len("".join(g))) for g, c in counts.items()), default=(1, 0))
            top = min(1.0, best[0] * best[1] / total) if best[0] > 1 else 0.0
            inside = {j for i, g in enumerate(grams) if g in grams[:i] for j in range(i, i + n)}
            stats = Stats(" ".join(words), "en")
            assert top_ngram_share(stats, n) == pytest.approx(top)
            assert duplicate_ngram_share(stats, n) == pytest.approx(sum(len(words[j]) for j in inside) / total)


def test_a_rule_that_is_null_is_off():
    check_rules({"words": None})
    assert first_violation("a", "en", {"words": None, "sentences": (3, None)}) == ("sentences", 0)
    with pytest.raises(ValueError, match="no filter 'wrods'"):
        check_rules({"wrods": None})


def test_first_violation_follows_the_order_of_the_rules():
    text = "Log in\n" * 20
    assert first_violation(text, "en", {"words": (100, None), "policy_lines": (None, 0.2)}) == ("words", 40)
    assert first_violation(text, "en", {"policy_lines": (None, 0.2), "words": (100, None)}) == ("policy_lines", 1.0)
    assert first_violation(text, "en", {"words": (10, 100)}) is None


def test_bounds_are_inclusive_and_rules_without_a_value_are_skipped():
    assert first_violation("a b c", "en", {"words": (3, 3)}) is None
    assert first_violation("kissa", "fi", {"stop_words": (0.5, None)}) is None


def test_wrong_rules_are_named():
    with pytest.raises(ValueError, match="no filter 'wrods'; there are words"):
        check_rules({"wrods": (1, 2)})
    with pytest.raises(ValueError, match="web.filters.words: low 3 is above high 2"):
        check_rules({"words": (3, 2)})


def test_prose_passes_the_default_profile_and_page_furniture_does_not():
    from pathlib import Path

    import yaml

    root = Path(filters.__file__).resolve().parents[1]
    rules = yaml.safe_load((root / "conf/tiny.yaml").read_text())["web"]["filters"]
    check_rules(rules)
    prose = (
        "The river rises in the hills to the north of the town and runs for some forty miles before it meets the sea. "
        "Its upper course is narrow and fast, and was once used to drive the wheels of several mills.\n\n"
        "In the last century a canal was cut beside it, so that boats could pass the falls. Most of that canal is dry now, "
        "but the locks are still to be seen, and a path follows the old bank from one village to the next."
    )
    assert first_violation(prose, "en", rules) is None
    menu = "\n".join(
        ["Home", "Sign in", "Register", "Forgot your password?", "Privacy Policy", "Terms of Use", "Help"] * 8
    )
    assert first_violation(menu, "en", rules) is not None

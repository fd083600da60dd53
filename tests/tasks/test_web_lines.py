"""C4's line rules and bad-word lists: every rule by hand, and in the stage by test_web.py."""

import json

import pytest

from tasks import web_lines
from tasks.web_lines import bad_words, check_line_rules, drop_lines, read_list

PAGE = "\n".join(
    [
        "Sea and rivers",  # no mark
        "The sea is wide and deep.",
        "And so on...",  # an ellipsis is no end
        "",
        'He said: "It is cold."',
        "Read on!",  # two words
        "Please enable Javascript to read this page.",
        "This site uses cookies to be better.",
        "x" * 1001 + " is a long word.",
        "\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002",
    ]
)


@pytest.mark.parametrize(
    "rules, dropped",
    [
        ({}, {}),
        ({"end_mark": True}, {"end_mark": [0, 2]}),
        ({"end_mark": False}, {}),
        ({"words": 3}, {"words": [5, 9]}),
        ({"words": 5}, {"words": [0, 2, 5, 9]}),
        ({"longest_word": 1000}, {"longest_word": [8]}),
        ({"javascript": True}, {"javascript": [6]}),
        ({"policy": True}, {"policy": [7]}),
        ({"policy": True, "javascript": True, "words": 3}, {"policy": [7], "javascript": [6], "words": [5, 9]}),
        ({"end_mark": True, "words": 5}, {"end_mark": [0, 2], "words": [5, 9]}),  # a line is named once, by the first
    ],
)
def test_each_rule_drops_its_lines(rules, dropped):
    lines = PAGE.split("\n")
    text, found = drop_lines(PAGE, "en", rules)
    assert found == {name: [lines[i] for i in where] for name, where in dropped.items()}
    gone = {i for where in dropped.values() for i in where}
    assert [x for x in text.split("\n") if x] == [x for i, x in enumerate(lines) if i not in gone and x]


def test_scripts_without_blanks_have_no_word_rules():
    line = "\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002"
    assert drop_lines(line, "zh", {"words": 3, "longest_word": 4, "end_mark": True}) == (line, {})
    assert drop_lines(line, "en", {"words": 3}) == ("", {"words": [line]})


def test_blank_lines_do_not_pile_up():
    assert drop_lines("A b.\n\nno\n\nC d.\n\nno", "en", {"end_mark": True})[0] == "A b.\n\nC d."


def test_mistakes_are_named():
    for rules, message in [
        ({"ends": True}, "no rule 'ends'; there are longest_word"),
        ({"words": True}, "web.lines.words: expected a number above 0, found True"),
        ({"words": 0}, "found 0"),
        ({"policy": 2}, "web.lines.policy: expected true or false, found 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_line_rules(rules)
    check_line_rules({"end_mark": True, "words": 3, "longest_word": 1000, "javascript": True, "policy": False})


def test_bad_words_are_whole_words_of_the_pages_language(tmp_path):
    english, every, chinese = tmp_path / "en.txt", tmp_path / "all.json", tmp_path / "zh.txt"
    english.write_text("# a comment\nfoo\nBad  Phrase\n\nc++\n")
    every.write_text(json.dumps(["xyzzy", "Plugh"]))
    chinese.write_text("\u574f\u8bdd\n", encoding="utf-8")
    lists = {"en": str(english), "*": str(every), "zh": str(chinese)}
    assert read_list(english) == ("bad phrase", "c++", "foo")
    for text, lang, count in [
        ("Foo, and foo again.", "en", 2),
        ("food is no foolery; _foo_ is one word", "en", 0),
        ("A bad\nphrase in C++!", "en", 2),
        ("foo", "fr", 0),  # the list of another language
        ("PLUGH", "fr", 1),
        ("\u8fd9\u662f\u574f\u8bdd\u5417", "zh", 1),
        ("foo", "zh", 0),
    ]:
        assert bad_words(text, lang, lists) == count, (text, lang)
    assert bad_words("foo", "en", {}) == 0


def test_lists_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "broken").write_text("[1, 2")
    (tmp_path / "numbers").write_text("[1, 2]")
    for name, message in [
        ("absent", "cannot be read"),
        ("empty", "lists no word"),
        ("broken", "JSON"),
        ("numbers", "strings"),
    ]:
        with pytest.raises(ValueError, match=f"{name}.*{message}"):
            read_list(tmp_path / name)
    assert web_lines.RULES.keys() == {"end_mark", "words", "longest_word", "javascript", "policy"}

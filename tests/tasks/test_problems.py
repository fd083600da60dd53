"""Families are deterministic, their splits disjoint and pattern-free, and their checks accept right answers only."""

from collections import Counter

import pytest

from tasks import problems
from tasks.calculator import calculate
from tasks.problems import build, mix, sample, samples, split_of, splitmix64
from tasks.problems_arithmetic import add_columns, subtract_columns
from tasks.problems_rules import Instruction

NAMES = ["addition", "chain_sum", "quantities", "calculator", "rules"]


def final_text(problem):
    turn = problem.solution[-1]
    return (f"{turn['reasoning_content']}</think>" if problem.thinking else "") + turn["content"]


def test_splitmix64_reference_values():
    # the first outputs of the published generator seeded with 0: state advances by the golden gamma each time
    gamma = 0x9E3779B97F4A7C15
    assert [splitmix64(i * gamma & (1 << 64) - 1) for i in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@pytest.mark.parametrize("name", NAMES)
def test_family(name):
    family = build(name)
    train, heldout = samples(family, "train", 0, 200), samples(family, "heldout", 0, 100)
    assert [p.key for p in train[:20]] == [sample(family, "train", i).key for i in range(20)]
    assert not {p.key for p in train} & {p.key for p in heldout}
    assert {split_of(name, p.key) for p in train} == {"train"}
    for problem in train + heldout:
        assert problem.verify(final_text(problem)) == 1.0
        assert problem.verify(final_text(problem) + "7") == 0.0
        assert problem.verify(final_text(problem) + "<|user|>") == 0.0
        assert problem.prompt.endswith("<think>" if problem.thinking else "</think>")


def test_split_is_about_a_tenth_and_hides_no_pattern():
    keys = [f"{a}+{b}" for a in range(10, 100) for b in range(a, 100)]
    held = [k for k in keys if split_of("addition", k) == "heldout"]
    assert 0.07 < len(held) / len(keys) < 0.13
    last = Counter(str(sum(map(int, k.split("+"))))[-1] for k in held)
    assert set(last) == set("0123456789") and max(last.values()) < 2.2 * min(last.values())


def test_mix_depends_on_every_part_and_their_borders():
    assert len({mix("ab", "c"), mix("a", "bc"), mix("abc"), mix("ab", "c", ""), mix("ab", "d")}) == 5


def test_columns():
    assert add_columns(384, 94) == "4+4+0=8;8+9+0=17;3+0+1=4;"
    assert add_columns(0, 0) == "0+0+0=0;"
    assert subtract_columns(42, 17) == "12-7-0=5;4-1-1=2;"
    for a in range(0, 130, 7):
        for b in range(0, a + 1, 5):
            digits = [c.split("=")[1] for c in subtract_columns(a, b).split(";")[:-1]]
            assert int("".join(reversed(digits))) == a - b
    with pytest.raises(ValueError, match="b <= a"):
        subtract_columns(1, 2)


def test_addition_needs_its_thinking_closed():
    problem = sample(build("addition"), "train", 0)
    answer = problem.answer
    assert problem.verify(f"x</think>{answer}") == 1.0
    assert problem.verify(answer) == 0.0
    assert problem.verify(f"x<tool_call></think>{answer}") == 0.0
    assert problem.verify(f"x</think></think>{answer}") == 0.0


def test_chain_sum_is_scored_by_reasoning_gym():
    family = build("chain_sum")
    drawn = samples(family, "train", 0, 60)
    assert any(p.answer.startswith("-") for p in drawn)
    for problem in drawn:
        assert problem.messages[0]["content"].startswith("State the final answer")
        assert problem.verify(f"</think>{int(problem.answer)}.0") == 1.0  # its own tolerance for trailing decimals
        assert problem.verify(f"</think>{int(problem.answer) + 1}") == 0.0


def test_quantities_prompt_exceeds_the_sparse_budget():
    # a tokenizer of the tiny profile's size, trained on other text: English prose from the standard library
    import pydoc_data.topics

    from tests.tasks.tiny_tokenizer import build as build_tokenizer

    tokenizer = build_tokenizer([str(text) for text in pydoc_data.topics.topics.values()], vocab_size=2048)
    problems_ = samples(build("quantities"), "heldout", 0, 50)
    assert min(len(p.prompt_ids(tokenizer)) for p in problems_) > 64


def test_calculator_solutions_are_the_tools_own_results():
    drawn = samples(build("calculator", two_call_share=0.5), "train", 0, 60)
    assert {len(p.solution) for p in drawn} == {3, 5}
    for problem in drawn:
        for call, result in zip(problem.solution[::2], problem.solution[1::2]):
            arguments = call["tool_calls"][0]["function"]["arguments"]
            assert calculate(arguments["expr"]) == result["content"]


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("RED, BLUE, PINK!", None),
        ("RED, BLUE, PINK", {"end"}),
        ("RED, BLUE!", {"count"}),
        ("RED, BLUE, RED!", {"distinct"}),
        ("red, BLUE, PINK!", {"category"}),
        ("RED, DOG, BLUE!", {"category"}),
        ("RED, GRAY, PINK!", {"keyword"}),
        ("", {"end", "count", "category", "keyword"}),
    ],
)
def test_rules(text, broken):
    instruction = Instruction("colors", 3, "blue", upper=True, end="!")
    assert {name for name, rule in instruction.rules().items() if not rule(text)} == (broken or set())
    assert instruction.check(text) == float(broken is None)
    assert instruction.share(text) == pytest.approx(1 - len(broken or ()) / 5)


def test_rules_without_an_end_mark():
    instruction = Instruction("animals", 2)
    assert instruction.check("dog, cat") == 1.0
    assert instruction.check("dog, cat.") == 0.0


def test_heldout_texts_are_held_out_and_user_errors_are_clear():
    texts = list(problems.heldout_texts(["addition"], n=5))
    assert len(texts) == 5 and all(text.startswith("What is ") for text in texts)
    with pytest.raises(ValueError, match="unknown problem family 'adition'"):
        build("adition")
    with pytest.raises(ValueError, match="family addition"):
        build("addition", hihg=3)
    with pytest.raises(ValueError, match="split"):
        sample(build("addition"), "test", 0)


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*(3+4)", "84"), ("-3--4/6", "-7/3"), ("7//2", "3"), ("-7%3", "2"), (" 1 + 2 ", "3"), ("0.5*4", "2")],
)
def test_calculate(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1+", "2**3", "1/0", "(1", "1)", "a", "1 2", "9" * 41, "9" * 30 + "*" + "9" * 30, "1+" * 70 + "1"],
)
def test_calculate_refuses(expression):
    with pytest.raises(ValueError):
        calculate(expression)


def test_credit_is_partial_where_a_family_has_it():
    rules = sample(build("rules"), "train", 0)
    assert rules.credit(rules.answer) == 1.0
    assert 0.0 < rules.credit(rules.answer + "?") < 1.0 and rules.verify(rules.answer + "?") == 0.0
    assert rules.credit(rules.answer + "<|user|>") == 0.0
    addition = sample(build("addition"), "train", 0)
    assert addition.credit(f"x</think>{addition.answer}") == 1.0 and addition.credit("x</think>0") == 0.0

"""Planted held-out problems are found and named; no sum of the training split is taken for another."""

import pytest

from tasks.problem_gate import MIN_TOKENS, ProblemGate, evaluated, known_families, question, question_tokens
from tasks.problems import build, registry, samples


@pytest.fixture(scope="module")
def gate():
    made = ProblemGate()
    for name, text in evaluated(known_families({}), 60):
        made.add(name, text)
    return made


def test_by_hand():
    made = ProblemGate()
    made.add("one", "What is 306+953?")
    made.add("two", "Count to 5.")
    made.add("three", "Why?")
    assert question_tokens("What is 306+953?") == ("what", "is", "306", "+", "953")
    for text, names in [
        ("what is 306 + 953", ["one"]),
        ("WHAT IS\u3000\uff13\uff10\uff16+953", ["one"]),  # full-width digits
        ("Tell me: what is 306+953? I count to 5.", ["one"]),  # `Count to 5` has three tokens: only as a whole message
        ("What is 0306+953?", ["one"]),
        ("What is 1306+953?", []),
        ("What is 306-953?", []),
        ("What is 306+9530?", []),
        ("What is 953+306?", []),
        ("306+953", []),
        ("count to 5", ["two"]),
        ("why", ["three"]),
        ("Why is that?", []),
        ("", []),
    ]:
        assert made.find(text) == names, text


def test_every_planted_problem_is_named(gate):
    for name in registry():
        for index, problem in enumerate(samples(build(name), "heldout", 0, 60)):
            asked = question(problem)
            text = asked if len(question_tokens(asked)) < MIN_TOKENS else f"Please help. {asked.upper()} Thanks."
            planted = [{"role": "user", "content": text}, {"role": "assistant", "content": "No."}]
            found = gate.find_in(planted)
            assert found and gate.find_problem(problem)[0] in found, (name, index, asked, found)
            assert all(n.startswith("problems/") for n in found)


def test_no_training_problem_is_taken_for_a_held_out_one(gate):
    for name in registry():
        for problem in samples(build(name), "train", 0, 300):
            assert gate.find_problem(problem) == [], question(problem)

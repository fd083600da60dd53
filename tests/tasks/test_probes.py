"""Probes: lengths and contents are exact, training and test cases are apart, and scores are those of known models."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tasks.probes import (
    MAJORITY,
    RecallRows,
    Symbols,
    build_probes,
    continuation_choice,
    draw_examples,
    is_test,
    mean_score,
    score_probes,
)
from tests.tasks.lm_case import VOCAB, write_tokens


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("probes") / "pack", documents=240)


@pytest.fixture(scope="module")
def symbols():
    """Symbols that the text of these tests (ids below 12) does not hold, so that facts can be read off the ids."""
    values = tuple(tuple(range(40 + 3 * k, 43 + 3 * k)) for k in range(6))
    return Symbols(20, 21, tuple(range(22, 28)), values, (30, 31, 32))


def facts_of(symbols, ids):
    """Facts in order of appearance: [(key, value)]."""
    return [
        (ids[i + 1], ids[i + 2]) for i, t in enumerate(ids[:-2]) if t == symbols.recall and ids[i + 1] in symbols.keys
    ]


class Reader(torch.nn.Module):
    """A model that answers from the text: the last value after the asked key, else the most frequent label; certain."""

    def __init__(self, symbols, window=None):
        super().__init__()
        self.symbols, self.window = symbols, window
        self.p = torch.nn.Parameter(torch.zeros(1))

    def forward(self, ids_bs, attention="dense"):
        out = torch.full((*ids_bs.shape, VOCAB), -5.0)
        for b, row in enumerate(ids_bs.tolist()):
            seen = row[:-2] if self.window is None else row[:-2][-self.window :]
            if row[-2] == self.symbols.recall:
                found = [seen[i + 1] for i in range(len(seen) - 1) if seen[i] == row[-1]]
            else:
                labels = [t for t in seen if t in self.symbols.labels]
                found = [max(set(labels), key=labels.count)] if labels else []
            if found:
                out[b, -1, found[-1]] = 5.0
        return SimpleNamespace(hidden_bsh=out)

    def logits(self, hidden):
        return hidden


def test_symbols_are_apart_and_have_text(tokens):
    symbols = Symbols.choose(tokens, keys=6, values=3, labels=3)
    flat = [symbols.recall, symbols.label, *symbols.keys, *symbols.labels, *(v for own in symbols.values for v in own)]
    assert len(flat) == len(set(flat)) == 2 + 6 + 3 + 18 and tokens.eot_id not in flat
    assert Symbols.choose(tokens, 6, 3, 3) == symbols
    with pytest.raises(ValueError, match="tokens have text"):
        Symbols.choose(tokens, keys=40, values=4)


def test_cases_are_as_long_as_asked_and_say_what_is_asked(tokens, symbols):
    cases = build_probes(tokens, symbols, [32, 64], 12, seed=0, facts=4)
    assert len(cases) == 3 * 2 * 12
    for case in cases:
        assert len(case.ids) == len(case.control_ids) == case.length
        assert case.ids != case.control_ids and case.answer in case.choices
        if case.task == "icl":
            labels = [t for t in case.ids if t in symbols.labels]
            others = [t for t in case.control_ids if t in symbols.labels]
            most = max(set(labels), key=labels.count)
            assert case.answer == most and max(set(others), key=others.count) != most and case.ids[-2] == symbols.label
            continue
        facts, wrong = facts_of(symbols, case.ids), facts_of(symbols, case.control_ids)
        assert len(facts) == (4 if case.task == "multi_key" else 1) == len(dict(facts))
        assert dict(facts)[case.ids[-1]] == case.answer != dict(wrong)[case.ids[-1]]
        assert set(facts) ^ set(wrong) == {(case.ids[-1], case.answer), (case.ids[-1], dict(wrong)[case.ids[-1]])}
        assert dict(wrong)[case.ids[-1]] in case.choices, "the control says another value of the same key"
    assert build_probes(tokens, symbols, [32, 64], 12, seed=0, facts=4) == cases
    with pytest.raises(ValueError, match="too short"):
        build_probes(tokens, symbols, [16], 1, 0, facts=5)


def test_needles_walk_over_the_depths(tokens, symbols):
    cases = [c for c in build_probes(tokens, symbols, [64], 10, 0, 2) if c.task == "needle"]
    places = [c.ids.index(symbols.recall) / 64 for c in cases]
    assert places == sorted(places) and places[0] < 0.1 and places[-1] > 0.75


def test_training_rows_repeat_facts_and_target_only_what_can_be_known(tokens, symbols):
    rows = RecallRows(tokens, symbols, 48, seed=1, keys=4, gap=2.0)
    distances = []
    for number in range(30):
        ids, targets = rows.row(number)
        assert ids.shape == targets.shape == (48,)
        again = rows.row(number)
        assert np.array_equal(ids, again[0]) and np.array_equal(targets, again[1])
        known: dict[int, tuple[int, int]] = {}
        for i in range(46):
            if ids[i] == symbols.recall and number % 3 != 2:
                key, value = int(ids[i + 1]), int(ids[i + 2])
                assert known.get(key, (value, 0))[0] == value, "a key says the same throughout a row"
                assert targets[i + 1] == (value if key in known else -100)
                if key in known:
                    distances.append(i - known[key][1])
                known[key] = (value, i)
        if number % 3 == 2:
            assert all(t in symbols.labels for t in targets[targets != -100]) and (targets[:20] == -100).all()
        assert (targets != -100).any() or number % 3 != 2
    assert max(distances) > 12, "some repetitions are far apart"
    assert not np.array_equal(rows.row(0)[0], rows.row(3)[0])


def test_training_and_test_cases_are_apart(tokens, symbols):
    """The hash puts about a quarter on the test's side, and every case that is built lies on its own."""
    rng = np.random.default_rng(0)
    sides = [is_test([(int(rng.integers(50)), 1)], [int(t) for t in rng.integers(90, size=8)]) for _ in range(2000)]
    assert 0.2 < np.mean(sides) < 0.3
    for case in build_probes(tokens, symbols, [32], 10, 0, 3):
        if case.task != "icl":
            facts = facts_of(symbols, case.ids)
            text = [t for i, t in enumerate(case.ids[:-2]) if symbols.recall not in case.ids[max(0, i - 2) : i + 1]]
            assert is_test(facts, text)
    rows = RecallRows(tokens, symbols, 96, seed=1, keys=3, gap=1.0)
    for number in range(24):
        ids = rows.row(number)[0].tolist()
        text = [t for i, t in enumerate(ids) if symbols.recall not in ids[max(0, i - 2) : i + 1]]
        if number % 3 != 2 and len(text) >= 8 and len(facts_of(symbols, ids)) > 12:
            assert not is_test(list(dict(facts_of(symbols, ids)).items()), text)


def test_examples_follow_the_contexts_own_label(symbols):
    shares = []
    for seed in range(40):
        _, labels = draw_examples(symbols, 60, np.random.default_rng(seed))
        shares.append(max(labels.count(v) for v in symbols.labels) / 60)
    assert abs(np.mean(shares) - MAJORITY) < 0.05


def test_scores_of_known_models(tokens, symbols):
    cases = build_probes(tokens, symbols, [32, 64], 10, seed=0, facts=3)
    found = score_probes(Reader(symbols), cases, batch_tokens=300)
    assert set(found) == {"needle", "multi_key", "icl"} and set(found["needle"]) == {"32", "64"}
    for by_length in found.values():
        for row in by_length.values():
            assert row["exact"] == row["choice"] == 1.0 and row["gain"] == pytest.approx(10.0, abs=1e-4)
    assert mean_score(found) == 1.0 and mean_score(found, "gain", 64) == pytest.approx(10.0, abs=1e-4)
    near = score_probes(Reader(symbols, window=20), cases)
    assert near["needle"]["64"]["exact"] < near["needle"]["32"]["exact"] < 1.0
    assert near["icl"]["64"]["exact"] > 0.5
    with pytest.raises(ValueError, match="no probe of length 48"):
        mean_score(found, length=48)


def test_continuation_choice_against_models_that_know_and_do_not(tokens):
    class Copier(torch.nn.Module):
        """Predicts the token that followed the last occurrence of the present one; the corpus repeats phrases."""

        def __init__(self, sign):
            super().__init__()
            self.sign, self.p = sign, torch.nn.Parameter(torch.zeros(1))

        def forward(self, ids_bs, attention="dense"):
            out = torch.zeros(*ids_bs.shape, VOCAB)
            for b, row in enumerate(ids_bs.tolist()):
                last = {}
                for i, t in enumerate(row):
                    if t in last:
                        out[b, i, last[t]] = 4.0 * self.sign
                    if i + 1 < len(row):
                        last[t] = row[i + 1]
            return SimpleNamespace(hidden_bsh=out)

        def logits(self, hidden):
            return hidden

    good = continuation_choice(Copier(1), tokens, 24, seed=0, context=16, length=6)
    bad = continuation_choice(Copier(-1), tokens, 24, seed=0, context=16, length=6)
    assert good["chance"] == 0.25 and good["questions"] == 24 and good["accuracy"] > 0.6 > 0.25 > bad["accuracy"]
    with pytest.raises(ValueError, match="held-out tokens for multiple choice"):
        continuation_choice(Copier(1), tokens, 4, 0, context=4000)

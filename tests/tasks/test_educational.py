"""Educational scores: weak labels by place, labels by a language model, stability on long documents."""

import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from tasks.educational import EducationalConfig, EducationalScorer, aggregate, train_scorer, weak_examples
from tasks.labeller import LabellerConfig
from tests.tasks.test_labeller import Endpoint

LESSON = (
    "Suppose that a number {} is divided by {}. The remainder is what is left over, and it is always smaller than the"
    " divisor, because otherwise we could take the divisor away once more. For example, consider the remainder of the"
    " product: it equals the product of the remainders, and so we can compute it step by step."
)
CHANGES = (
    "{}.{}.1\n- Fixed #{}\n- Added foo_{} option\n- Bumped bar to {}.{}\n- Removed baz()\n- CI: fix build\n- Typo (#{})"
)


def fill(template, rng, count):
    return "\n\n".join(template.format(*(rng.randrange(2, 99) for _ in range(7))) for _ in range(count))


@pytest.fixture
def acquired(tmp_path):
    rng, rows = random.Random(0), []
    files = {f"doc/tutorial/t{i}.rst": fill(LESSON, rng, 12) for i in range(8)}
    files |= {f"v{i}/CHANGES.rst": fill(CHANGES, rng, 12) for i in range(8)}
    files |= {"doc/tutorial/changelog.rst": "named by both " * 40, "doc/api.rst": "named by neither " * 40}
    files["LICENSE"] = "Redistribution and use in source and binary forms are permitted. " * 30
    for name, text in files.items():
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        kind = "licence" if name == "LICENSE" else "rst"
        row = {"item": "pkg", "path": f"files/{name}", "member": name, "kind": kind, "use": "train", "url": "u"}
        rows.append(row | {"sha256": name})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "index.parquet")
    return tmp_path


def test_the_place_of_a_file_is_its_weak_label(acquired):
    positives, negatives = weak_examples(acquired, EducationalConfig(chars=600))
    assert positives and all("remainder" in c for c in positives)
    assert any("Redistribution" in c for c in negatives) and any("Fixed" in c for c in negatives)
    assert not any("named by" in c for c in positives + negatives)
    capped, _ = weak_examples(acquired, EducationalConfig(chars=600, per_source=5))
    assert len(capped) == 5


def test_scores_of_long_documents_do_not_depend_on_order_or_front_matter(acquired, tmp_path):
    config = EducationalConfig(chars=600)
    scorer, about = train_scorer(acquired, None, config, LabellerConfig(), tmp_path)
    assert about["labels"] == "weak" and about["negatives"] >= 20
    rng = random.Random(1)
    lesson, changes = fill(LESSON, rng, 20), fill(CHANGES, rng, 20)
    assert scorer.score([lesson])[0] > 0.8 > 0.2 > scorer.score([changes])[0]
    mixed = lesson.split("\n\n") + changes.split("\n\n")
    permuted = []
    for _ in range(8):
        rng.shuffle(mixed)
        permuted.append("\n\n".join(mixed))
    permuted += [changes + "\n\n" + lesson, lesson + "\n\n" + changes]
    whole, first = scorer.score(permuted), scorer.chunk_scores([t[:600] for t in permuted])
    assert whole.std() < first.std() / 3
    assert abs(whole[-1] - whole[-2]) < 0.1 < abs(first[-1] - first[-2])


def test_a_language_model_overrules_the_place(acquired, tmp_path):
    """The endpoint answers the first digit in the text: the documents below say what they deserve."""
    rng = random.Random(2)
    good = [f"5 {fill(CHANGES, rng, 4)}" for _ in range(30)]
    bad = [f"0 {fill(LESSON, rng, 4)}" for _ in range(30)]
    with Endpoint() as server:
        config = server.config(documents=400)
        scorer, about = train_scorer(acquired, None, EducationalConfig(chars=600), config, tmp_path, good + bad)
    assert (
        about["labels"] == "language model"
        and about["label_stop"] == "done"
        and about["labelled"] + about["unparsable"] == len(server.asked)
    )
    with Endpoint() as server:
        config = server.config(documents=400, max_requests=10)
        _, about = train_scorer(acquired, None, EducationalConfig(chars=600), config, tmp_path / "b", good + bad)
    assert about["labels"] == "weak" and "budget" in about["label_stop"]


def test_too_few_examples_give_no_scorer(acquired, tmp_path):
    config = EducationalConfig(positives=("nothing-is-named-so",))
    assert train_scorer(acquired, None, config, LabellerConfig(), tmp_path) == (
        None,
        {"labels": "too few", "positives": 0, "negatives": weak_examples(acquired, config)[1].__len__()},
    )


def test_aggregate_is_what_it_says():
    scores, lengths = np.array([0.0, 1.0, 0.5, 0.5]), np.array([3.0, 1.0, 2.0, 2.0])
    assert aggregate(scores, lengths) == pytest.approx(0.75 * 3 / 8 + 0.25 * 1.0)


def test_a_pattern_that_does_not_compile_is_refused():
    with pytest.raises(ValidationError, match="no regular expression"):
        EducationalConfig(positives=("(",))


def test_regression_needs_both():
    with pytest.raises(ValueError, match="both classes"):
        EducationalScorer(None, EducationalConfig()).fit([], ["a b c"])

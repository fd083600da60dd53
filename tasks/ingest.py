"""Stage ingest: the user's own data, as `sources:` of params.yaml lists it, to records of one shape.

    dvc repro ingest            (or, for debugging: python -m tasks ingest)

Writes records/ (tasks/records.py), which web, code and math read beside data/acquire. An empty list gives an empty table.
"""

from __future__ import annotations

from tasks.records import write_records
from tasks.stage import Stage, StageConfig


class Config(StageConfig):
    """Parameters of the stage."""


def run(stage: Stage) -> None:
    if stage.params["sources"]:
        raise ValueError("ingest: no reader yet for the entries of sources:")
    summary = write_records(stage.out("data/ingest"), [])
    stage.metric(records=summary["records"])
    stage.rows(records=summary["records"])

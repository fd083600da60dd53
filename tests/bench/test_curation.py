"""The curation benches one after another, each printing its table: `make bench`. They read what the line made (make run)."""

import subprocess
import sys

import pytest

from tasks.params import ROOT

BENCHES = ("extraction", "identification", "quality", "judges", "dedup", "growth", "ingest_speed", "code_curation")


@pytest.mark.bench
@pytest.mark.parametrize("name", BENCHES)
def test_prints_its_figures(name):
    if not (ROOT / "data/web/documents").is_dir():
        pytest.skip("needs the line's documents (make run)")
    assert subprocess.run([sys.executable, "-m", f"tests.bench.{name}"], cwd=ROOT).returncode == 0

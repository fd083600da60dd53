"""Mathematical and scientific documents with their formulas kept as LaTeX (paper section 2.2: HTML extraction, PDF parsing).

    python -m tasks math

Read: reStructuredText, Markdown, TeX and PDF files of the index's `domains` (data/acquire), every page of its WARC files
that holds MathML or TeX, and the pages and PDFs among the user's own records (data/ingest). Each document gets
`math_score`, how mathematical it reads, by chunk and aggregate: every chunk is scored alone; the length-weighted mean is
`math_score`, the best chunk `math_max`; `educational` is how useful it is for teaching (tasks/educational.py). What falls
below a limit is in the exclusions table; a PDF or TeX source that cannot be read is in rejects/ with its reason. audit/
holds samples of kept and removed text for a person to read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from tasks import documents, tex_source
from tasks.code_text import is_training_file
from tasks.educational import EducationalConfig, EducationalScorer, train_scorer
from tasks.labeller import LabellerConfig
from tasks.machine_text import MachineTextConfig, MachineTextDetector
from tasks.mapshuffle import EngineConfig, open_engine
from tasks.math_audit import Audit
from tasks.math_units import read_unit
from tasks.quality import StaticEmbedder
from tasks.records import record_shards
from tasks.stage import Stage
from tasks.texts import read_index

FILES_PER_UNIT = 64


class Config(EngineConfig):
    domains: tuple[str, ...] = Field(("math",), description="domains of the index whose files are read")
    pages: bool = Field(True, description="look for mathematical pages in the WARC files too")
    min_chars: int = Field(400, ge=0, description="shorter documents are left out")
    max_chars: int = Field(400_000, ge=1, description="longer documents are cut there, at a paragraph")
    min_formulas: int = Field(
        2, ge=0, description="formulas, or stretches of text with mathematical characters, that a document must hold"
    )
    min_score: float = Field(0.05, ge=0, le=1, description="limit on math_score")
    chunk_chars: int = Field(2000, ge=100, description="length of the chunks that are scored")
    max_pdf_pages: int = Field(0, ge=0, description="pages read per PDF; 0: all")
    reject_pdf_pages: int = Field(5000, ge=1, description="a PDF of more pages is rejected")
    pdf_seconds: float = Field(60.0, gt=0, description="time for one PDF; then it is rejected")
    educational: EducationalConfig | None = Field(EducationalConfig(), description="the educational scorer; null: none")
    labeller: LabellerConfig = Field(LabellerConfig(), description="a language model to distil its labels from")
    embedder: str = Field("models/potion-base-8M", description="its embedding model, below data/acquire")
    machine_text: MachineTextConfig | None = Field(
        MachineTextConfig(), description="limit on machine-made text; null: none is left out for it"
    )
    min_educational: float = Field(0.0, ge=0, le=1, description="limit on educational; 0: none is left out for it")
    pdf_memory_mb: int = Field(2048, ge=256, description="memory of the process that reads PDFs")


def _scorer(stage: Stage) -> tuple[EducationalScorer | None, dict[str, object]]:
    config: Config = stage.config
    if config.educational is None:
        return None, {}
    acquired = stage.dep("data/acquire")
    folder = acquired / config.embedder
    embedder = StaticEmbedder(folder) if folder.is_dir() else None
    return train_scorer(acquired, embedder, config.educational, config.labeller, stage.root / "work" / "labels")


def _units(stage: Stage) -> dict[str, dict]:
    """Arguments of `read_unit` by name, in the order in which the documents are written."""
    config: Config = stage.config
    acquired = stage.dep("data/acquire")
    rows = [
        row
        for row in read_index(acquired)
        if row["domain"] in config.domains and row["kind"] != "code" and is_training_file(row)
    ]
    sources = [acquired / r["path"] for r in rows if r["path"].lower().endswith((".tex", ".ltx", ".tex.gz"))]
    parts = tex_source.parts_of_articles(sources)
    rows = [row for row in rows if (acquired / row["path"]).resolve() not in parts]
    limits = {
        "read_pages": config.max_pdf_pages,
        "max_pages": config.reject_pdf_pages,
        "seconds": config.pdf_seconds,
        "memory_bytes": config.pdf_memory_mb << 20,
    }
    found: dict[str, dict] = {}
    for i in range(0, len(rows), FILES_PER_UNIT):
        found[f"files-{i:07d}"] = {"acquired": str(acquired), "rows": rows[i : i + FILES_PER_UNIT]}
    for path in record_shards(stage.dep("data/ingest")):
        found[f"records-{path.stem}"] = {"records": str(path)}
    if config.pages:
        for path in sorted((acquired / "warc").glob("*.warc*")):
            found[f"pages-{path.name}"] = {"warc": str(path)}
    shared = {"limits": limits, "max_chars": config.max_chars, "chunk_chars": config.chunk_chars}
    return {n: u | shared | {"out": str(stage.scratch / "units" / f"{n}.jsonl")} for n, u in found.items()}


def _rows(path: Path) -> Iterator[dict]:
    with open(path, encoding="utf-8") as handle:
        yield from map(json.loads, handle)


def run(stage: Stage) -> None:
    config: Config = stage.config
    out = stage.out("data/math")
    kinds: Counter[str] = Counter()
    audit = Audit(out / "audit")
    scorer, about = _scorer(stage)
    detector = MachineTextDetector() if config.machine_text else None
    names = ("math_score", "math_max", *(("educational",) if scorer else ()))
    units = _units(stage)
    with open_engine(config) as engine:
        results = engine.map(read_unit, units, stage.scratch / "read")
        for result in stage.progress(results, total=len(units), label="units"):
            stage.seen(result["seen"])
            for rejected in result["rejects"]:
                stage.reject(*rejected)
            audit.carried(result["carriers"], result["lost"])
            audit.removed("pdf", result["lines"], result["examples"])

    def verdict(row: dict) -> tuple[str, float] | None:
        """The rule that removes a document, and what it compared."""
        if len(row["text"]) < config.min_chars:
            return "too_short", len(row["text"])
        if row["formulas"] < config.min_formulas:
            return "few_formulas", row["formulas"]
        if row["math_score"] < config.min_score:
            return "math_score", row["math_score"]
        if detector and (made := detector.made([row["text"]], config.machine_text)[0]) is not None:
            return "machine_text", made
        if scorer:
            row["educational"] = round(float(scorer.score([row["text"]])[0]), 6)
            if row["educational"] < config.min_educational:
                return "educational", row["educational"]
        return None

    def kept() -> Iterator[dict]:
        for row in (row for unit in units.values() for row in _rows(Path(unit["out"]))):
            removed = verdict(row)
            audit.document(row, row["formulas"], row["math_score"], removed)
            if removed:
                excluded.add(row, *removed)
                continue
            kinds[row["meta"]["kind"]] += 1
            meta = row["meta"] | {"formulas": row["formulas"]}
            scores = {name: row[name] for name in names}
            yield documents.document(
                row["text"], row["source"], "math", url=row["url"], lang=row["lang"], meta=meta, **scores
            )

    with documents.Exclusions(out) as excluded:
        written = documents.write_documents(out, kept(), rows_per_shard=1024, scores=names)
    audit.write()
    stage.rows(documents=written["documents"], excluded=sum(excluded.counts.values()))
    stage.metric(
        documents=written["documents"],
        bytes=written["bytes"],
        formulas=audit.formulas,
        kinds=dict(sorted(kinds.items())),
        carriers=dict(sorted(audit.carriers.items())),
        educational=about,
        removed=dict(sorted(excluded.counts.items())),
        pdf_lines_removed=dict(sorted(audit.lines["pdf"].items())),
    )
    stage.artifact(out / "audit" / "samples.html")
    stage.print(f"{written['documents']} documents with {audit.formulas} formulas, removed {dict(excluded.counts)}")

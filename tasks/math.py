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

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from tasks import documents, latex, pdf, tex_source
from tasks.code_text import is_training_file
from tasks.educational import EducationalConfig, EducationalScorer, train_scorer
from tasks.extract import NotText
from tasks.labeller import LabellerConfig
from tasks.machine_text import MachineTextConfig, MachineTextDetector
from tasks.math_audit import Audit
from tasks.math_html import extract_math_page, has_math_markup
from tasks.quality import StaticEmbedder
from tasks.records import read_records
from tasks.stage import Stage, StageConfig
from tasks.texts import read_index

_WORDS = frozenset(
    "theorem proof lemma corollary proposition definition equation function derivative integral matrix vector polynomial prime"
    " integer real complex sum product series limit let suppose assume hence thus therefore where given compute solve solution"
    " example exercise formula variable algebra geometry probability distribution sequence convergence root factor modulo"
    " group ring field ideal elliptic curve algorithm linear differential coefficient exponent logarithm set map space"
    " energy force mass velocity acceleration momentum temperature pressure electron atom molecule reaction equilibrium"
    " quantum wave frequency charge potential entropy hypothesis experiment measurement theory".split()
)
_UNICODE_MATH = re.compile(r"[∀-⋿⟀-⟯⨀-⫿←-⇿ℂℕℙℚℝℤα-ωΓΔΘΛΞΠΣΦΨΩ±×÷]|\w\^[\w{]|\w_\{|\b[A-Za-z]_[A-Za-z0-9]\b")
_READERS = {"rst": latex.rst_to_text, "md": latex.markdown_to_text}


class Config(StageConfig):
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


def chunk_score(text: str) -> float:
    """In [0, 1]: formulas per length, mathematical vocabulary, and connected prose, each saturating.

    A reference list of names scores low for its lack of sentences, a novel for its lack of formulas.
    """
    if not text.strip():
        return 0.0
    length = len(text)
    formulas = sum(min(len(s), 200) for s in latex.math_spans(text)) + 4 * len(_UNICODE_MATH.findall(text))
    density = min(1.0, formulas / length / 0.12)
    words = re.findall(r"[^\W\d_]{2,}", text.lower())
    vocabulary = min(1.0, sum(w in _WORDS for w in words) / max(1, len(words)) / 0.05)
    sentences = len(re.findall(r"[a-z)$\]][.?!](?:\s|$)", text))
    prose = min(1.0, sentences * 150 / length) * min(1.0, sum(map(len, words)) / length / 0.5)
    return density * (0.4 + 0.3 * vocabulary + 0.3 * prose) if density else 0.0


def score(text: str, chunk_chars: int) -> tuple[float, float]:
    """(length-weighted mean, maximum) of the chunk scores."""
    chunks = [text[i : i + chunk_chars] for i in range(0, len(text), chunk_chars)] or [""]
    scores = [chunk_score(c) for c in chunks]
    mean = sum(s * len(c) for s, c in zip(scores, chunks)) / max(1, len(text))
    return round(mean, 6), round(max(scores), 6)


def formula_count(text: str) -> int:
    """Formulas in TeX delimiters, plus stretches of a hundred characters that hold mathematical characters outside of them."""
    rest = latex._SPAN.sub(" ", text)
    return len(latex.math_spans(text)) + len({m.start() // 100 for m in _UNICODE_MATH.finditer(rest)})


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, ending with a paragraph where one ends in the second half."""
    if len(text) <= limit:
        return text
    end = text.rfind("\n\n", limit // 2, limit)
    return text[: end if end > 0 else limit]


class _Sources:
    """Texts of files, pages and records; what cannot be read goes to the stage's rejects with its reason."""

    def __init__(self, stage: Stage, reader: pdf.Reader, audit: Audit):
        self.stage, self.config, self.reader, self.audit = stage, stage.config, reader, audit

    def _pdf(self, content: bytes) -> str:
        found = self.reader.read(content)
        self.audit.removed("pdf", found.removed, found.examples)
        return found.text

    def _html(self, content: bytes, charset: str = "") -> str:
        found = extract_math_page(content, charset)
        self.audit.carried(found.carriers, found.lost)
        return found.page.text

    def _file(self, path: Path, kind: str) -> str:
        suffix = path.name.rpartition(".")[2].lower()
        if kind == "pdf" or suffix == "pdf":
            return self._pdf(path.read_bytes())
        if kind == "tex" or suffix == "tex":
            return tex_source.read_source(path)
        data = path.read_bytes()
        if kind == "html" or suffix in ("html", "htm", "xhtml"):
            return self._html(data)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError("not UTF-8 text") from None
        reader = _READERS.get(suffix) or _READERS.get(kind)
        return reader(text) if reader else latex.dollars(text)

    def _reject(self, name: str, error: Exception) -> None:
        self.stage.reject(name, getattr(error, "reason", "unreadable"), getattr(error, "detail", str(error)))

    def files(self) -> Iterator[dict]:
        acquired = self.stage.dep("data/acquire")
        rows = [
            row
            for row in read_index(acquired)
            if row["domain"] in self.config.domains and row["kind"] != "code" and is_training_file(row)
        ]
        sources = [acquired / r["path"] for r in rows if r["path"].lower().endswith((".tex", ".ltx", ".tex.gz"))]
        parts = tex_source.parts_of_articles(sources)
        for row in self.stage.progress(rows, label="files"):
            if (acquired / row["path"]).resolve() in parts:
                continue
            self.stage.seen()
            try:
                text = self._file(acquired / row["path"], row["kind"])
            except (ValueError, OSError) as error:
                self._reject(row["path"], error)
                continue
            inner = row.get("member") or row["path"].removeprefix("files/").partition("/")[2]
            yield {
                "text": text,
                "source": f"{row['item']}/{row['version']}/{inner}",
                "url": row.get("url") or "",
                "meta": {"kind": row["kind"], "licence": row["licence"], "item": row["item"]},
            }

    def pages(self) -> Iterator[dict]:
        from tasks.warc import BadRecord, read_warc

        folder = self.stage.dep("data/acquire") / "warc"
        for path in self.stage.progress(sorted(folder.glob("*.warc*")), label="WARC files"):
            for page in read_warc(path):
                if isinstance(page, BadRecord):
                    self.stage.reject(page.record_id, page.reason, page.detail)
                elif has_math_markup(page.body):
                    self.stage.seen()
                    try:
                        text = self._html(page.body)
                    except NotText as error:
                        self._reject(page.url, error)
                        continue
                    meta = {"kind": "html", "item": page.package}
                    yield {"text": text, "source": page.package or path.name, "url": page.url, "meta": meta}

    def records(self) -> Iterator[dict]:
        """PDFs, and pages with formulas, of the user's own sources."""
        for record in read_records(self.stage.dep("data/ingest"), kinds=("pdf", "html")):
            if record.kind == "html" and not has_math_markup(record.content):
                continue
            self.stage.seen()
            try:
                text = self._pdf(record.content) if record.kind == "pdf" else self._html(record.content, record.charset)
            except ValueError as error:
                self._reject(record.id, error)
                continue
            meta = {"kind": record.kind, "licence": record.licence, "item": record.source, "path": record.path}
            yield {"text": text, "source": record.source, "url": record.url, "lang": record.lang, "meta": meta}


def _scorer(stage: Stage) -> tuple[EducationalScorer | None, dict[str, object]]:
    config: Config = stage.config
    if config.educational is None:
        return None, {}
    acquired = stage.dep("data/acquire")
    folder = acquired / config.embedder
    embedder = StaticEmbedder(folder) if folder.is_dir() else None
    return train_scorer(acquired, embedder, config.educational, config.labeller, stage.root / "work" / "labels")


def run(stage: Stage) -> None:
    config: Config = stage.config
    out = stage.out("data/math")
    kinds: Counter[str] = Counter()
    audit = Audit(out / "audit")
    scorer, about = _scorer(stage)
    detector = MachineTextDetector() if config.machine_text else None
    names = ("math_score", "math_max", *(("educational",) if scorer else ()))
    limits = pdf.Limits(
        read_pages=config.max_pdf_pages,
        max_pages=config.reject_pdf_pages,
        seconds=config.pdf_seconds,
        memory_bytes=config.pdf_memory_mb << 20,
    )

    def judged(sources: _Sources) -> Iterator[tuple[dict, int, tuple[str, float] | None]]:
        """(row with its scores, formulas, what it is removed for)."""
        parts = [sources.files(), sources.records()] + ([sources.pages()] if config.pages else [])
        for found in (row for part in parts for row in part):
            text = cut(found["text"], config.max_chars)
            count = formula_count(text)
            mean, best = score(text, config.chunk_chars)
            row = found | {"text": text, "math_score": mean, "math_max": best}
            verdict = None
            if len(text) < config.min_chars:
                verdict = ("too_short", len(text))
            elif count < config.min_formulas:
                verdict = ("few_formulas", count)
            elif mean < config.min_score:
                verdict = ("math_score", mean)
            elif detector and (made := detector.made([text], config.machine_text)[0]) is not None:
                verdict = ("machine_text", made)
            elif scorer:
                row["educational"] = round(float(scorer.score([text])[0]), 6)
                if row["educational"] < config.min_educational:
                    verdict = ("educational", row["educational"])
            yield row, count, verdict

    def kept(sources: _Sources) -> Iterator[dict]:
        for row, count, verdict in judged(sources):
            audit.document(row, count, row["math_score"], verdict)
            if verdict:
                excluded.add(row, *verdict)
                continue
            kinds[row["meta"]["kind"]] += 1
            meta = row["meta"] | {"formulas": count}
            scores = {name: row[name] for name in names}
            lang = row.get("lang", "")
            yield documents.document(row["text"], row["source"], "math", url=row["url"], lang=lang, meta=meta, **scores)

    with documents.Exclusions(out) as excluded, pdf.Reader(limits) as reader:
        rows = kept(_Sources(stage, reader, audit))
        written = documents.write_documents(out, rows, scores=names)
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

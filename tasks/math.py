"""Mathematical documents with their formulas kept as LaTeX (paper section 2.2: refined HTML extraction and PDF parsing).

    python -m tasks math

From data/acquire: reStructuredText, Markdown, TeX and PDF files of the index's `domains`, and every page of the WARC files
that holds MathML or TeX. Each document gets `math_score`, how educational and mathematical it reads, by chunk and
aggregate: every chunk is scored alone; the length-weighted mean is `math_score`, the best chunk `math_max`. What falls
below a limit is in the exclusions table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from tasks import documents, latex
from tasks.code import is_training_file
from tasks.stage import Stage, StageConfig
from tasks.texts import read_index

_WORDS = frozenset(
    "theorem proof lemma corollary proposition definition equation function derivative integral matrix vector polynomial prime"
    " integer real complex sum product series limit let suppose assume hence thus therefore where given compute solve solution"
    " example exercise formula variable algebra geometry probability distribution sequence convergence root factor modulo"
    " group ring field ideal elliptic curve algorithm linear differential coefficient exponent logarithm set map space".split()
)
_UNICODE_MATH = re.compile(r"[∀-⋿⟀-⟯⨀-⫿←-⇿ℂℕℙℚℝℤα-ωΓΔΘΛΞΠΣΦΨΩ±×÷]|\w\^\w|\w_\{")
_READERS = {"rst": latex.rst_to_text, "tex": latex.tex_to_text, "md": latex.markdown_to_text}


class Config(StageConfig):
    domains: tuple[str, ...] = Field(("math",), description="domains of the index whose files are read")
    pages: bool = Field(True, description="look for mathematical pages in the WARC files too")
    min_chars: int = Field(400, ge=0, description="shorter documents are left out")
    max_chars: int = Field(400_000, ge=1, description="longer documents are cut there, at a paragraph")
    min_formulas: int = Field(
        2, ge=0, description="formulas, or lines with mathematical characters, that a document must hold"
    )
    min_score: float = Field(0.05, ge=0, le=1, description="limit on math_score")
    chunk_chars: int = Field(2000, ge=100, description="length of the chunks that are scored")
    max_pdf_pages: int = Field(0, ge=0, description="pages read per PDF; 0: all")


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
    """Formulas in TeX delimiters, plus lines that hold mathematical characters outside of them."""
    rest = latex._SPAN.sub(" ", text)
    return len(latex.math_spans(text)) + sum(1 for line in rest.split("\n") if _UNICODE_MATH.search(line))


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, ending with a paragraph where one ends in the second half."""
    if len(text) <= limit:
        return text
    end = text.rfind("\n\n", limit // 2, limit)
    return text[: end if end > 0 else limit]


def _file_text(path: Path, kind: str, config: Config) -> str:
    suffix = path.name.rpartition(".")[2].lower()
    if kind == "pdf" or suffix == "pdf":
        from tasks.pdf import pdf_to_text

        return pdf_to_text(path, config.max_pdf_pages)[0]
    data = path.read_bytes()
    if kind == "html" or suffix in ("html", "htm", "xhtml"):
        return latex.html_to_text(data)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        if kind != "tex" and suffix != "tex":
            raise ValueError("not UTF-8 text") from None
        text = data.decode("latin-1")  # TeX sources older than UTF-8 rarely say what they are in
    reader = _READERS.get(suffix) or _READERS.get(kind)
    return reader(text) if reader else latex.dollars(text)


def _from_files(stage: Stage, config: Config) -> Iterator[dict]:
    acquired = stage.dep("data/acquire")
    index = read_index(acquired)
    rows = [r for r in index if r["domain"] in config.domains and r["kind"] != "code" and is_training_file(r)]
    for row in stage.progress(rows, label="files"):
        stage.seen()
        try:
            text = _file_text(acquired / row["path"], row["kind"], config)
        except (ValueError, OSError) as error:
            stage.reject(row["path"], "unreadable", str(error))
            continue
        inner = row.get("member") or row["path"].removeprefix("files/").partition("/")[2]
        yield {
            "text": text,
            "source": f"{row['item']}/{row['version']}/{inner}",
            "url": row.get("url") or "",
            "meta": {"kind": row["kind"], "licence": row["licence"], "item": row["item"]},
        }


def _from_pages(stage: Stage) -> Iterator[dict]:
    from tasks.warc import BadRecord, read_warc

    acquired = stage.dep("data/acquire")
    for path in stage.progress(sorted((acquired / "warc").glob("*.warc*")), label="WARC files"):
        for page in read_warc(path):
            if isinstance(page, BadRecord):
                stage.reject(page.record_id, page.reason, page.detail)
            elif latex.has_math_markup(page.body):
                stage.seen()
                yield {
                    "text": latex.html_to_text(page.body),
                    "source": page.package or path.name,
                    "url": page.url,
                    "meta": {"kind": "html", "item": page.package},
                }


def run(stage: Stage) -> None:
    config: Config = stage.config
    out = stage.out("data/math")
    kinds: Counter[str] = Counter()
    formulas = 0

    def kept() -> Iterator[dict]:
        nonlocal formulas
        sources = [_from_files(stage, config)] + ([_from_pages(stage)] if config.pages else [])
        for found in (row for source in sources for row in source):
            text = cut(found["text"], config.max_chars)
            row = found | {"text": text}
            count = formula_count(text)
            mean, best = score(text, config.chunk_chars)
            if len(text) < config.min_chars:
                excluded.add(row, "too_short", len(text))
            elif count < config.min_formulas:
                excluded.add(row, "few_formulas", count)
            elif mean < config.min_score:
                excluded.add(row, "math_score", mean)
            else:
                kinds[found["meta"]["kind"]] += 1
                formulas += count
                meta = found["meta"] | {"formulas": count}
                yield documents.document(
                    text, found["source"], "math", url=found["url"], meta=meta, math_score=mean, math_max=best
                )

    with documents.Exclusions(out) as excluded:
        written = documents.write_documents(out, kept(), scores=("math_score", "math_max"))
    stage.rows(documents=written["documents"], excluded=sum(excluded.counts.values()))
    stage.metric(
        documents=written["documents"],
        bytes=written["bytes"],
        formulas=formulas,
        kinds=dict(sorted(kinds.items())),
        removed=dict(sorted(excluded.counts.items())),
    )
    stage.print(f"{written['documents']} documents with {formulas} formulas, removed {dict(excluded.counts)}")

"""Text of PDFs through pdfium: reading order, scripts, running heads, hyphenation (pdf_chars, pdf_layout, pdf_text).

    python -m tasks.pdf FILE.pdf        (prints the text; --report: what was removed)

Formulas come out as the characters on the page, with ^ and _ where glyphs stand higher or lower. `Reader` reads in a process
of its own with a memory limit and a time limit per document, so that no PDF can take the caller down.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from tasks.params import ROOT
from tasks.pdf_chars import page_runs
from tasks.pdf_layout import page_lines
from tasks.pdf_text import clean


class BadPdf(ValueError):
    """A PDF that is not read; `reason` is one word for counting, the message says more."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail

    def __reduce__(self) -> tuple:
        return BadPdf, (self.reason, self.detail)


@dataclass(frozen=True)
class Limits:
    """What one document may cost: pages read (0: all), pages it may have, characters on a page and in all, seconds, bytes."""

    read_pages: int = 0
    max_pages: int = 5000
    page_chars: int = 200_000
    document_chars: int = 20_000_000
    seconds: float = 60.0
    memory_bytes: int = 2 << 30


@dataclass
class PdfText:
    """`text`, pages read, pages in the file, what was removed by rule with examples."""

    text: str
    read: int
    pages: int
    removed: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)


_ERRORS = ((" password", "encrypted"), ("Data format", "not_pdf"), ("format", "not_pdf"), ("security", "encrypted"))


def read_pdf(source: Path | bytes, limits: Limits = Limits(), **parts: bool) -> PdfText:
    """Text of a PDF, in this process. BadPdf with its reason: encrypted, not_pdf, truncated, too_many_pages, too_large, no_text.

    `parts` switches off a part for measuring: `columns`, `scripts`, and those of `pdf_text.clean`.
    """
    import pypdfium2

    data = source if isinstance(source, bytes) else source.read_bytes()
    if b"%PDF-" not in data[:1024]:
        raise BadPdf("not_pdf", f"no %PDF- header among the first 1024 of {len(data)} bytes")
    try:
        document = pypdfium2.PdfDocument(data)
        count = len(document)
    except pypdfium2.PdfiumError as error:
        message = str(error)
        reason = next((r for word, r in _ERRORS if word in message), "not_pdf")
        if reason == "not_pdf" and b"%%EOF" not in data[-2048:]:
            reason = "truncated"
        raise BadPdf(reason, f"pdfium: {message}") from None
    try:
        if count > limits.max_pages:
            raise BadPdf("too_many_pages", f"{count} pages, more than {limits.max_pages}")
        layout = {k: parts.pop(k) for k in ("columns", "scripts") if k in parts}
        pages, chars, failed = [], 0, 0
        for number in range(min(count, limits.read_pages or count)):
            try:
                page = document[number]
            except pypdfium2.PdfiumError:
                failed += 1
                pages.append([])
                continue
            try:
                lines = page_lines(page_runs(page, limits.page_chars), **layout)
            except ValueError as error:
                raise BadPdf("too_large", f"page {number + 1}: {error}") from None
            finally:
                page.close()
            chars += sum(len(line.text) for line in lines)
            if chars > limits.document_chars:
                raise BadPdf("too_large", f"more than {limits.document_chars} characters by page {number + 1}")
            pages.append(lines)
    finally:
        document.close()
    if not chars:
        if failed:
            raise BadPdf("truncated", f"{failed} of {count} pages cannot be loaded")
        raise BadPdf("no_text", f"no characters on {count} pages (scanned, or drawn)")
    cleaned = clean(pages, **parts)
    return PdfText(cleaned.text, len(pages), count, dict(sorted(cleaned.removed.items())), cleaned.examples)


def _serve(limits: Limits) -> None:
    """The child: PDFs come on standard input, answers go out as JSON, each after its length in eight bytes."""
    out = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not get between the answers
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while len(head := sys.stdin.buffer.read(8)) == 8:
        source = sys.stdin.buffer.read(int.from_bytes(head))
        try:
            found = asdict(read_pdf(source, limits))
        except BadPdf as error:
            found = {"bad": [error.reason, error.detail]}
        except MemoryError:
            found = {"bad": ["memory", f"more than {limits.memory_bytes >> 20} MiB"]}
        except Exception as error:  # whatever a stranger's file provokes is that file's fault
            found = {"bad": ["unreadable", f"{type(error).__name__}: {error}"]}
        answer = json.dumps(found).encode()
        view = memoryview(len(answer).to_bytes(8) + answer)
        while view:
            view = view[os.write(out, view) :]


class Reader:
    """Reads PDFs in a child process, started at the first document and again after one that killed it. A context manager."""

    def __init__(self, limits: Limits = Limits()):
        self.limits = limits
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            with contextlib.suppress(OSError):  # what it did not take any more
                self._process.stdin.close()
            self._process = None

    def _receive(self, size: int, deadline: float) -> bytes:
        data, handle = b"", self._process.stdout
        while len(data) < size:
            if not select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(handle.fileno(), min(1 << 20, size - len(data)))
            if not part:
                raise EOFError
            data += part
        return data

    def read(self, source: Path | bytes) -> PdfText:
        """As `read_pdf`; BadPdf also with the reasons timeout, crashed and memory."""
        data = source if isinstance(source, bytes) else source.read_bytes()
        if self._process is None:
            command = [sys.executable, "-m", "tasks.pdf", "--serve", json.dumps(asdict(self.limits))]
            self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self._process.stdin.write(len(data).to_bytes(8) + data)
            self._process.stdin.flush()
            deadline = time.monotonic() + self.limits.seconds
            answer = self._receive(int.from_bytes(self._receive(8, deadline)), deadline)
        except TimeoutError:
            self.close()
            raise BadPdf("timeout", f"not read in {self.limits.seconds:g} s") from None
        except (EOFError, OSError):
            code = self._process.wait()
            self.close()
            raise BadPdf("crashed", f"the reading process ended with {code}") from None
        found = json.loads(answer)
        if "bad" in found:
            raise BadPdf(*found["bad"])
        return PdfText(**found)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the text of a PDF.")
    if sys.argv[1:2] == ["--serve"]:
        return _serve(Limits(**json.loads(sys.argv[2])))
    parser.add_argument("file", type=Path)
    parser.add_argument("--pages", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="print what was removed by rule instead")
    args = parser.parse_args()
    with Reader(Limits(read_pages=args.pages)) as reader:
        found = reader.read(args.file)
    print((found.removed, found.examples) if args.report else found.text)


if __name__ == "__main__":
    main()

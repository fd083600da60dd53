"""Main-content extraction beside trafilatura, resiliparse and readability-lxml: F1 and pages per CPU second, in one run.

    python -m tests.bench.extraction                         # ../shared/gold/article-extraction, 181 pages
    python -m tests.bench.extraction --pages WCXB/test       # a folder of html/*.html.gz and ground-truth/*.json
    python -m tests.bench.extraction --sample 60             # every third page or so: quicker

The score is the article-extraction-benchmark's: true, false and missing 4-token shingles per page (as a multiset),
precision and recall per page, each averaged over pages, F1 of the two means. Contestants take turns page by page, from
bytes to text, charset detection included for ours (the others get decoded text); CPU time of the process, one thread.
"""

import argparse
import gzip
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

GOLD = Path(__file__).resolve().parents[3] / "shared/gold/article-extraction"
REQUIRED_F1, REQUIRED_SPEED = 0.950, 4.0
_TOKEN = re.compile(r"\w+")
_WIDE = re.compile(r"[\u3040-\u9fff\u0e00-\u0fff]|[^\W\u3040-\u9fff\u0e00-\u0fff]+")


def shingles(text: str, n: int = 4, pattern: re.Pattern = _TOKEN) -> Counter:
    """The benchmark's 4-grams of tokens; a text shorter than that is one shingle."""
    words = pattern.findall(text)
    return Counter(tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1)))


def precision_recall(found: str, expected: str, pattern: re.Pattern = _TOKEN) -> tuple[float, float]:
    """Precision and recall over shingles of one page, as the benchmark defines them for empty texts."""
    got, want = shingles(found, pattern=pattern), shingles(expected, pattern=pattern)
    hit = sum((got & want).values())
    extra, missing = sum(got.values()) - hit, sum(want.values()) - hit
    if extra == missing == 0:
        return 1.0, 1.0
    if hit == 0:
        return 0.0, 0.0
    return hit / (hit + extra), hit / (hit + missing)


def summary(scores: list[tuple[float, float]]) -> tuple[float, float, float]:
    """(precision, recall, F1): F1 of the means over pages."""
    p, r = (sum(column) / len(scores) for column in zip(*scores, strict=True))
    return p, r, 2 * p * r / (p + r) if p + r else 0.0


def gold_pages(folder: Path = GOLD) -> list[tuple[str, bytes, str, str]]:
    """(id, body, expected text, kind) of the benchmark's pages."""
    truth = json.loads((folder / "ground-truth.json").read_text())
    return [
        (name, gzip.decompress((folder / "html" / f"{name}.html.gz").read_bytes()), entry["articleBody"], "article")
        for name, entry in sorted(truth.items())
    ]


def folder_pages(folder: Path) -> list[tuple[str, bytes, str, str]]:
    """The same of a WCXB part: pages whose expected text is given."""
    pages = []
    for file in sorted((folder / "ground-truth").glob("*.json")):
        row = json.loads(file.read_text())
        expected = (row.get("ground_truth") or {}).get("main_content") or ""
        kind = ((row.get("_internal") or {}).get("page_type") or {}).get("primary", "")
        if expected:
            body = gzip.decompress((folder / "html" / f"{file.stem}.html.gz").read_bytes())
            pages.append((file.stem, body, expected, kind))
    return pages


def contestants() -> dict[str, Callable[[bytes, str], str]]:
    """Name -> (bytes, decoded text) -> main content. A peer that is not installed is named and left out."""
    from resiliparse.extract.html2text import extract_plain_text

    from tasks.extract import extract_page

    found: dict[str, Callable[[bytes, str], str]] = {
        "arcline": lambda body, html: extract_page(body).text,
        "resiliparse": lambda body, html: extract_plain_text(html, main_content=True),
    }
    try:
        import trafilatura
    except ImportError:
        print("trafilatura: not installed, skipped")
    else:
        found["trafilatura"] = lambda body, html: trafilatura.extract(html) or ""
        found["trafilatura fast"] = lambda body, html: trafilatura.extract(html, fast=True) or ""
        found["trafilatura fast, no comments, no tables"] = lambda body, html: (
            trafilatura.extract(html, fast=True, include_comments=False, include_tables=False) or ""
        )
    try:
        from lxml import html as lxml_html
        from readability import Document
    except ImportError:
        print("readability-lxml: not installed, skipped")
    else:
        found["readability-lxml"] = lambda body, html: lxml_html.fromstring(
            Document(html).summary(html_partial=True)
        ).text_content()
    return found


def measure(pages: list[tuple[str, bytes, str, str]], pattern: re.Pattern = _TOKEN) -> dict[str, dict]:
    """Per contestant: precision, recall, f1, pages per CPU second, failures, and F1 by kind of page."""
    from tasks.extract import decode_html

    functions = contestants()
    for function in functions.values():  # imports, compilation and caches are no extraction time
        function(pages[0][1], decode_html(pages[0][1])[0])
    seconds, failures = Counter(), Counter()
    scores: dict[str, dict[str, list]] = {name: defaultdict(list) for name in functions}
    for _, body, expected, kind in pages:
        html = decode_html(body)[0]
        for name, function in functions.items():
            start = time.process_time()
            try:
                text = function(body, html)
            except Exception:  # a peer's crash on a page is a page without text
                text, failures[name] = "", failures[name] + 1
            seconds[name] += time.process_time() - start
            scores[name][kind].append(precision_recall(text, expected, pattern))
    report = {}
    for name in functions:
        p, r, f = summary([s for kind in scores[name].values() for s in kind])
        kinds = {kind: round(summary(found)[2], 4) for kind, found in sorted(scores[name].items())}
        report[name] = {
            "precision": p,
            "recall": r,
            "f1": f,
            "pages_s": len(pages) / seconds[name],
            "failures": failures[name],
            "kinds": kinds,
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pages", type=Path, help="a WCXB part instead of the gold pages")
    parser.add_argument("--sample", type=int, default=0, help="at most this many pages, evenly drawn")
    args = parser.parse_args()
    if not args.pages and not GOLD.is_dir():
        raise SystemExit("../shared/gold/article-extraction is absent")
    pages = folder_pages(args.pages) if args.pages else gold_pages()
    if args.sample and args.sample < len(pages):
        pages = pages[:: len(pages) // args.sample][: args.sample]
    report = measure(pages, _WIDE if args.pages else _TOKEN)
    print(f"{len(pages)} pages, {sum(len(p[1]) for p in pages) / 1e6:.1f} MB")
    print(f"{'':42}{'precision':>10}{'recall':>8}{'F1':>8}{'pages/s':>9}{'failed':>8}")
    for name, row in report.items():
        numbers = (
            f"{row['precision']:10.4f}{row['recall']:8.4f}{row['f1']:8.4f}{row['pages_s']:9.1f}{row['failures']:8d}"
        )
        print(f"{name:42}{numbers}")
        if len(row["kinds"]) > 1:
            print("   F1 by kind:", row["kinds"])
    ours = report["arcline"]
    print(f"F1 {ours['f1']:.4f} (wanted on the gold pages: {REQUIRED_F1})")
    for name in report:
        if name.startswith("trafilatura"):
            print(f"speed: {ours['pages_s'] / report[name]['pages_s']:.1f} x {name} (wanted: {REQUIRED_SPEED})")


if __name__ == "__main__":
    main()

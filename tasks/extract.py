"""HTML to text: charset, title, main content (resiliparse), and the rest of a page's text as boilerplate.

Try it on one page:  python -m tasks.extract page.html
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

REPLACEMENT = "\ufffd"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufeff\u200b]")
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_TRAILING = re.compile(r"[ \t\u00a0]+$", re.MULTILINE)


class NotText(ValueError):
    """The bytes are no page: binary, empty, or in no encoding that decodes them."""


@dataclass(frozen=True)
class Extracted:
    """`text` is the main content; `declared_lang` is the html element's lang attribute, lower case, or ""."""

    text: str
    title: str
    declared_lang: str
    charset: str


def decode_html(body: bytes, http_charset: str = "") -> tuple[str, str]:
    """(text, charset): byte order mark, then what is valid UTF-8, then HTTP header, meta tag, detection.

    Valid UTF-8 comes before what the page declares: no other text is valid UTF-8 by chance, while pages that were
    re-encoded without their declaration being changed are common. A declared charset in which more than 0.2 % of the
    characters are undecodable is taken as wrong and the next candidate is tried. NotText when none stays under 2 %, or
    when the body is binary.
    """
    from resiliparse.parse.encoding import detect_encoding

    if not body.strip():
        raise NotText("empty body")
    if body[:5] in (b"%PDF-", b"\x89PNG\r", b"GIF89", b"GIF87") or body[:2] in (b"PK", b"\x1f\x8b", b"\xff\xd8"):
        raise NotText("a binary format, not HTML")
    boms = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
    candidates = [name for mark, name in boms if body.startswith(mark)]
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        candidates += [http_charset]
    else:
        candidates += ["utf-8"] if not body.isascii() else [http_charset]
    candidates += [detect_encoding(body, from_html_meta=True), detect_encoding(body), "utf-8", "windows-1252"]
    best, best_bad, best_name = "", 1.0, ""
    for name in dict.fromkeys(c.lower() for c in candidates if c):
        try:
            text = body.decode(name, "replace")
        except (LookupError, UnicodeError):
            continue
        bad = (text.count(REPLACEMENT) + text.count("\x00")) / max(1, len(text))
        if bad < best_bad:
            best, best_bad, best_name = text, bad, name
        if bad <= 0.002:
            break
    if best_bad > 0.02:
        raise NotText(f"no encoding decodes it ({best_bad:.0%} undecodable at best)")
    return best, best_name


def clean_text(text: str) -> str:
    """Control characters, trailing blanks and runs of blank lines removed; valid Unicode."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " "))
    text = _BLANK_LINES.sub("\n\n", _TRAILING.sub("", text)).strip()
    return text.encode("utf-8", "ignore").decode("utf-8")


def extract_page(body: bytes, http_charset: str = "") -> Extracted:
    """Main content of a page with its block structure kept as lines. NotText when the bytes are no page."""
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.html import HTMLTree

    html, charset = decode_html(body, http_charset)
    tree = HTMLTree.parse(html)
    text = extract_plain_text(tree, preserve_formatting=True, main_content=True, alt_texts=False, comments=False)
    root = tree.document.query_selector("html") if tree.document else None
    lang = (root.getattr("lang") or "").lower() if root is not None else ""
    title = " ".join((tree.title or "").split()).encode("utf-8", "ignore").decode("utf-8")
    return Extracted(clean_text(text), title[:300], lang[:12], charset)


def boilerplate(body: bytes, main: str, http_charset: str = "") -> str:
    """The lines of a page that are not part of its main content: menus, footers, forms - what a filter must learn."""
    from resiliparse.extract.html2text import extract_plain_text

    html, _ = decode_html(body, http_charset)
    everything = clean_text(extract_plain_text(html, preserve_formatting=True, main_content=False, form_fields=True))
    kept = {line.strip() for line in main.splitlines()}
    return "\n".join(line.strip() for line in everything.splitlines() if line.strip() and line.strip() not in kept)


def main() -> None:
    page = extract_page(Path(sys.argv[1]).read_bytes())
    print(f"# {page.title} [{page.charset}, {page.declared_lang or 'no lang'}]\n\n{page.text}")


if __name__ == "__main__":
    main()

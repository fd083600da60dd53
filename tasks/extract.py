"""HTML to text: charset, title, main content, code blocks, and the rest of a page's text as boilerplate.

A page is parsed by lexbor (resiliparse), cut into text blocks, and every block is judged by boosted trees
(tasks/extract_model.py); what is kept is written out with its paragraphs, lists, table rows and code.

Try it on one page:  python -m tasks.extract page.html
"""

from __future__ import annotations

import re
import sys
import threading
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from tasks.extract_model import Blocks, load, segment
from tasks.extract_scan import CELL, IN_PRE, LIST_DEPTH, LIST_ITEM, ROW, TAG_ID

REPLACEMENT = "\ufffd"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\xad\ufeff\u200b]")  # U+00AD: where a word may be broken
_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")
_TRAILING = re.compile(r"(?<![ \t\u00a0])[ \t\u00a0]++$", re.MULTILINE)
_WESTERN = ("windows-1252", "cp1252", "iso-8859-1", "iso-8859-15", "latin1", "latin-1", "us-ascii", "ascii")
_HIGH, _LETTERS = re.compile(rb"[\xc0-\xff]"), re.compile(rb"[A-Za-z]")
_PAIR = re.compile(rb"[\x81-\xfe][\x40-\x7e\x80-\xfe]")
# What browsers read under these names: each a larger set than Python's codec of the name.
_LARGER = {"shift_jis": "cp932", "euc_kr": "cp949", "gbk": "gb18030", "gb2312": "gb18030", "big5": "big5hkscs"}
_ESCAPES = (  # encodings of seven bits, told by how they change sets
    (re.compile(rb"\x1b\$[@B]"), "iso2022_jp"),
    (re.compile(rb"\x1b\$\)C"), "iso2022_kr"),
    (re.compile(rb"~\{[!-}]{8,}~\}"), "hz"),
)
_HANGUL = re.compile("[\uac00-\ud7a3]")
_WIDE = re.compile("[^\x00-\x7f]")
_TAG = re.compile(r"<[a-zA-Z!/?]")
_CLASS = re.compile(r'(?:class|data-lang|data-language|lang)="([^"]*)"')
_LANGUAGE = re.compile(r"(?:^|\s)(?:language|lang|highlight-source|highlight|brush:?|src|code)[-:\s]\s*([\w+#.-]+)")
_NO_LANGUAGE = (
    "default none text plain plaintext nohighlight notranslate source code highlight block wrapper example".split()
)
_HLJS = re.compile(r"\bhljs\s+([a-z][\w+#]*)|^([a-z][\w+#]*)\s+hljs\b|\bsourceCode\s+([a-z][\w+#]*)")
_LANG = re.compile(r'\blang="([^"]*)"')
_GUTTER = re.compile(r"[\d\s]+")
_CODE_SIGNS = re.compile(r"[{}();=<>\[\]\\$]")
MAX_TAGS = 400_000  # about 700 MB and 3 s; pages of 32 MB that hold nothing but tags take ten times that
CODE_SIGN_SHARE = 0.04  # signs of code per character above which a <pre> without other cues is code


class NotText(ValueError):
    """The bytes are no page: binary, empty, or in no encoding that decodes them."""


@dataclass(frozen=True)
class Extracted:
    """`text` is the main content; `declared_lang` is the html element's lang attribute, lower case, or "".

    `code_blocks` counts the fenced blocks in `text`: a page with some bears code.
    """

    text: str
    title: str
    declared_lang: str
    charset: str
    code_blocks: int = 0


def decode_html(body: bytes, http_charset: str = "") -> tuple[str, str]:
    """(text, charset): byte order mark, then what is valid UTF-8, then HTTP header, meta tag, detection.

    Valid UTF-8 comes before what the page declares: no other text is valid UTF-8 by chance, while pages that were
    re-encoded without their declaration being changed are common; a cut character or a few stray bytes do not change
    that. Declared names mean what browsers take them for (iso-8859-1 is windows-1252). A declared charset in which more
    than 0.2 % of the characters are undecodable, or a Western one for a text most of whose letters are not ASCII, is
    taken as wrong and the next candidate is tried. NotText when none stays under 2 %, or when the body is binary.
    """
    from resiliparse.parse.encoding import detect_encoding

    if not body.strip():
        raise NotText("empty body")
    if body[:5] in (b"%PDF-", b"\x89PNG\r", b"GIF89", b"GIF87") or body[:2] in (b"PK", b"\x1f\x8b", b"\xff\xd8"):
        raise NotText("a binary format, not HTML")
    boms = ((b"\xff\xfe\0\0", "utf-32"), (b"\0\0\xfe\xff", "utf-32"))
    boms += ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
    candidates = [name for mark, name in boms if body.startswith(mark)] or _without_mark(body)
    if not candidates:
        try:
            text = body.decode("utf-8")
        except UnicodeDecodeError:
            if _nearly_utf8(body):
                return body.decode("utf-8", "replace"), "utf-8"
        else:
            if body.isascii() and (b"\x1b$" in body or b"~{" in body):
                candidates = [name for form, name in _ESCAPES if form.search(body)][:1]
            if "\x00" not in text and not candidates:
                return text, "utf-8"
    marked = bool(candidates)
    candidates += [http_charset, detect_encoding(body, from_html_meta=True), detect_encoding(body)]
    names = [_browser_name(name) for name in (*candidates, "utf-8", "windows-1252") if name]
    words = re.sub(rb"<[^<>]*>", b"", body[:100_000])
    high = len(_HIGH.findall(words))
    rest, pairs = _PAIR.subn(b"", words)  # the second byte of a pair may look like a letter
    if max(high, pairs) > 20 and max(high, pairs) > len(_LETTERS.findall(rest)):
        names.sort(key=lambda name: name in _WESTERN)
        if not marked and _is_korean(words):
            names.insert(0, "euc_kr")
    best, best_bad, best_name = "", 1.0, ""
    for name in dict.fromkeys(names):
        try:
            text = body.decode(_LARGER.get(name, name), "replace")
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


def _browser_name(name: str) -> str:
    """The encoding that browsers use for a declared name; the name itself when they know none."""
    from resiliparse.parse.encoding import map_encoding_to_html5

    name = name.strip().lower()
    if name in ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "iso2022_jp", "iso2022_kr", "hz"):
        return name
    return (map_encoding_to_html5(name, False) or name).lower()


def _is_korean(words: bytes) -> bool:
    """Whether bytes read as EUC-KR are nearly all Hangul, which resiliparse's detection does not know."""
    text = words.decode("euc_kr", "replace")
    wide = len(_WIDE.findall(text))
    return text.count(REPLACEMENT) * 20 <= wide and len(_HANGUL.findall(text)) > 0.85 * wide


def _without_mark(body: bytes) -> list[str]:
    """UTF-16 without a byte order mark: every other byte of a page is zero, and its tags are there."""
    head = body[:4000]
    if b"<" not in head:
        return []
    even, odd = head[::2].count(0), head[1::2].count(0)
    if max(even, odd) > 0.3 * len(head) / 2 and min(even, odd) < 0.05 * len(head) / 2:
        return ["utf-16-le" if odd > even else "utf-16-be"]
    return []


def _nearly_utf8(body: bytes) -> bool:
    """Non-ASCII characters are UTF-8, but for less than one in twenty and for one cut off at the end."""
    text = body.decode("utf-8", "replace")
    bad = text.count(REPLACEMENT)
    good = sum(1 for c in text if c > "\x7f") - bad
    return bad * 20 < good or (bad == 1 < good and text.endswith(REPLACEMENT))


def clean_text(text: str) -> str:
    """Control characters, trailing blanks and runs of blank lines removed; valid Unicode."""
    return _tidy(text).strip()


def _tidy(text: str, blank_lines: bool = True) -> str:
    """`blank_lines`: cut runs of them, as outside code."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " "))
    text = _TRAILING.sub("", text)
    text = _BLANK_LINES.sub("\n\n", text) if blank_lines else text
    return text.encode("utf-8", "ignore").decode("utf-8")


class _Last(threading.local):
    """Blocks of the page that this thread extracted last: `boilerplate` and `code_blocks` often want the same page next."""

    body: bytes | None = None
    charset: str = ""
    page: Blocks | None = None


_last = _Last()


def _blocks(body: bytes, http_charset: str) -> Blocks:
    if _last.page is not None and _last.body is body and _last.charset == http_charset:
        return _last.page
    return _segment(decode_html(body, http_charset)[0])[0]


def _segment(html: str) -> tuple[Blocks, Any]:
    """(blocks, parse tree); NotText for a page of so many tags that it would fill memory."""
    if (tags := html.count("<")) > MAX_TAGS:
        raise NotText(f"{tags} tags, more than {MAX_TAGS}")
    return segment(html)


def extract_page(body: bytes, http_charset: str = "") -> Extracted:
    """Main content of a page with its block structure kept as lines. NotText when the bytes are no page."""
    html, charset = decode_html(body, http_charset)
    if not _TAG.search(html):
        return Extracted(clean_text(html), "", "", charset)
    page, tree = _segment(html)
    _last.body, _last.charset, _last.page = body, http_charset, page
    lang = _LANG.search(_attributes(page, 1)) if len(page.elements) > 1 else None  # the html element, always the first
    title = " ".join((tree.title or "").split()).encode("utf-8", "ignore").decode("utf-8")
    text, code = render(page, choose(page))
    return Extracted(text, title[:300], lang[1].lower()[:12] if lang else "", charset, code)


def choose(page: Blocks) -> np.ndarray:
    """Numbers of the blocks that are main content, in order.

    Where no block reaches the threshold, the best ones and those half as good are taken: a page has some main text. Code
    whose neighbour in the same container is kept stays with it.
    """
    if not len(page):
        return np.zeros(0, np.int64)
    model = load()
    p = model(page)
    keep = p >= model.threshold
    if not keep.any():
        keep = p >= p.max() / 2
    for b in np.flatnonzero((page.stats[:, IN_PRE] > 0) & ~keep):
        near = [o for o in (b - 1, b + 1) if 0 <= o < len(page) and keep[o] and page.lengths[o] > 3]
        keep[b] = p[b] > 0.1 and bool(near)
    return np.flatnonzero(keep)


def render(page: Blocks, kept: np.ndarray) -> tuple[str, int]:
    """(text of the blocks, number of code blocks in it): paragraphs parted by a blank line, list items and cells not."""
    stats = page.stats[kept][:, [ROW, CELL, LIST_ITEM, LIST_DEPTH, IN_PRE]].tolist()
    owners = page.elements[page.blocks[kept, 2], 0].tolist()
    cells = page.stats[:, CELL]
    alone = {c for c, n in zip(*np.unique(cells[cells >= 0], return_counts=True), strict=True) if n == 1}
    out: list[str] = []
    code, last_row, last_item, inside = 0, -1, False, 0
    for index, b in enumerate(kept.tolist()):
        row, cell, item, depth, pre = stats[index]
        text = page.string(b)
        if pre:
            if pre != inside:
                out.append(_code(page, kept[index:], pre))
                code += out[-1].lstrip("\n").startswith("```")
            inside, last_row, last_item = pre, -1, False
            continue
        inside = 0
        if item:
            text = f"{'  ' * min(max(depth - 1, 0), 5)}- {text}"
        if row >= 0 and cell in alone:
            out.append((" | " if row == last_row else "\n" if last_row >= 0 else "\n\n") + text)
            last_row, last_item = row, False
            continue
        tight = item and last_item and owners[index] == TAG_ID["li"]
        out.append(("\n" if tight else "\n\n") + text)
        last_row, last_item = -1, bool(item)
    if not code:
        return clean_text("".join(out)), 0
    parts = ("".join(run) for _, run in groupby(out, key=lambda part: part.lstrip("\n").startswith("```")))
    return "".join(_tidy(p, not p.lstrip("\n").startswith("```")) for p in parts).strip("\n").rstrip(), code


def _code(page: Blocks, rest: np.ndarray, pre: int) -> str:
    """The blocks of one <pre>, fenced when it is code."""
    parts = []
    for b in rest:
        if page.stats[b, IN_PRE] != pre:
            break
        parts.append(page.string(int(b)))
    text = "\n".join(parts).strip("\n")
    if not _is_code(page, pre, text):
        return f"\n\n{text}"
    fence = "```" if "```" not in text else "````"
    return f"\n\n{fence}{_language(page, pre)}\n{text}\n{fence}"


def _attributes(page: Blocks, element: int) -> str:
    start, end = page.elements[element, 2:]
    return page.buf[start:end].tobytes().decode("utf-8", "ignore")


def _around(page: Blocks, pre: int) -> list[int]:
    """A <pre>, the <code> directly in it, and its three nearest ancestors."""
    found = [pre]
    if pre + 1 < len(page.elements) and page.elements[pre + 1, 1] == pre:
        found.append(pre + 1)
    above = int(page.elements[pre, 1])
    while above > 0 and len(found) < 5:
        found.append(above)
        above = int(page.elements[above, 1])
    return found


def _language(page: Blocks, pre: int) -> str:
    """Language that class names or data attributes say a <pre> is in, lower case, or ""."""
    for element in _around(page, pre):
        attributes = _attributes(page, element)
        for match in re.finditer(r'(class|data-lang|data-language)="([^"]*)"', attributes):
            value = match[2].strip()
            if match[1] != "class":
                found = [value]
            else:
                found = _LANGUAGE.findall(value) + [g for m in _HLJS.finditer(value) for g in m.groups() if g]
            for name in found:
                name = name.lower().strip(";")
                if name and name not in _NO_LANGUAGE and len(name) <= 20:
                    return name
    return ""


def _is_code(page: Blocks, pre: int, text: str) -> bool:
    if _language(page, pre):
        return True
    child = pre + 1
    if child < len(page.elements) and page.elements[child, 1] == pre and page.elements[child, 0] == TAG_ID["code"]:
        return True
    words = " ".join(_CLASS.findall(" ".join(_attributes(page, e) for e in _around(page, pre)[:3]))).lower()
    if "highlight" in words or "code" in words:
        return True
    return len(_CODE_SIGNS.findall(text)) > CODE_SIGN_SHARE * len(text)


def code_blocks(body: bytes, http_charset: str = "") -> list[tuple[str, str]]:
    """(language or "", code) of every <pre> of a page that holds code, main content or not, indentation kept.

    Columns of line numbers are left out. NotText when the bytes are no page.
    """
    page, found = _blocks(body, http_charset), []
    blocks: dict[int, list[int]] = {}
    inside = np.flatnonzero(page.stats[:, IN_PRE] > 0)
    for b, pre in zip(inside.tolist(), page.stats[inside, IN_PRE].tolist(), strict=True):
        blocks.setdefault(int(pre), []).append(b)
    for pre, own in blocks.items():
        text = "\n".join(map(page.string, own)).strip("\n")
        if _GUTTER.fullmatch(text) or not _is_code(page, pre, text):
            continue
        found.append((_language(page, pre), _TRAILING.sub("", _CONTROL.sub("", text))))
    return found


def boilerplate(body: bytes, main: str, http_charset: str = "") -> str:
    """The lines of a page that are not part of its main content: menus, footers, forms - what a filter must learn."""
    page = _blocks(body, http_charset)
    kept = {part.strip().removeprefix("- ") for line in main.splitlines() for part in (line, *line.split(" | "))}
    lines = (line.strip() for b in range(len(page)) for line in clean_text(page.string(b)).splitlines())
    return "\n".join(line for line in lines if line and line not in kept)


def main() -> None:
    page = extract_page(Path(sys.argv[1]).read_bytes())
    print(f"# {page.title} [{page.charset}, {page.declared_lang or 'no lang'}]\n\n{page.text}")


if __name__ == "__main__":
    main()

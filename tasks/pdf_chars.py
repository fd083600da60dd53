"""Characters of a PDF page with their places, through pdfium, gathered into runs of one line, size and font.

Positions come from the glyphs' origins and advance widths, so that the space between two words is the one the typesetter
left and the baseline tells a superscript. Code points that fonts leave without a Unicode value are mapped by the font's
encoding (TeX's OML, OMS, OMX, OT1 and T1, Adobe's Symbol).
"""

from __future__ import annotations

import ctypes
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_OML = "ΓΔΘΛΞΠΣΥΦΨΩαβγδϵζηθικλμνξπρστυφχ"
_OMS = "−·×∗÷⋄±∓⊕⊖⊗⊘⊙◯∘•≍≡⊆⊇≤≥⪯⪰∼≈⊂⊃≪≫≺≻"
_OMS_ASCII = dict(
    zip(
        range(0x20, 0x41),
        "←→↑↓↔↗↘≃⇐⇒⇑⇓⇔↖↙∝′∞∈∋△▽̸↦∀∃¬∅ℜℑ⊤⊥ℵ",
    )
) | dict(zip(range(0x5B, 0x66), "∪\\⊎∧∨⊢⊣⌊⌋⌈⌉")) | dict(zip(range(0x68, 0x7B), "⟨⟩|‖↕⇕\\≀√⨿∇∫⊔⊓⊑⊒§†‡"))  # fmt: skip
_OML_ASCII = {0x22: "ε", 0x23: "ϑ", 0x24: "ϖ", 0x25: "ϱ", 0x26: "ς", 0x27: "φ", 0x3F: "⋆", 0x40: "∂", 0x5B: "♭", 0x5C: "♮",
              0x5D: "♯", 0x60: "ℓ", 0x7B: "ı", 0x7C: "ȷ", 0x7D: "℘"}  # fmt: skip
_OMX_ASCII = dict(zip(range(0x20, 0x30), "()[]⌊⌋⌈⌉{}⟨⟩/\\/\\")) | dict(
    zip(range(0x44, 0x63), "⟨⟩⨆⨆∮∮⨀⨀⨁⨁⨂⨂∑∏∫⋃⋂⨄⋀⋁∑∏∫⋃⋂⨄⋀⋁∐∐^")
) | dict(zip(range(0x63, 0x74), "^^~~~[]⌊⌋⌈⌉{}√√√√"))  # fmt: skip
_DOUBLE_STRUCK = {c: chr(0x1D538 + ord(c) - 65) for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"} | dict(zip("CHNPQRZ", "ℂℍℕℙℚℝℤ"))
_OMX = "()[]⌊⌋⌈⌉{}⟨⟩|‖/\\()()[]⌊⌋⌈⌉{}⟨⟩/\\"
_OT1 = ("Γ", "Δ", "Θ", "Λ", "Ξ", "Π", "Σ", "Υ", "Φ", "Ψ", "Ω", "ff", "fi", "fl", "ffi", "ffl", "ı", "ȷ", "`", "´", "ˇ", "˘",
        "¯", "˚", "¸", "ß", "æ", "œ", "ø", "Æ", "Œ", "Ø")  # fmt: skip
_T1 = {
    0x1B: "ff",
    0x1C: "fi",
    0x1D: "fl",
    0x1E: "ffi",
    0x1F: "ffl",
    0x15: "–",
    0x16: "—",
    0x10: "“",
    0x11: "”",
    0x12: "„",
}
_SYMBOL = dict(zip(range(0xF061, 0xF07B), "αβχδεφγηιϕκλμνοπθρστυϖωξψζ")) | dict(
    zip(range(0xF041, 0xF05B), "ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ")
)
_SYMBOL |= {0xF0A3: "≤", 0xF0B3: "≥", 0xF0B1: "±", 0xF0B4: "×", 0xF0B7: "•", 0xF0A5: "∞", 0xF0CE: "∈", 0xF0AE: "→", 0xF0AB: "↔",
            0xF0D7: "⋅", 0xF0B9: "≠", 0xF0BA: "≡", 0xF0BB: "≈", 0xF0E5: "∑", 0xF0F2: "∫", 0xF0B6: "∂", 0xF0D6: "√",
            0xF0DE: "⇒", 0xF0DB: "⇔", 0xF0C7: "∩", 0xF0C8: "∪", 0xF0CC: "⊂", 0xF0CD: "⊆", 0xF0B0: "°", 0xF02D: "−"}  # fmt: skip
# Pieces of tall delimiters (Adobe's corporate use area): one piece stands for the whole, the others are nothing.
_PIECES = dict.fromkeys(range(0xF8E5, 0xF8FF), "") | {
    0xF8EB: "(", 0xF8EE: "[", 0xF8F2: "{", 0xF8F6: ")", 0xF8F9: "]", 0xF8FD: "}", 0xF8F5: "", 0xF8E5: "",
}  # fmt: skip
_OLD_DIGITS = {0xF730 + d: str(d) for d in range(10)}
_LIGATURES = {0xFB00: "ff", 0xFB01: "fi", 0xFB02: "fl", 0xFB03: "ffi", 0xFB04: "ffl", 0xFB05: "st", 0xFB06: "st"}
_HYPHENS = {0x02: "-", 0xAD: "-", 0xFFFE: "-", 0x2010: "-", 0x2011: "-"}
_ALWAYS = _SYMBOL | _PIECES | _OLD_DIGITS | _LIGATURES | _HYPHENS | {0x2216: "∖", 0xA0: " ", 0x3000: " "}
_ACCENT_BEFORE = {
    "´": "\u0301",
    "`": "\u0300",
    "¨": "\u0308",
    "ˆ": "\u0302",
    "˜": "\u0303",
    "ˇ": "\u030c",
    "˚": "\u030a",
}
_MONO = re.compile(r"tt\d|mono|courier|consol|typewriter|cmtt|txtt|inconsol|fixed|letter ?gothic", re.IGNORECASE)
_EXTENSION = re.compile(r"^(CMEX|LMMathExt|txex|pxex|MT2?E|rtxe|Euler.?Ext)", re.IGNORECASE)


@dataclass(slots=True)
class Run:
    """Characters on one baseline in one size: `x0`, `x1`, `y` (baseline) and `size` in points, `mono` a typewriter font."""

    x0: float
    x1: float
    y: float
    size: float
    text: str
    mono: bool = False
    order: int = 0  # place in the page's stream
    big: bool = False  # an operator or delimiter of an extension font, whose origin lies at its top


@lru_cache(maxsize=1024)
def family(font: str) -> str:
    """Which of TeX's mathematical encodings a font has, by its name: "OML", "OMS", "OMX", "AMSb", or ""."""
    if _EXTENSION.match(font):
        return "OMX"
    found = re.match(
        r"(?:CM|EUS|LMMath|MT2?|rtx|tx|px|NewTX|PazoMath|Ful?tr?)(MI|SY|BSY|MMI|Symbols|Italic|sy|mi)", font
    )
    if font.startswith(("MSBM", "AMSb")):
        return "AMSb"
    return (
        {"MI": "OML", "MM": "OML", "IT": "OML", "SY": "OMS", "BS": "OMS"}.get(found[1][:2].upper(), "") if found else ""
    )


_RAW = {"OML": _OML_ASCII, "OMS": _OMS_ASCII, "OMX": _OMX_ASCII, "AMSb": {ord(c): t for c, t in _DOUBLE_STRUCK.items()}}


def glyph(code: int, font: str) -> str:
    """Text of one code point; "" for what prints nothing. `font` decides where pdfium passes a font's own code on."""
    kind = family(font)
    if kind and code in _RAW[kind]:
        return _RAW[kind][code]
    if code in _ALWAYS:
        return _ALWAYS[code]
    if code >= 32:
        if 0xE000 <= code <= 0xF8FF or 0xFFF0 <= code or 0xD800 <= code < 0xE000 or 0x7F <= code < 0xA0:
            return ""
        return chr(code)
    if kind in ("OML", "OMS", "OMX"):
        return {"OML": _OML, "OMS": _OMS, "OMX": _OMX}[kind][code]
    if font.upper().startswith("CM"):
        return _OT1[code]
    return _T1.get(code, "")


def page_runs(page: Any, max_chars: int) -> list[Run]:
    """Runs of a page in the order of its stream. ValueError when it holds more than `max_chars` characters."""
    import pypdfium2.raw as pdfium

    text_page = page.get_textpage()
    try:
        count = text_page.count_chars()
        if count > max_chars:
            raise ValueError(f"a page of {count} characters, more than {max_chars}")
        return _runs(pdfium, text_page.raw, count)
    finally:
        text_page.close()


@dataclass(slots=True)
class _Font:
    """`own` when its codes must be looked up (`family`), else only control codes and the like."""

    name: str
    mono: bool
    big: bool
    own: bool


def _runs(pdfium: Any, raw: Any, count: int) -> list[Run]:
    get_code, get_object, get_size = (
        pdfium.FPDFText_GetUnicode,
        pdfium.FPDFText_GetTextObject,
        pdfium.FPDFText_GetFontSize,
    )
    get_origin, get_box, address = pdfium.FPDFText_GetCharOrigin, pdfium.FPDFText_GetLooseCharBox, ctypes.addressof
    x, y, rect = ctypes.c_double(), ctypes.c_double(), pdfium.FS_RECTF()
    px, py, prect = ctypes.byref(x), ctypes.byref(y), ctypes.byref(rect)
    runs: list[Run] = []
    run: Run | None = None
    chars: list[str] = []
    fonts: dict[str, _Font] = {}
    font, size, current = _Font("", False, False, False), 0.0, None
    space = False
    for i in range(count):
        code = get_code(raw, i)
        if code == 32 or code == 10 or code == 13 or code == 9 or code == 0xA0:
            space = True
            continue
        held = get_object(raw, i)
        place = address(held.contents) if held else None
        if place is None or place != current:  # size and font belong to the text object
            current = place
            size = get_size(raw, i)
            if size < 2:
                size = _true_size(pdfium, raw, i, size)
            font = _font(pdfium, raw, i, fonts)
        get_origin(raw, i, px, py)
        get_box(raw, i, prect)
        x0, base, x1 = x.value, y.value, max(rect.right, x.value)
        if not (math.isfinite(x0) and math.isfinite(base) and math.isfinite(x1)):
            continue
        text = glyph(code, font.name) if font.own or code < 32 or code in _ALWAYS or code > 0x7E else chr(code)
        if run is not None and not (run.big or font.big):
            gap = x0 - run.x1
            if abs(base - run.y) < 0.06 * size and abs(size - run.size) < 0.5 and -0.35 * size < gap < 1.2 * size:
                if gap > 0.2 * size or (space and gap > 0.1 * size):
                    chars.append(" ")
                chars.append(text)
                run.x1 = max(run.x1, x1)
                space = False
                continue
        if run is not None:
            run.text = "".join(chars)
        run = Run(x0, x1, base, size, "", font.mono, len(runs), font.big)
        if font.big:
            run.y = _middle(pdfium, raw, i) - 0.25 * size
        runs.append(run)
        chars = [text]
        space = False
    if run is not None:
        run.text = "".join(chars)
    return [r for r in runs if r.text.strip()]


def _font(pdfium: Any, raw: Any, i: int, known: dict[str, _Font]) -> _Font:
    buffer, flags = ctypes.create_string_buffer(128), ctypes.c_int()
    pdfium.FPDFText_GetFontInfo(raw, i, buffer, 128, ctypes.byref(flags))
    name = re.sub(r"^[A-Z]{6}\+", "", buffer.value.decode("latin-1"))
    if name not in known:
        mono = bool(flags.value & 1) or bool(_MONO.search(name))
        known[name] = _Font(name, mono, bool(_EXTENSION.match(name)), bool(family(name)))
    return known[name]


def _true_size(pdfium: Any, raw: Any, i: int, size: float) -> float:
    """The size of a font of one unit, which its producer scales by the text matrix."""
    matrix = pdfium.FS_MATRIX()
    pdfium.FPDFText_GetMatrix(raw, i, ctypes.byref(matrix))
    return max(size * math.hypot(matrix.c, matrix.d), 0.5)


def _middle(pdfium: Any, raw: Any, i: int) -> float:
    sides = [ctypes.c_double() for _ in range(4)]
    pdfium.FPDFText_GetCharBox(raw, i, *(ctypes.byref(s) for s in sides))
    return (sides[2].value + sides[3].value) / 2

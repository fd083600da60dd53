"""Unicode to LaTeX for mathematical text: operators, Greek, accents, alphabets (bold, blackboard, script, fraktur).

Used by tasks/mathml.py; the reverse direction by the benchmark that compares PDF text with its TeX source.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

_TABLE = r"""
× times|÷ div|± pm|∓ mp|· cdot|⋅ cdot|⋆ star|∘ circ|• bullet|≤ leq|⩽ leqslant|≥ geq|⩾ geqslant|≠ neq|≈ approx
≡ equiv|∼ sim|≃ simeq|≅ cong|∝ propto|≪ ll|≫ gg|≺ prec|≻ succ|⪯ preceq|⪰ succeq|≍ asymp|≐ doteq|⊢ vdash|⊨ models|⊣ dashv
∞ infty|∑ sum|∏ prod|∐ coprod|∫ int|∬ iint|∭ iiint|∮ oint|∂ partial|∇ nabla|√ surd|∈ in|∉ notin|∋ ni|⊂ subset|⊆ subseteq
⊃ supset|⊇ supseteq|⊊ subsetneq|⊋ supsetneq|∪ cup|∩ cap|⋃ bigcup|⋂ bigcap|∖ setminus|∅ emptyset|∀ forall|∃ exists
∄ nexists|¬ neg|∧ wedge|∨ vee|⋀ bigwedge|⋁ bigvee|⊤ top|⊥ perp|∠ angle|△ triangle|□ square|◇ diamond|⋄ diamond
→ to|← leftarrow|↔ leftrightarrow|⇒ Rightarrow|⇐ Leftarrow|⇔ Leftrightarrow|⟹ Longrightarrow|⟸ Longleftarrow|⟺ iff
⟶ longrightarrow|⟵ longleftarrow|⟷ longleftrightarrow|↦ mapsto|⟼ longmapsto|↪ hookrightarrow|↩ hookleftarrow|↑ uparrow
↓ downarrow|↠ twoheadrightarrow|↣ rightarrowtail|⇀ rightharpoonup|⇁ rightharpoondown|⇌ rightleftharpoons|⇝ leadsto
↗ nearrow|↘ searrow|… ldots|⋯ cdots|⋮ vdots|⋱ ddots|⊕ oplus|⊖ ominus|⊗ otimes|⊘ oslash|⊙ odot|⨁ bigoplus|⨂ bigotimes
⊎ uplus|⊔ sqcup|⊓ sqcap|⋊ rtimes|⋉ ltimes|≀ wr|† dagger|‡ ddagger|∥ parallel|‖ Vert|∣ mid|∤ nmid|⟨ langle|⟩ rangle
⌊ lfloor|⌋ rfloor|⌈ lceil|⌉ rceil|∔ dotplus|∴ therefore|∵ because|ℏ hbar|ℓ ell|ℜ Re|ℑ Im|ℵ aleph|ℶ beth|℘ wp|ı imath|ȷ jmath
α alpha|β beta|γ gamma|δ delta|ε varepsilon|ϵ epsilon|ζ zeta|η eta|θ theta|ϑ vartheta|ι iota|κ kappa|ϰ varkappa
λ lambda|μ mu|µ mu|ν nu|ξ xi|π pi|ϖ varpi|ρ rho|ϱ varrho|σ sigma|ς varsigma|τ tau|υ upsilon|φ varphi|ϕ phi|χ chi|ψ psi
ω omega|Γ Gamma|Δ Delta|Θ Theta|Λ Lambda|Ξ Xi|Π Pi|Σ Sigma|Υ Upsilon|Φ Phi|Ψ Psi|Ω Omega|∆ Delta|Ω Omega|♯ sharp|♭ flat
♮ natural|♠ spadesuit|♥ heartsuit|♦ diamondsuit|♣ clubsuit|⊲ lhd|⊳ rhd|⊴ unlhd|⊵ unrhd|◃ triangleleft|▹ triangleright
▽ bigtriangledown|° circ|∁ complement|⋈ bowtie|≜ triangleq|≔ coloneqq|≕ eqqcolon|⊩ Vdash|⟦ llbracket|⟧ rrbracket
"""
SYMBOLS: dict[str, str] = {
    entry.split()[0]: "\\" + entry.split()[1] for line in _TABLE.strip().splitlines() for entry in line.split("|")
}
SYMBOLS |= {
    "∗": "*", "−": "-", "′": "'", "″": "''", "‴": "'''", "⁗": "''''", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "#": r"\#",
    "$": r"\$", "_": r"\_", "~": r"\sim ", "\\": r"\backslash ", "⁢": "", "⁡": "", "⁣": "", "⁤": "", "\u200b": "", "\u00ad": "",
    "‐": "-", "‑": "-", "–": "-", "—": "-",
    "\u2329": r"\langle", "\u232a": r"\rangle", "\u3008": r"\langle", "\u3009": r"\rangle",
    "∕": "/", "⁄": "/", "\u2009": r"\,", "\u2003": r"\quad ", "\u00a0": r"\ ", "\u205f": r"\:", "∶": ":", "ˈ": "'",
    "│": "|", "|": "|", "‾": r"\overline{\ }", "^": r"\hat{\ }",
}  # fmt: skip

FUNCTIONS = frozenset(
    "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan exp log ln lg lim limsup liminf max min sup inf det"
    " dim ker gcd deg arg hom Pr".split()
)
# Functions and operators whose scripts LaTeX sets above and below in a displayed formula.
LARGE = frozenset("∑∏∐∫∬∭∮⋃⋂⋀⋁⨁⨂⨀⨄⨆")

OVER = {
    "^": "hat", "ˆ": "hat", "̂": "hat", "¯": "bar", "ˉ": "bar", "̄": "bar", "‾": "overline", "̅": "overline", "―": "overline",
    "_": "overline", "~": "tilde", "˜": "tilde", "∼": "tilde", "̃": "tilde", "→": "vec", "⃗": "vec", "⟶": "overrightarrow",
    "←": "overleftarrow", "↔": "overleftrightarrow", "˙": "dot", "̇": "dot", ".": "dot", "¨": "ddot", "̈": "ddot",
    "˘": "breve", "̆": "breve", "ˇ": "check", "̌": "check", "´": "acute", "`": "grave", "˚": "mathring", "⏞": "overbrace",
    "︷": "overbrace", "⏜": "overparen", "⎴": "overbracket",
}  # fmt: skip
UNDER = {
    "_": "underline", "‾": "underline", "¯": "underline", "̲": "underline", "―": "underline", "⏟": "underbrace",
    "︸": "underbrace", "→": "underrightarrow", "←": "underleftarrow", "⎵": "underbracket",
}  # fmt: skip
WIDE = {"hat": "widehat", "tilde": "widetilde", "bar": "overline"}

VARIANTS = {
    "bold": "mathbf", "bold-italic": "boldsymbol", "double-struck": "mathbb", "script": "mathcal", "bold-script": "mathcal",
    "fraktur": "mathfrak", "bold-fraktur": "mathfrak", "sans-serif": "mathsf", "bold-sans-serif": "mathsf",
    "monospace": "mathtt", "sans-serif-italic": "mathsf",
}  # fmt: skip
_ALPHABETS = (
    ("DOUBLE-STRUCK", "mathbb"), ("FRAKTUR", "mathfrak"), ("BLACK-LETTER", "mathfrak"), ("SCRIPT", "mathcal"),
    ("MONOSPACE", "mathtt"), ("SANS-SERIF", "mathsf"), ("BOLD ITALIC", "boldsymbol"), ("BOLD", "mathbf"),
)  # fmt: skip


@lru_cache(maxsize=4096)
def alphabet(char: str) -> tuple[str, str]:
    """(plain character, LaTeX font command or "") of a mathematical alphanumeric character such as U+1D53D."""
    plain = unicodedata.normalize("NFKC", char)
    if char in SYMBOLS or not ("\u2100" <= char <= "\u214f" or "\U0001d400" <= char <= "\U0001d7ff"):
        return char, ""
    if len(plain) != 1:
        return char, ""
    name = unicodedata.name(char, "")
    return plain, next((command for word, command in _ALPHABETS if word in name), "")


def to_latex(text: str) -> str:
    """Characters as LaTeX; a control word is followed by a space where a letter would run into it."""
    if "\u0338" in text:
        text = re.sub("(.)\u0338", lambda m: unicodedata.normalize("NFC", m[0]), text)
    out = ""
    for char in text:
        if char not in SYMBOLS and "\u2200" <= char <= "\u22ff":
            base, *rest = unicodedata.normalize("NFD", char)
            if rest == ["\u0338"]:
                out += rf"\not{SYMBOLS.get(base, base)}"
                continue
        plain, font = alphabet(char)
        symbol = SYMBOLS.get(plain, plain)
        if font:
            symbol = f"\\{font}{{{symbol.strip()}}}"
        out = join(out, symbol)
    return out


def join(left: str, right: str) -> str:
    """Concatenation that keeps a control word apart from a following letter."""
    if right[:1].isalpha() and left and left[-1].isalpha():
        start = len(left)
        while start and left[start - 1].isascii() and left[start - 1].isalpha():
            start -= 1
        if start and left[start - 1] == "\\":
            return f"{left} {right}"
    return left + right

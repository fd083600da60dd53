"""How mathematical a text reads, from its formulas and words, by chunk and aggregate. Used by `python -m tasks math`."""

from __future__ import annotations

import re

from tasks import latex

_WORDS = frozenset(
    "theorem proof lemma corollary proposition definition equation function derivative integral matrix vector polynomial prime"
    " integer real complex sum product series limit let suppose assume hence thus therefore where given compute solve solution"
    " example exercise formula variable algebra geometry probability distribution sequence convergence root factor modulo"
    " group ring field ideal elliptic curve algorithm linear differential coefficient exponent logarithm set map space"
    " energy force mass velocity acceleration momentum temperature pressure electron atom molecule reaction equilibrium"
    " quantum wave frequency charge potential entropy hypothesis experiment measurement theory".split()
)
_UNICODE_MATH = re.compile(r"[∀-⋿⟀-⟯⨀-⫿←-⇿ℂℕℙℚℝℤα-ωΓΔΘΛΞΠΣΦΨΩ±×÷]|\w\^[\w{]|\w_\{|\b[A-Za-z]_[A-Za-z0-9]\b")


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

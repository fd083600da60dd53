"""Bad variants of good source files: what the quality models learn to tell from them (tasks/code_quality_train.py).

Each takes a file's text, its language's comment mark and a random source, and gives text of the same project and style that
a person would not want to learn from: broken off, scrambled, emptied, renamed by a machine, turned into data, repeated.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

_WORD = re.compile(r"[^\W\d]\w{2,}")
_KEYWORDS = frozenset(
    "if else elif for while do switch case default break continue return yield def class struct enum interface trait impl fn func"
    " function fun var let const val int float double char bool boolean string void long short unsigned signed static public"
    " private protected final abstract override import from package module use using namespace include require new delete this"
    " self super null None nil true false True False try catch except finally throw raise throws with as in is not and or pass"
    " lambda async await end then begin local type where data instance extends implements template typename auto inline extern"
    " goto sizeof typedef union mut pub crate mod match loop move ref unsafe dyn go chan defer select map range make len".split()
)


def cut_off(text: str, mark: str, rng: random.Random) -> str:
    """The file's beginning, broken off within a line."""
    return text[: int(len(text) * rng.uniform(0.25, 0.8))]


def headless(text: str, mark: str, rng: random.Random) -> str:
    """The file from somewhere in its middle on."""
    start = int(len(text) * rng.uniform(0.2, 0.7))
    return text[start:]


def scrambled(text: str, mark: str, rng: random.Random) -> str:
    """Lines in another order, within windows of 4 to 40."""
    lines, width, out = text.split("\n"), rng.randint(4, 40), []
    for start in range(0, len(lines), width):
        window = lines[start : start + width]
        rng.shuffle(window)
        out += window
    return "\n".join(out)


def flattened(text: str, mark: str, rng: random.Random) -> str:
    """Indentation lost, as from a bad copy; blank lines lost or doubled."""
    gap = rng.choice(("\n", "\n", "\n\n"))
    return gap.join(line.strip() for line in text.split("\n") if line.strip()) + "\n"


def emptied(text: str, mark: str, rng: random.Random) -> str:
    """Only lines that open or close something, the rest a remark that it is still to do."""
    out, skipped = [], False
    for line in text.split("\n"):
        if line.rstrip().endswith(("{", ":", "}", "end", "(", ")")) or not line.strip():
            out.append(line)
            skipped = False
        elif not skipped:
            indent = line[: len(line) - len(line.lstrip())]
            out.append(f"{indent}{mark} TODO" if rng.random() < 0.6 else f"{indent}{mark} ...")
            skipped = True
    return "\n".join(out)


def renamed(text: str, mark: str, rng: random.Random) -> str:
    """Names replaced by short ones in order of appearance and comments dropped, as decompilers and obfuscators leave code."""
    names: dict[str, str] = {}
    numbered = rng.choice(("v{}", "a{}", "local_{}", "var{}", "_0x{:x}"))

    def rename(match: re.Match) -> str:
        word = match.group()
        return word if word in _KEYWORDS else names.setdefault(word, numbered.format(len(names)))

    kept = [line for line in text.split("\n") if not line.lstrip().startswith((mark, "*", "/*"))]
    return _WORD.sub(rename, "\n".join(kept))


def commented_out(text: str, mark: str, rng: random.Random) -> str:
    """Runs of code made into comments, about two thirds of the file."""
    out, off = [], rng.random() < 0.66
    for line in text.split("\n"):
        if rng.random() < 0.05:
            off = rng.random() < 0.66
        out.append(f"{mark}{line}" if off and line.strip() else line)
    return "\n".join(out)


def _number(kind: str, rng: random.Random) -> str:
    if kind == "int":
        return str(rng.randrange(256))
    return f"0x{rng.randrange(65536):04x}" if kind == "hex" else f"{rng.gauss(0, 3):.5f}"


def tabulated(text: str, mark: str, rng: random.Random) -> str:
    """A short frame of the file around rows of numbers or words: a table kept as code."""
    lines = text.split("\n")
    words = _WORD.findall(text) or ["x"]
    width, rows = rng.randint(4, 14), []
    kind = rng.choice(("int", "hex", "float", "word", "pair"))
    for _ in range(rng.randint(40, 200)):
        if kind == "word":
            row = [f'"{rng.choice(words)}"' for _ in range(width)]
        elif kind == "pair":
            row = [f'"{rng.choice(words)}": {rng.randrange(1000)}']
        else:
            row = [_number(kind, rng) for _ in range(width)]
        rows.append("    " + ", ".join(row) + ",")
    head = rng.randint(2, 15)
    return "\n".join([*lines[:head], *rows, *lines[-rng.randint(1, 5) :]])


def repeated(text: str, mark: str, rng: random.Random) -> str:
    """One block again and again with other numbers: copied and pasted code, or a bad generator's."""
    lines = text.split("\n")
    size = rng.randint(4, 14)
    start = rng.randrange(max(1, len(lines) - size))
    block = "\n".join(lines[start : start + size])
    copies = [
        re.sub(r"\d+", str(n), block) if re.search(r"\d", block) else f"{block}\n{mark} {n}"
        for n in range(rng.randint(6, 30))
    ]
    return "\n".join([*lines[: rng.randint(0, 12)], *copies])


def conflicted(text: str, mark: str, rng: random.Random) -> str:
    """Marks of an unresolved merge, each side with a part of the file."""
    lines = text.split("\n")
    for _ in range(rng.randint(1, 3)):
        at, size = rng.randrange(max(1, len(lines) - 8)), rng.randint(1, 8)
        side = lines[at : at + size]
        lines[at : at + size] = [
            "<<<<<<< HEAD",
            *side,
            "=======",
            *side[::-1],
            ">>>>>>> " + rng.choice(("master", "feature", "main")),
        ]
    return "\n".join(lines)


def hollow(text: str, mark: str, rng: random.Random) -> str:
    """Comments and imports at the top with next to nothing below."""
    lines = text.split("\n")
    head = next(
        (
            n
            for n, line in enumerate(lines)
            if re.match(r"\s*(def|class|func|fn|public|static|struct|function|export|module|impl)\b", line)
        ),
        12,
    )
    return "\n".join(lines[: max(4, head + rng.randint(0, 3))])


def mixed(text: str, mark: str, rng: random.Random) -> str:
    """Pasted into prose or a console: prompts, numbers and remarks between the lines."""
    style = rng.choice((">>> {}", "$ {}", "{n}: {}", "| {}", "> {}", "+{}"))
    return "\n".join(style.format(line, n=n) if line.strip() else line for n, line in enumerate(text.split("\n"), 1))


VARIANTS: dict[str, Callable[[str, str, random.Random], str]] = {
    f.__name__: f
    for f in (cut_off, headless, scrambled, flattened, emptied, renamed, commented_out, tabulated, repeated, conflicted, hollow,
              mixed)
}  # fmt: skip

"""Second look at labelled files: names and content that contradict the label, and headers whose project is in doubt.

Extensions alone mislead: CMakeLists.txt is no plain text, `.v` is Verilog, Coq or V, `.in` files are templates of anything,
`.h` in a C++ project need not be C. What stays in doubt is left out, of training and of measurement alike.

python -m pytest tests/tasks/test_code_lang.py
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.code_lang_samples import Sample

_RENAMED = {"cmakelists.txt": "cmake", "meson_options.txt": "meson"}
# Extension -> what a file of the language, named so, has for certain; without it the file is left out.
_NEEDED = {
    ("verilog", "v"): re.compile(r"\bend(module|function|task)\b|^\s*`(define|timescale|include|ifdef)\b", re.M),
    ("matlab", "m"): re.compile(r"\A(?!\s*(/\*|//))"),
    ("scss", "scss"): re.compile(
        r"^\s*(\$[\w-]+\s*:|@(mixin|include|use|extend|forward|function|if|each|return)\b)|&\S|//", re.M
    ),
    ("less", "less"): re.compile(r"^\s*@[\w-]+\s*:|^\s*\.[\w-]+(\([^)\n]*\))?\s*;|&\S|//|\.\w+\(\)", re.M),
    ("typescript", "ts"): re.compile(r"\A(?!\s*<(\?xml|TS|!DOCTYPE))"),
    ("html", "html"): re.compile(r"<[a-zA-Z!]"), ("html", "htm"): re.compile(r"<[a-zA-Z!]"),
    ("xml", "xml"): re.compile(r"\A\ufeff?\s*<"),
    ("json", "json"): re.compile(r"\A\ufeff?\s*[\[{/\"\d]"),
}  # fmt: skip
_IN_DOUBT = frozenset(
    {("c", "inc"), ("c", "i"), ("c", "def"), ("makefile", "in"), ("makefile", "js"), ("makefile", "py")}
)
_TEMPLATE = re.compile(r"\{%-? ?\w+[^%\n]*%\}|<\?lsmb|<%[=-]|^@@\w+@@", re.M)
_MAY_BE_TEMPLATES = frozenset({"html", "markdown", "yaml", "text", "restructuredtext", "puppet", "php", "ruby", "tex"})
_MARKED_UP = re.compile(r"^\.\. [\w-]+::|^#{1,6} \S|^```|\]\(https?://|^[=~-]{4,}\s*$\n(?=[\s\S])", re.M)
_TEXT_SUFFIXES = frozenset(
    "map mdx asciidoc adoc textile creole wiki rdoc mediawiki html5 js ts css json in py rb c h cpp java".split()
)


def settled(sample: Sample) -> str:
    """The language of one file after a second look, "" where it is in doubt."""
    name = PurePosixPath(sample.path).name.lower()
    if sample.path.startswith("samples/") or re.search(
        r"examplefiles/|tests/(languages|snippets)/|visual/samples/", sample.path
    ):
        return sample.language  # labelled by hand
    if name in _RENAMED:
        return _RENAMED[name]
    language, suffix = sample.language, name.rpartition(".")[2]
    if (language, suffix) in _IN_DOUBT and not name.startswith(("makefile.in", "gnumakefile.in")):
        return ""
    needed = _NEEDED.get((language, suffix))
    if needed and not needed.search(sample.text):
        return ""
    if language not in _MAY_BE_TEMPLATES and _TEMPLATE.search(sample.text):
        return ""
    if language == "text" and (suffix in _TEXT_SUFFIXES or sample.text.lstrip().startswith("/*") or ".rst." in name):
        return ""
    if language == "text" and len(_MARKED_UP.findall(sample.text)) >= 3:  # some mark-up in all but name
        return ""
    if language == "csv":
        lines = [line for line in sample.text.splitlines() if line.strip()]
        if len(lines) < 2 or sum(bool(re.search(r"[,;\t|]", line)) for line in lines) < 0.8 * len(lines):
            return ""
    return language


def clean(samples: Iterable[Sample]) -> Iterator[Sample]:
    """`samples`, which come package by package, with settled labels; C headers of projects with less C than C++ left out."""
    packages: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        language = settled(sample)
        if language:
            packages[sample.package].append(sample._replace(language=language))
    for found in packages.values():
        kinds = Counter(s.language for s in found if not s.path.lower().endswith(".h"))
        mixed = max(kinds["c++"], kinds["objective-c"]) > kinds["c"] and len(kinds) <= 40
        for sample in found:
            if not (mixed and sample.language == "c" and sample.path.lower().endswith(".h")):
                yield sample

"""Natural and programming language identification beside pycld2, lid.176, magika: accuracy per set, items per CPU second.

    python -m tests.bench.identification                       # lingua sentences; 45 snippets of tests/tasks/test_code_lang.py
    python -m tests.bench.identification --code FOLDER...      # held-out packages among archives (tasks/code_lang_fit.py)

Natural: macro accuracy over the 75 languages of ../shared/gold/lingua-lid and over 16 large ones, with bs/hr/sr, ms/id and
nb/nn/no merged. Code: file names hidden, per language; FOLDER holds the collections that tasks/code_lang_fit.py holds out.
"""

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from tasks import code_lang, code_lang_fit, langid_rules
from tasks.code_lang_clean import clean
from tasks.code_lang_samples import Sample, read_packages
from tasks.langid import LanguageIdentifier
from tests.tasks.test_code_lang import SNIPPETS
from tests.tasks.test_langid import GOLD, LARGEST, MODEL

# magika's labels -> ours
MAGIKA = {
    "asm": "assembly", "batch": "batchfile", "cs": "c#", "cpp": "c++", "hpp": "c++", "h": "c", "lisp": "common lisp",
    "objectivec": "objective-c", "proto": "protocol buffer", "rst": "restructuredtext", "latex": "tex", "txt": "text",
    "txtutf8": "text", "vba": "visual basic", "gradle": "groovy", "gemspec": "ruby", "gemfile": "ruby", "svg": "xml",
    "zsh": "shell", "tsx": "typescript", "jsx": "javascript", "csproj": "xml", "rdf": "xml", "jsonl": "json", "ipynb": "json",
    "po": "gettext catalog",
}  # fmt: skip


def timed(function: Callable[[str], str], texts: Sequence[str]) -> tuple[list[str], float]:
    """(answers, texts per CPU second)."""
    start = time.process_time()
    answers = [function(text) for text in texts]
    return answers, len(texts) / (time.process_time() - start)


def macro(truth: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
    right: dict[str, list[bool]] = defaultdict(list)
    for want, got in zip(truth, answers):
        right[want].append(want == got)
    return {label: sum(hits) / len(hits) for label, hits in right.items()}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def natural() -> None:
    import pycld2

    if not GOLD.is_dir() or not MODEL.is_file():
        print("natural languages: skipped, ../shared/gold/lingua-lid or data/acquire/models/lid.176.ftz is absent")
        return
    kin = {path.stem: langid_rules.group(langid_rules.normalize(path.stem)) for path in sorted(GOLD.glob("*.txt"))}
    pairs = [(stem, s) for stem in kin for s in (GOLD / f"{stem}.txt").read_text("utf-8").splitlines() if s.strip()]
    ours = LanguageIdentifier(MODEL)

    def cld2(sentence: str) -> str:
        try:
            return pycld2.detect(sentence.encode(), bestEffort=True)[2][0][1]
        except pycld2.error:  # it refuses control characters
            return ""

    contestants = {
        "arcline": lambda s: ours.identify(s)[0],
        "pycld2": cld2,
        "lid.176": lambda s: (ours.lid_votes(" ".join(s.split())) or [("", 0)])[0][0],
    }
    print(f"natural languages, {len(pairs)} sentences   75 languages   16 largest   unknown   sentences/CPU s")
    for name, identify in contestants.items():
        found, rate = timed(identify, [s for _, s in pairs])
        groups = [langid_rules.group(langid_rules.normalize(code)) for code in found]
        right: dict[str, list[bool]] = defaultdict(list)
        for (stem, _), got in zip(pairs, groups):
            right[stem].append(got == kin[stem])
        by_language = {stem: mean(hits) for stem, hits in right.items()}
        all75, top = mean(list(by_language.values())), mean([by_language[code] for code in LARGEST])
        print(f"{name:36} {all75:12.4f} {top:12.4f} {found.count('') + found.count('un'):9} {rate:14.0f}")


def programming(name: str, samples: Sequence[Sample], least: int = 1, most: int | None = None) -> None:
    """Accuracy per language with names hidden, ours beside magika's.

    `least`: only languages with so many files; `most`: of them the so many with the most files, among those that magika has.
    """
    try:
        from magika import Magika
    except ImportError:
        Magika = None
        print("  magika skipped: not installed (pip install --no-deps magika; it needs onnxruntime)")
    magika = Magika() if Magika else None
    count = Counter(s.language for s in samples)
    chosen = {lang for lang, n in count.items() if n >= least}
    if magika and (most or least > 1):
        theirs = {str(label) for label in magika.get_output_content_types()}
        chosen &= {MAGIKA.get(label, label) for label in theirs}
        chosen = set(sorted(chosen, key=lambda lang: (-count[lang], lang))[:most])
    samples = [s for s in samples if s.language in chosen]
    truth, texts = [s.language for s in samples], [s.text for s in samples]
    print(f"programming languages by content, {name}: {len(samples)} files, {len(chosen)} languages")
    if not samples:
        return
    code_lang.identify(texts[0])  # loads the model
    answers, rate = timed(lambda text: code_lang.identify(text)[0], texts)
    ours, beside = macro(truth, answers), {}
    print(f"  arcline  macro {mean(list(ours.values())):.4f}   {rate:7.0f} files/CPU s")
    if magika:
        magika.identify_bytes(b"x = 1")
        labels, rate = timed(lambda text: str(magika.identify_bytes(text.encode()).output.label), texts)
        beside = macro(truth, [MAGIKA.get(label, label) for label in labels])
        print(f"  magika   macro {mean(list(beside.values())):.4f}   {rate:7.0f} files/CPU s")
    wrong: dict[str, Counter[str]] = defaultdict(Counter)
    for want, got in zip(truth, answers):
        if want != got:
            wrong[want][got or "none"] += 1
    for lang in sorted(chosen):
        mistaken = ", ".join(f"{other} {n}" for other, n in wrong[lang].most_common(3))
        theirs = f"{beside[lang]:7.2f}" if beside else ""
        print(f"    {lang:18} {count[lang]:4} {ours[lang]:7.2f} {theirs}   {mistaken}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", nargs="*", type=Path, default=[], help="folders of package archives")
    args = parser.parse_args()
    natural()
    programming("snippets of the tests", [Sample(lang, "tests", lang, text) for lang, text in SNIPPETS.items()])
    paths = [path for folder in args.code for path in sorted(folder.iterdir())]
    if paths:
        samples = list(clean(read_packages(paths, frozenset(code_lang_fit.LANGUAGES))))
        held_out = [s for s in samples if code_lang_fit.held_out(s.package)]
        linguist = [s for s in held_out if s.package.startswith("github-linguist")]
        programming("Linguist's samples, languages of at least 4 files that magika has too", linguist, 4)
        even = code_lang_fit.balance(held_out, 40)
        programming("held-out collections, the 46 languages of most files that magika has too", even, 1, 46)
        programming("held-out collections, every language", even)


if __name__ == "__main__":
    main()

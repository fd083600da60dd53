"""Train the quality models of tasks/code_quality.py and check them project by project.

    python -m tasks.code_quality_train FOLDER... --installed SITE_PACKAGES --out conf/code_quality.json

Each FOLDER holds one folder or archive per project: source as it was released; SITE_PACKAGES adds the packages INSTALLED
of a Python environment. What the shipped models were made from: conf/code_quality_packages.txt; the models' file names
every project with a digest of the text taken from it. Same projects, same bytes (one thread: OMP_NUM_THREADS=1).

Positives are the files that the rules of the code stage keep; negatives are bad variants of the same files
(tasks/code_variants.py), so that no project's style is a cue, and real files that the rules call generated, minified or
tables, without the lines that say so. Languages with at least `--least` files from two projects get a model; all others
share one. Reported: ROC-AUC with each project left out in turn, and with each kind of negative left out of training.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tasks import archives, code_kinds, code_lang
from tasks.code_features import comment_mark, features
from tasks.code_quality import SHARED, Model, expand, to_json
from tasks.code_text import decode
from tasks.code_variants import VARIANTS
from tasks.files import atomic_write, derive_seed

QUANTILES = (0.1, 0.35, 0.65, 0.9)
L2 = 0.02
MOST_BORROWED = 1500
BORROWED = 0.5  # weight of other languages' examples beside a language's own
PER_PROJECT = 40  # files of one language
VARIANTS_PER_FILE = 3
MAX_BYTES = 60_000
INSTALLED = (
    "aiohttp", "click", "cryptography", "fsspec", "httpx", "hypothesis", "jinja2", "matplotlib", "mlflow", "networkx",
    "numpy", "prefect", "pydantic", "rich", "sqlalchemy", "starlette", "torch", "werkzeug",
)  # fmt: skip
REAL = ("generated", "minified", "data_table", "blob", "long_line", "mean_line")


class Example:
    """One text's features, and where it is from. kind is "file" for a positive."""

    __slots__ = ("language", "project", "kind", "x")

    def __init__(self, language: str, project: str, kind: str, text: str):
        self.language, self.project, self.kind = language, project, kind
        self.x = features(text, language)


def project_files(path: Path) -> dict[str, Callable[[], bytes]]:
    """Files of a folder or an archive by their path in it, under MAX_BYTES each; read when called."""
    if path.is_dir():
        found = (p for p in path.rglob("*") if p.is_file() and not p.is_symlink() and p.stat().st_size < MAX_BYTES)
        return {p.relative_to(path).as_posix(): p.read_bytes for p in found}
    limits = archives.Limits(member_bytes=MAX_BYTES - 1)
    return {m.path: lambda data=m.data: data for m in archives.read_archive(path, limits=limits) if m.data is not None}


def project_name(path: Path) -> str:
    """The folder's name, or the archive's without its ending."""
    return path.name if path.is_dir() else re.sub(r"\.(deb|whl|zip|tgz|tar(\.\w+)?)$", "", path.name)


def read_project(path: Path, name: str, seed: int) -> tuple[list[Example], str]:
    """(examples, sha256 of the texts that they were made from) of one project, at most PER_PROJECT files of a language;
    some variants of each file."""
    config = code_kinds.KindRules(max_bytes=MAX_BYTES, vendored=("node_modules", "vendor"))
    by_language: dict[str, list[tuple[str, str]]] = defaultdict(list)
    bad: dict[str, list[tuple[str, str]]] = defaultdict(list)
    # by hash: files that are not source, as a run leaves them beside it, do not change which source files are drawn
    for inner, read in sorted(project_files(path).items(), key=lambda f: derive_seed(seed, name, f[0])):
        guess = code_lang.detect(inner, "")[0]
        if not guess or guess in code_lang.DATA_KINDS or len(by_language[guess]) >= PER_PROJECT:
            continue
        try:
            text = decode(read())
        except (ValueError, OSError):
            continue
        language = code_lang.detect(inner, text)[0]
        fault = code_kinds.fault(inner, text, min(len(text), MAX_BYTES), language, config)
        if fault is None and len(text) > 400 and len(by_language[language]) < PER_PROJECT:
            by_language[language].append((inner, text))
        elif fault and fault[0] in REAL and len(bad[language]) < PER_PROJECT // 3:
            lines = [x for x in text.split("\n") if not re.search(r"(?i)generat|do not edit|sourceMapping", x)]
            bad[language].append((f"real {fault[0]}", "\n".join(lines)))
    examples = []
    for language, files in sorted(by_language.items()):
        for inner, text in files:
            rng = random.Random(derive_seed(seed, name, inner))
            mark = comment_mark(text, language)
            examples.append(Example(language, name, "file", text))
            for kind in rng.sample(sorted(VARIANTS), VARIANTS_PER_FILE):
                variant = VARIANTS[kind](text, mark, rng)
                if len(variant) > 150 and variant != text:
                    examples.append(Example(language, name, kind, variant))
        examples += [Example(language, name, kind, text) for kind, text in bad.get(language, ())]
    used = json.dumps([sorted(by_language.items()), sorted(bad.items())])
    return examples, hashlib.sha256(used.encode("utf-8", "surrogatepass")).hexdigest()


def fit(examples: list[Example], borrowed: list[Example] = ()) -> Model:
    """Newton's method on the hinge features; both classes weigh the same. ValueError when a class is absent.

    `borrowed` examples of other languages count BORROWED as much in all as the language's own: what is broken looks
    alike everywhere, and most languages have few projects here.
    """
    x = np.array([e.x for e in (*examples, *borrowed)], np.float64)
    y = np.array([e.kind == "file" for e in (*examples, *borrowed)])
    mine = np.arange(len(x)) < len(examples)
    if not 0 < y[mine].sum() < len(examples):
        raise ValueError(f"{int(y[mine].sum())} positives of {len(examples)} examples; both classes are needed")
    knots = np.quantile(x[mine], QUANTILES, axis=0).T
    design = expand(x, knots)
    mean, scale = design[mine].mean(axis=0), design[mine].std(axis=0) + 1e-6
    z = np.hstack([np.clip((design - mean) / scale, -6, 6), np.ones((len(x), 1))])
    sample = np.zeros(len(x))
    for group, weight in ((mine, 1.0), (~mine, BORROWED)):
        for label in (y, ~y):
            sample[group & label] = weight / max(1, (group & label).sum())
    sample /= sample.sum()
    penalty = np.full(z.shape[1], L2)
    penalty[-1] = 0.0
    beta = np.zeros(z.shape[1])
    for _ in range(15):
        p = 1 / (1 + np.exp(-np.clip(z @ beta, -30, 30)))
        gradient = z.T @ (sample * (p - y)) + penalty * beta
        hessian = (z * (sample * p * (1 - p))[:, None]).T @ z + np.diag(penalty + 1e-8)
        step = np.linalg.solve(hessian, gradient)
        beta -= step
        if np.abs(step).max() < 1e-4:
            break
    return Model(knots, mean, scale, beta[:-1], float(beta[-1]), 0.0, 1.0)


def borrow(examples: list[Example], name: str, own: list[Example]) -> list[Example]:
    """Examples of other languages for a model: at most three for each of its own and
    MOST_BORROWED, chosen by a seeded shuffle."""
    mine = {e.language for e in own}
    others = [e for e in examples if e.language not in mine]
    random.Random(derive_seed(0, "borrow", name)).shuffle(others)
    return others[: min(3 * len(own), MOST_BORROWED)]


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Area under the ROC curve, ties counted half; nan when a class is absent."""
    good, bad = scores[positive], scores[~positive]
    if not len(good) or not len(bad):
        return float("nan")
    order = np.sort(bad)
    below, upto = np.searchsorted(order, good, "left"), np.searchsorted(order, good, "right")
    return float((below + upto).mean() / 2 / len(bad))


def left_out(examples: list[Example], borrowed: list[Example], least: int = 6) -> tuple[dict[str, float], np.ndarray]:
    """(AUC per project left out, out-of-project score of every example; nan where its project had too few files)."""
    projects = Counter(e.project for e in examples if e.kind == "file")
    scores, table = np.full(len(examples), np.nan), {}
    for project in sorted(p for p, n in projects.items() if n >= least):
        rest = [e for e in examples if e.project != project]
        if sum(e.kind == "file" for e in rest) < 20:
            continue
        mine = np.array([e.project == project for e in examples])
        others = [e for e in borrowed if e.project != project]
        scores[mine] = fit(rest, others).score(np.array([e.x for e in examples if e.project == project]))
        positive = np.array([e.kind == "file" for e in examples])[mine]
        value = auc(scores[mine], positive)
        if value == value:
            table[project] = round(value, 4)
    return table, scores


def kind_left_out(examples: list[Example], borrowed: list[Example]) -> dict[str, float]:
    """AUC of each kind of negative when training knew the others only; half of the projects, by files, train, half test."""
    size = Counter(e.project for e in examples if e.kind == "file")
    half, filled = {}, [0, 0]
    for project in sorted({e.project for e in examples}, key=lambda p: (-size[p], p)):
        half[project] = side = int(filled[1] < filled[0])
        filled[side] += size[project]
    result = {}
    for kind in sorted({e.kind for e in examples} - {"file"}):
        pairs = []
        for side in (0, 1):
            train = [e for e in examples if half[e.project] == side and e.kind != kind]
            test = [e for e in examples if half[e.project] != side and e.kind in ("file", kind)]
            if sum(e.kind == kind for e in test) >= 3 and sum(e.kind == "file" for e in train) >= 20:
                tested = {e.project for e in test}
                others = [e for e in borrowed if e.project not in tested and e.kind != kind]
                labels = np.array([e.kind == "file" for e in test])
                pairs.append(auc(fit(train, others).score(np.array([e.x for e in test])), labels))
        if pairs:
            result[kind] = round(float(np.mean(pairs)), 4)
    return result


def tiers(scores: np.ndarray, positive: np.ndarray) -> tuple[float, float]:
    """(low, high): under `low` fall 5 % of unseen projects' files; at or above `high`, at most 2 % of their bad variants."""
    known = ~np.isnan(scores)
    if not (known & positive).any() or not (known & ~positive).any():
        raise ValueError(
            "tiers need files and bad variants of a project left out; give more projects, of six files or more"
        )
    low = float(np.quantile(scores[known & positive], 0.05))
    high = float(np.quantile(scores[known & ~positive], 0.98))
    return low, max(high, float(np.quantile(scores[known & positive], 0.3)))


def train(examples: list[Example], least: int) -> tuple[dict[str, Model], dict[str, dict]]:
    """(models, what was measured of each) for every language with `least` files from two projects, and the shared one."""
    own: dict[str, list[Example]] = defaultdict(list)
    for example in examples:
        own[example.language].append(example)
    rich = {}
    for language, found in own.items():
        files = Counter(e.project for e in found if e.kind == "file")
        if sum(files.values()) >= least and sum(n >= 6 for n in files.values()) >= 2:
            rich[language] = found
    if len(rich) == len(own):
        raise ValueError("every language has a model of its own: the shared one needs files of other languages")
    groups = dict(sorted(rich.items())) | {SHARED: [e for e in examples if e.language not in rich]}
    models, report = {}, {}
    for name, found in groups.items():
        borrowed = borrow(examples, name, found)
        per_project, scores = left_out(found, borrowed)
        positive = np.array([e.kind == "file" for e in found])
        known = ~np.isnan(scores)
        model = fit(found, borrowed)
        low, high = tiers(scores, positive)
        models[name] = Model(model.knots_fk, model.mean_d, model.scale_d, model.weight_d, model.bias, low, high)
        report[name] = {
            "files": int(positive.sum()),
            "negatives": int((~positive).sum()),
            "languages": len({e.language for e in found}),
            "auc_left_out": round(auc(scores[known], positive[known]), 4),
            "auc_by_project": per_project,
            "auc_by_new_kind": kind_left_out(found, borrowed),
        }
        kinds = report[name]["auc_by_new_kind"]
        lowest, mean = min(kinds, key=lambda k: kinds[k], default="none"), np.mean([*kinds.values()] or [float("nan")])
        print(
            f"{name:<14} {positive.sum():>5} files {len(per_project):>3} projects, AUC left out "
            f"{report[name]['auc_left_out']:.4f}, lowest project {min(per_project.values(), default=float('nan')):.3f}, new "
            f"kinds mean {mean:.3f} lowest {lowest} {kinds.get(lowest, float('nan')):.3f}",
            flush=True,
        )
    return models, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--installed", type=Path, help="site-packages folder that holds the packages INSTALLED")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--least", type=int, default=80, help="files of a language for a model of its own")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    places = {project_name(p): p for folder in args.folders for p in folder.iterdir() if not p.name.startswith(".")}
    if args.installed:
        places |= {f"site-{name}": args.installed / name for name in INSTALLED}
    examples: list[Example] = []
    projects = {}
    for name, place in sorted(places.items()):
        if not place.exists():
            raise ValueError(f"{place}: not there; --installed needs all of: {', '.join(INSTALLED)}")
        found, digest = read_project(place, name, args.seed)
        examples += found
        projects[name] = {"files": sum(e.kind == "file" for e in found), "sha256": digest}
    models, report = train(examples, args.least)
    if args.out:
        atomic_write(args.out, to_json(models, {"projects": projects, "report": report}))
        print(json.dumps({"models": len(models), "bytes": args.out.stat().st_size}))


if __name__ == "__main__":
    main()

"""Code curation measured: alignment of exports, licences, secrets, quality models, import order; and files per CPU second.

    python -m tests.bench.code_curation            # needs data/acquire (python -m tasks acquire)
    python -m tests.bench.code_curation --part align

Alignment: an export made of the default corpus's source files with planted faults, two seeds. Licences: the licence files
of every installed distribution against its License-Expression. Secrets: planted ones found whole, and alarms on the corpus's
own files per type, addresses aside. Quality: what training reported, with each project left out (conf/code_quality.json).
"""

from __future__ import annotations

import argparse
import json
import random
import string
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib import metadata

from tasks import code_kinds, code_lang, code_quality, licences, repo_order, secrets
from tasks.code_text import decode, is_training_file
from tasks.params import ROOT
from tasks.texts import read_index
from tests.tasks.swh_export import clean_rows, measure, plant

SEEDS = (1, 2)


def corpus() -> Iterator[tuple[dict, str, str]]:
    """(index row, path, text) of the default corpus's source files."""
    acquired = ROOT / "data" / "acquire"
    if not (acquired / "index.parquet").is_file():
        raise SystemExit("error: data/acquire is not there; run `python -m tasks acquire` first")
    for row in read_index(acquired):
        if row["domain"] == "code" and row["kind"] == "code" and is_training_file(row) and row["bytes"] < 262_144:
            try:
                yield row, row["member"], decode((acquired / row["path"]).read_bytes())
            except ValueError:
                continue


def align() -> None:
    files = [
        (row["item"], path, text.encode(), licences.header(text) or row["licence"])
        for row, path, text in corpus()
        if "examplefiles" not in path  # one file per language: nothing there says what belongs where
    ]
    rows = clean_rows(files)
    total: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    start = time.process_time()
    for seed in SEEDS:
        result = measure(plant(rows, seed))
        for kind, (right, planted) in result["recall"].items():
            total[kind][0] += right
            total[kind][1] += planted
        for kind in ("repairs_right", "clean_lost_or_changed"):
            total[kind][0] += result[kind][0]
            total[kind][1] += result[kind][1]
    seconds = time.process_time() - start
    print(
        f"alignment: {len(rows)} rows, {len(SEEDS)} seeds, {len(SEEDS) * len(rows) / seconds:.0f} rows per CPU second"
    )
    for kind, (right, planted) in sorted(total.items()):
        print(f"  {kind:<22} {right:>5} of {planted:>5}  {right / max(1, planted):.3f}")


def licence_files() -> None:
    counts: Counter[str] = Counter()
    start = time.process_time()
    for found in metadata.distributions():
        stated = found.metadata.get("License-Expression")
        files = [f for f in found.files or () if ".dist-info/" in str(f) and licences.is_licence_file(str(f))]
        texts = [f.locate().read_text(errors="replace") for f in files if f.locate().is_file()]
        if not stated or not texts:
            continue
        wanted = licences.ids(stated)
        got = frozenset().union(*(licences.ids(i) for t in texts for i in licences.identify(t).ids))
        counts.update({"distributions": 1, "files": len(texts), "held": wanted <= got, "equal": wanted == got})
        if len(wanted) == len(texts) == 1:
            counts.update({"single": 1, "single_equal": wanted == got})
    seconds = time.process_time() - start
    print(
        f"licences: {counts['distributions']} distributions with License-Expression, {counts['files']} files, "
        f"{counts['files'] / seconds:.0f} files per CPU second: all stated found {counts['held'] / counts['distributions']:.3f}, "
        f"exactly equal {counts['equal'] / counts['distributions']:.3f}; one text, one licence: "
        f"{counts['single_equal']} of {counts['single']}"
    )


def planted_secrets(rng: random.Random) -> list[tuple[str, str]]:
    """(type, line) with a value of each form; `{}` of a host language's assignment around it."""

    def some(size: int, alphabet: str = string.ascii_letters + string.digits) -> str:
        return "".join(rng.choices(alphabet, k=size))

    host = f"{some(8, string.ascii_lowercase)}.{rng.choice(('de', 'io', 'co.uk', 'fr'))}"
    return [
        ("AWS_KEY", "AKIA" + some(16, string.ascii_uppercase + "234567")),
        ("GITHUB_TOKEN", "ghp_" + some(36)),
        ("GOOGLE_KEY", "AIza" + some(35)),
        ("SLACK_TOKEN", f"xoxb-{some(11, string.digits)}-{some(24)}"),
        ("API_KEY", "sk_live_" + some(24)),
        ("JWT", f"eyJhbGciOiJIUzI1NiJ9.eyJ{some(30)}.{some(43)}"),
        ("SECRET", some(32)),
        ("EMAIL", f"{some(6, string.ascii_lowercase)}.{some(7, string.ascii_lowercase)}@{host}"),
        ("IP_ADDRESS", f"{rng.randint(11, 99)}.{rng.randint(0, 255)}.{rng.randint(0, 255)}.{rng.randint(25, 250)}"),
        (
            "PRIVATE_KEY",
            "-----BEGIN PRIVATE KEY-----\\n" + some(64) + "\\n" + some(64) + "\\n-----END PRIVATE KEY-----",
        ),
    ]


def secret_values() -> None:
    rng = random.Random(0)
    texts = [text for _, _, text in corpus()]
    found: Counter[str] = Counter()
    planted: Counter[str] = Counter()
    for text in rng.sample(texts, min(300, len(texts))):
        for kind, value in planted_secrets(rng):
            if kind == "IP_ADDRESS" and not secrets._public_ip(value, ""):
                continue
            name = {"SECRET": "client_secret", "IP_ADDRESS": "host"}.get(kind, "value")
            lines = text.split("\n")
            lines.insert(rng.randrange(len(lines) + 1), f'{name} = "{value}"')
            planted[kind] += 1
            found[kind] += value not in secrets.redact("\n".join(lines))[0]
    start = time.process_time()
    alarms = sum((secrets.redact(text)[1] for text in texts), Counter())
    seconds = time.process_time() - start
    size = sum(map(len, texts)) / 1e6
    print(f"secrets: {size / seconds:.1f} MB per CPU second; planted in real files and removed:")
    print("  " + ", ".join(f"{k} {found[k]}/{planted[k]}" for k in sorted(planted)))
    print(f"  found in the corpus as it is ({size:.1f} MB): {dict(sorted(alarms.items()))}")


def quality() -> None:
    about = json.loads(code_quality.MODELS.read_text())["about"]["report"]
    print("quality models, ROC-AUC with each project left out of training:")
    for name, r in sorted(about.items()):
        kinds = list(r["auc_by_new_kind"].values())
        print(
            f"  {name:<14} {r['files']:>5} files of {r['languages']:>3} languages, {r['auc_left_out']:.4f}, lowest project "
            f"{min(r['auc_by_project'].values(), default=float('nan')):.3f}, unseen kinds of fault "
            f"{sum(kinds) / max(1, len(kinds)):.3f}"
        )
    rows = [(path, text, code_lang.detect(path, text)[0]) for _, path, text in corpus()]
    config = code_kinds.KindRules()
    rows = [r for r in rows if code_kinds.fault(r[0], r[1], len(r[1]), r[2], config) is None]
    start = time.process_time()
    tiers = Counter(t for _, t, _ in code_quality.assess([r[1] for r in rows], [r[2] for r in rows]))
    seconds = time.process_time() - start
    print(f"  {len(rows) / seconds:.0f} files per CPU second; the corpus: {dict(tiers)}")


def import_order() -> None:
    repos: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for row, path, text in corpus():
        repos[row["item"]][path] = (text, code_lang.detect(path, text)[0])
    before = kept = edges = files = 0
    start = time.process_time()
    for found in repos.values():
        tree = repo_order.Tree(found)
        at = {path: n for n, path in enumerate(repo_order.order(found))}
        plain = {path: n for n, path in enumerate(sorted(found))}
        files += len(found)
        for path, (text, language) in found.items():
            for other in repo_order.imports(path, text, language, tree):
                edges += 1
                kept += at[other] < at[path]
                before += plain[other] < plain[path]
    seconds = time.process_time() - start
    print(
        f"import order: {files} files, {edges} imports inside their repository; imported file first {kept / edges:.3f} "
        f"(by path alone {before / edges:.3f}); {2 * files / seconds:.0f} files read per CPU second"
    )


PARTS = {"align": align, "licences": licence_files, "secrets": secret_values, "quality": quality, "order": import_order}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=PARTS)
    args = parser.parse_args()
    for name, part in PARTS.items():
        if args.part in (None, name):
            part()


if __name__ == "__main__":
    main()

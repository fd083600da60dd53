"""Tables of the code stage: documents, bytes, tiers and scores per language; documents and bytes per licence."""

from __future__ import annotations

import csv
import json
from collections import Counter, defaultdict
from pathlib import Path

from tasks import licences
from tasks.code_quality import TIERS


class Tables:
    """Counts what the stage keeps, document by document."""

    def __init__(self) -> None:
        self.languages: dict[str, Counter] = defaultdict(Counter)
        self.licences: dict[tuple[str, str], Counter] = defaultdict(Counter)
        self.repositories: Counter[str] = Counter()

    def add(self, row: dict) -> None:
        """Count one document."""
        meta, size = json.loads(row["meta"]), len(row["text"].encode("utf-8"))
        counts = {"documents": 1, "bytes": size, meta.get("tier", "repo"): 1, "quality": row["quality"]}
        self.languages[row["lang"]].update(counts)
        self.licences[meta["licence"] or "unknown", meta["licence_from"]].update({"documents": 1, "bytes": size})
        if meta.get("kind") == "repo":
            self.repositories.update({"documents": 1, "files": len(meta["files"]), "bytes": size})

    def write(self, out: Path) -> dict:
        """Write languages.csv and licences.csv below `out`; returns what goes into the metrics."""
        columns = ["documents", "bytes", *TIERS, "repo"]
        languages = sorted(self.languages.items(), key=lambda item: (-item[1]["bytes"], item[0]))
        _write(
            out / "languages.csv",
            ["language", *columns, "mean_quality"],
            [[name, *(c[k] for k in columns), f"{c['quality'] / c['documents']:.4f}"] for name, c in languages],
        )
        found = sorted(self.licences.items(), key=lambda item: (-item[1]["bytes"], item[0]))
        _write(
            out / "licences.csv",
            ["licence", "from", "spdx", "documents", "bytes"],
            [[n, origin, int(bool(licences.normalise(n))), c["documents"], c["bytes"]] for (n, origin), c in found],
        )
        by_name, by_origin, tiers = Counter(), Counter(), Counter()
        for (name, origin), c in found:
            by_name[name] += c["documents"]
            by_origin[origin or "none"] += c["documents"]
        for _, c in languages:
            tiers.update({tier: c[tier] for tier in TIERS})
        return {
            "languages": {"count": len(languages), "largest": {name: c["documents"] for name, c in languages[:30]}},
            "licences": dict(sorted(by_name.most_common(30))),
            "licences_from": dict(sorted(by_origin.items())),
            "tiers": dict(tiers),
            "repository_documents": {k: self.repositories[k] for k in ("documents", "files", "bytes")},
        }


def _write(path: Path, head: list[str], rows: list[list]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)

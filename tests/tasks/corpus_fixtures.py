"""A miniature corpus for the tests of acquire and web: source archives of real shapes, and a list that pins them."""

import io
import json
import re
import tarfile
from pathlib import Path

import yaml

from tests.tasks.package_index import digest

ENGLISH = (
    "The lighthouse at the end of the harbour was built in the year the railway came to the town, and for a long time it was "
    "the first thing that sailors saw of the coast. Its keeper lived in the small house below it with his family. "
)
FRENCH = (
    "Le phare qui se trouve au bout du port a été construit l'année où le chemin de fer est arrivé dans la ville, et pendant "
    "longtemps ce fut la première chose que les marins voyaient de la côte. Son gardien vivait avec sa famille dans la maison. "
)
NOUNS = "tower church bridge market castle mill school station theatre garden quarry museum canal abbey library wharf".split()


def article(i: int, base: str = ENGLISH) -> str:
    """A page with furniture around an article; each i gives another text."""
    noun = NOUNS[i % len(NOUNS)]
    paragraphs = [
        base.replace("lighthouse", noun).replace("phare", noun),
        base,
        f"The {noun} number {i} is open in summer. " * 2,
    ]
    body = "".join(f"<p>{p}</p>" for p in paragraphs)
    menu = "<nav><ul>" + "".join(f"<li><a href='/{n}'>{n} page</a></li>" for n in NOUNS) + "</ul></nav>"
    return (
        f"<html><head><title>{noun} {i}</title></head><body>{menu}<main><h1>{noun} {i}</h1>{body}</main></body></html>"
    )


def login(i: int) -> str:
    """A page that is all furniture."""
    rows = [
        f"Welcome to shop {i}",
        "Sign in to your account",
        "User name",
        "Password",
        "Forgot your password?",
        "Register now",
    ]
    rows += [f"{n.title()} deals" for n in NOUNS] + ["Subscribe to our newsletter", "Privacy Policy", "Terms of Use"]
    return "<html><body><main>" + "".join(f"<div>{r}</div>" for r in rows) + "</main></body></html>"


def tarball(root: str, files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{root}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def archives(model: bytes) -> dict[str, bytes]:
    """File name -> archive: articles with traps, log-in pages with an address list, an encyclopedia, code, a model."""
    pages = {f"doc/{i:02d}.html": article(i).encode() for i in range(24)}
    pages |= {f"doc/fr{i}.html": article(i, FRENCH).encode("windows-1252") for i in range(3)}
    pages["doc/broken.html"] = b"%PDF-1.4 not a page"
    pages["doc/empty.html"] = b"<html><body></body></html>"
    pages["doc/lorem.html"] = f"<p>{ENGLISH * 2}</p><p>Lorem ipsum dolor sit amet, consectetur.</p>".encode()
    pages["doc/../../evil.html"] = b"<p>evil"
    pages["LICENSE"] = b"MIT License, of the articles"
    pages["doc/skip/x.html"] = article(99).encode()
    logins = {f"data/html/{i}.html": login(i).encode() for i in range(24)}
    urls = {f"html/{i}.html": {"url": f"http://shop{i}.example/log in", "forms": ["l", "s"]} for i in range(24)}
    logins["data/index.json"] = json.dumps(urls).encode()
    entries = {
        f"{n} {i}": {"title": f"{n} {i}", "extract": ENGLISH.replace("lighthouse", n) * 2}
        for i, n in enumerate(NOUNS * 2)
    }
    entries["bad"] = {"title": "bad"}
    wiki = {"data/en.json": json.dumps(entries).encode(), "COPYING.txt": b"CC-BY-SA"}
    code = {"src/a.py": b"print(1)\n", "src/vendor/LICENSE": b"BSD", "src/vendor/b.c": b"int x;\n", "LICENSE": b"MIT"}
    return {
        "articles-1.0.tar.gz": tarball("articles-1.0", pages),
        "logins-2.0.tar.gz": tarball("logins-2.0", logins),
        "wiki-3.0.tar.gz": tarball("wiki-3.0", wiki),
        "code-1.tar.gz": tarball("code-1", code),
        "code-2.tar.gz": tarball("code-2", code | {"src/a.py": b"print(2)\n"}),
        "lid-1.tar.gz": tarball("lid-1", {"lid.ftz": model}),
    }


def corpus_list(files: dict[str, bytes], **change) -> dict:
    """The list for `archives`; `change` maps an item's name to fields to change."""

    def pin(name: str) -> dict:
        return {"version": name.rpartition("-")[2].removesuffix(".tar.gz"), "file": name, "sha256": digest(files[name])}

    def item(name: str, archive: str, domain: str, globs: list[str], **more) -> dict:
        fields = {"name": name, "set": "base", "registry": "pip", "licence": "MIT", "domain": domain, "globs": globs}
        return fields | (pin(archive) if archive else {}) | more | change.get(name, {})

    releases = {v: {"file": f"code-{v}.tar.gz", "sha256": digest(files[f"code-{v}.tar.gz"])} for v in ("1", "2")}
    items = [
        item("articles", "articles-1.0.tar.gz", "web", ["doc/**/*.html"], excludes=["doc/skip/**"]),
        item("logins", "logins-2.0.tar.gz", "web", ["data/html/*.html"], url_index="data/index.json"),
        item("wiki", "wiki-3.0.tar.gz", "encyclopedia", ["data/*.json"], licence="CC-BY-SA-4.0"),
        item("code", "", "swe", ["src/**"], releases=releases),
        item("lid", "lid-1.tar.gz", "model", []),
        item("extra", "articles-1.0.tar.gz", "web", ["**"], set="more", file="extra-9.tar.gz", sha256="0" * 64),
    ]
    models = [{"item": "lid", "path": "lid.ftz", "target": "lid.176.ftz"}]
    return {"date": "2026-01-01", "models": models, "items": items}


def write_list(path: Path, corpus: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(corpus, allow_unicode=True))
    return path


def train_language_model(folder: Path) -> bytes:
    """A real fastText language model of three languages, small enough to train in a second."""
    import fasttext

    folder.mkdir(parents=True, exist_ok=True)
    spanish = (
        "El faro que se encuentra al final del puerto fue construido el año en que llegó el ferrocarril a la ciudad. "
    )
    lines = ["__label__en " + " ".join(re.sub(r"<[^>]+>", " ", login(i)).split()) for i in range(3)] * 10
    for lang, text in (("en", ENGLISH), ("fr", FRENCH), ("es", spanish)):
        words = text.split()
        lines += [f"__label__{lang} {' '.join(words[i : i + 8])}" for i in range(len(words) - 8)] * 5
    (folder / "train.txt").write_text("\n".join(lines) + "\n")
    model = fasttext.train_supervised(
        str(folder / "train.txt"), dim=8, epoch=20, minn=2, maxn=3, bucket=2000, thread=1, verbose=0
    )
    model.save_model(str(folder / "model.ftz"))
    return (folder / "model.ftz").read_bytes()

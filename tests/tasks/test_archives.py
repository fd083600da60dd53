"""Unpacking untrusted archives: what is unsafe is refused by name, what is broken or a bomb is an error, the rest comes out."""

import gzip
import io
import shutil
import subprocess
import tarfile
import zipfile

import pytest

from tasks.archives import ArchiveError, Limits, compile_glob, gunzip_limited, matches, read_archive, safe_path


def make_tar(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(data, bytes):
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
            else:
                archive.addfile(info)
    return path


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, None


@pytest.mark.parametrize(
    "pattern, path, hit",
    [
        ("**/*.html", "a.html", True),
        ("**/*.html", "x/y/a.html", True),
        ("*/*.html", "x/y/a.html", False),
        ("doc/**", "doc/a/b", True),
        ("doc/**", "docs/a", False),
        ("c[a-r][0-9]", "ca1", True),
        ("c[a-r][0-9]", "cz1", False),
        ("**/lua5[14]/**/*.lua", "t/lua54/x/y.lua", True),
        ("a?c", "a/c", False),
        ("a+b", "a+b", True),
    ],
)
def test_globs(pattern, path, hit):
    assert bool(compile_glob(pattern).fullmatch(path)) is hit


def test_excludes_win_over_globs():
    assert matches("doc/a.html", ["doc/*"], []) and not matches("doc/a.html", ["doc/*"], ["**/a.*"])


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/passwd", "a\\..\\x", "C:/x", "", "a\x00b", "x" * 300, "./.."]
)
def test_unsafe_names(name):
    assert safe_path(name) is None


def test_names_are_normalised():
    assert safe_path("./a//b/./c.txt") == "a/b/c.txt"


def test_zip_slip_tar_yields_only_the_safe_files(tmp_path):
    path = make_tar(
        tmp_path / "p-1.tar.gz",
        [
            ("p-1/good.txt", b"good"),
            ("p-1/../../evil.txt", b"evil"),
            ("/abs.txt", b"evil"),
            special("p-1/link.txt", tarfile.SYMTYPE, "/etc/passwd"),
            special("p-1/hard.txt", tarfile.LNKTYPE, "p-1/good.txt"),
            special("p-1/device.txt", tarfile.CHRTYPE),
            special("p-1/fifo.txt", tarfile.FIFOTYPE),
            ("p-1/sub/good2.txt", b"more"),
        ],
    )
    found = list(read_archive(path, ["**/*.txt"]))
    assert {m.path: m.data for m in found if not m.refused} == {"good.txt": b"good", "sub/good2.txt": b"more"}
    refused = {m.path: m.refused for m in found if m.refused}
    assert refused["p-1/../../evil.txt"] == refused["/abs.txt"] == "unsafe path"
    assert refused["link.txt"] == refused["hard.txt"] == "link"
    assert refused["device.txt"] == refused["fifo.txt"] == "not a regular file"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p-1.tar.gz"]


def test_zip_with_unsafe_names_and_links(tmp_path):
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/ok.txt", "ok")
        archive.writestr("../evil.txt", "evil")
        link = zipfile.ZipInfo("pkg/link.txt")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    found = {m.path: m.refused or m.data for m in read_archive(path)}
    assert found == {"pkg/ok.txt": b"ok", "../evil.txt": "unsafe path", "pkg/link.txt": "link"}


def test_gzip_bomb_is_stopped_before_it_is_unpacked(tmp_path):
    path = make_tar(tmp_path / "bomb-1.tar.gz", [("b/zeros.bin", bytes(30 << 20)), ("b/a.txt", b"x")])
    assert path.stat().st_size < 100_000
    with pytest.raises(ArchiveError, match="bomb-1.tar.gz: .*decompression bomb"):
        list(read_archive(path, ["**/*.txt"], limits=Limits(total_bytes=4 << 20)))


def test_zip_bomb_and_large_members(tmp_path):
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(6):
            archive.writestr(f"{i}.bin", bytes(1 << 20))
    assert [m.refused for m in read_archive(path, limits=Limits(member_bytes=1000))] == ["too large"] * 6
    with pytest.raises(ArchiveError, match="decompression bomb"):
        list(read_archive(path, limits=Limits(total_bytes=4 << 20)))


def test_too_many_members(tmp_path):
    path = make_tar(tmp_path / "many-1.tar.gz", [(f"r/{i}", b"") for i in range(20)])
    with pytest.raises(ArchiveError, match="more than 10 members"):
        list(read_archive(path, limits=Limits(members=10)))


def test_truncated_and_empty_archives_are_named(tmp_path):
    path = make_tar(tmp_path / "cut-1.tar.gz", [("r/a.txt", bytes(range(256)) * 400)])
    path.write_bytes(path.read_bytes()[:-30])
    (tmp_path / "zero.tar.gz").write_bytes(b"")
    (tmp_path / "text.whl").write_bytes(b"not a zip")
    for name in ("cut-1.tar.gz", "zero.tar.gz", "text.whl", "x.rar"):
        with pytest.raises(ArchiveError, match=name):
            list(read_archive(tmp_path / name))


def test_tar_root_is_stripped_but_not_in_wheels(tmp_path):
    tar = make_tar(tmp_path / "p-1.tar.gz", [("p-1/doc/a.html", b"a"), ("p-1", b"")])
    assert [m.path for m in read_archive(tar, ["doc/*"])] == ["doc/a.html"]
    with zipfile.ZipFile(tmp_path / "p.whl", "w") as archive:
        archive.writestr("p/a.html", "a")
    assert [m.path for m in read_archive(tmp_path / "p.whl", ["p/*"])] == ["p/a.html"]


def test_gunzip_limited():
    assert gunzip_limited(gzip.compress(b"abc"), 10, "x") == b"abc"
    with pytest.raises(ArchiveError, match="x: decompresses beyond 10"):
        gunzip_limited(gzip.compress(bytes(1000)), 10, "x")
    with pytest.raises(ArchiveError, match="not readable"):
        gunzip_limited(gzip.compress(b"abc" * 1000)[:-12], 10_000, "x")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_debian_package_is_streamed(tmp_path):
    root = tmp_path / "root"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN/control").write_text(
        "Package: p\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: d\n"
    )
    (root / "usr/share/doc/p").mkdir(parents=True)
    (root / "usr/share/doc/p/a.html").write_text("<p>hello")
    (root / "usr/share/doc/p/link.html").symlink_to("/etc/passwd")
    subprocess.run(["dpkg-deb", "--build", str(root), str(tmp_path / "p_1_all.deb")], check=True, capture_output=True)
    found = {m.path: m.refused or m.data for m in read_archive(tmp_path / "p_1_all.deb", ["usr/share/**/*.html"])}
    assert found == {"usr/share/doc/p/a.html": b"<p>hello", "usr/share/doc/p/link.html": "link"}
    (tmp_path / "bad_1_all.deb").write_bytes((tmp_path / "p_1_all.deb").read_bytes()[:200])
    with pytest.raises(ArchiveError, match="bad_1_all.deb"):
        list(read_archive(tmp_path / "bad_1_all.deb"))

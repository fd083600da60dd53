"""Text of a source file, and which files of the default corpus are one: shared by code, math and swe_data."""

from __future__ import annotations

import codecs
import re

_CODING = re.compile(rb"coding[=:]\s*([-\w.]+)")
_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def decode(data: bytes, declared: str = "") -> str:
    """Text of a source file: byte order marks and Python's coding line are honoured, else UTF-8, else the charset `declared`.

    Line ends become \\n. ValueError tells why a file is no text.
    """
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "")
    if not encoding:
        if b"\0" in data:
            raise ValueError("holds NUL bytes: not a text file")
        coding = _CODING.search(b"\n".join(data.split(b"\n", 2)[:2]))
        encoding = coding.group(1).decode("ascii") if coding else "utf-8"
    for name in dict.fromkeys((encoding, declared or encoding)):
        try:
            return data.decode(name).replace("\r\n", "\n").replace("\r", "\n")
        except (UnicodeDecodeError, LookupError) as error:
            problem = ValueError(f"does not decode as {name}: {error}")
    raise problem


def is_training_file(row: dict) -> bool:
    """Whether an index row is a loose file (pages are in the WARC) that is not evaluation material."""
    return row["path"].startswith("files/") and row.get("use") != "evaluation"

"""PDFs made by hand: what tests of the PDF reader read."""

from __future__ import annotations

Placed = tuple[float, float, str] | tuple[float, float, str, float]


def make_pdf(pages: list[list[Placed]], trailer: str = "", count: int | None = None) -> bytes:
    """A PDF by hand: each page is a list of (x, y, line) or (x, y, line, size) set in Helvetica, of size 10 where none is given.

    `trailer` is added to the trailer's dictionary; `count` is the number of pages that the file claims to have.
    """
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", "", "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"]
    kids = []
    for page in pages:
        parts = []
        for x, y, line, *size in page:
            escaped = line.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")
            parts.append(f"/F1 {size[0] if size else 10} Tf 1 0 0 1 {x} {y} Tm ({escaped}) Tj")
        stream = f"BT {' '.join(parts)} ET"
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents {len(objects)} 0 R"
            " /Resources << /Font << /F1 3 0 R >> >> >>"
        )
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {count or len(kids)} >>"
    out, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    table = "".join(f"{o:010d} 00000 n \n" for o in offsets)
    tail = (
        f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer\n<< /Size {len(objects) + 1} /Root 1 0 R {trailer} >>\n"
        f"startxref\n{len(out)}\n%%EOF\n"
    )
    return out + tail.encode()


LEFT = [
    "The left column begins here and has in it the",
    "a first sentence of several lines that then",
    "comes to its end in the midst of a hyphen-",
    "ated word, and then it goes on and further",
    "on with more text about so many primes.",
    "Nothing else is told of them in this column",
]
RIGHT = [
    "The right column is read second and it",
    "tells about fields and rings that often",
    "have an ideal structure in more than",
    "some sense that we define at length",
    "when we come to it, without any haste",
    "in the next part of this",
]


def two_columns(number: int) -> list[Placed]:
    """A page of a journal: running head, page number, a title over both columns, the columns stored line by line across."""
    letter = "abcdefgh"[number % 8]
    page: list[Placed] = [(60, 770, "Journal of Examples, volume 7"), (290, 20, str(number))]
    page += [
        (
            60,
            740,
            f"A title over both of the columns of page {letter} of this journal, long enough to span the two of them fully",
        )
    ]
    for i, (left, right) in enumerate(zip(LEFT, RIGHT)):
        right = f"{right} {letter * 3}" if right.endswith("of this") else right
        page += [(60, 700 - 14 * i, left), (330, 700 - 14 * i, right)]
    return page

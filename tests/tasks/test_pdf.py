"""PDFs: reading order, scripts, running heads, hyphens, references; hostile files are rejected with their reason."""

from __future__ import annotations

import random
import zlib

import pytest

from tasks import pdf
from tasks.pdf_chars import glyph
from tasks.pdf_layout import Line
from tasks.pdf_text import clean, join_words, vocabulary
from tests.tasks.pdf_fixtures import make_pdf, two_columns


def test_columns_running_heads_and_hyphens():
    found = pdf.read_pdf(make_pdf([two_columns(n) for n in (11, 12, 13, 14)]))
    assert (found.read, found.pages) == (4, 4)
    assert "Journal" not in found.text and "\n11" not in found.text
    assert found.removed == {"page_number": 4, "running_head": 4}
    assert found.examples["running_head"][0] == "Journal of Examples, volume 7"
    assert "hyphenated word" in found.text
    flat = " ".join(found.text.split())
    first = flat.index("The left column")
    assert flat.index("many primes.") < flat.index("The right column", first) < flat.index("part of this ddd", first)
    assert flat.index("A title over both") < first
    assert pdf.read_pdf(make_pdf([two_columns(1)] * 3), pdf.Limits(read_pages=1)).read == 1


def test_parts_can_be_switched_off():
    data = make_pdf([two_columns(n) for n in (11, 12, 13, 14)])
    assert "Journal" in pdf.read_pdf(data, heads=False).text
    assert "hyphen- ated" in pdf.read_pdf(data, hyphens=False).text
    across = pdf.read_pdf(data, columns=False).text
    assert "The left column begins here and has in it the The right column" in across


def test_a_table_is_not_read_by_columns():
    rows = [(60, 700 - 14 * i, f"entry number {i} of the list") for i in range(12)]
    rows += [(500, 700 - 14 * i, str(10 * i)) for i in range(12)]
    text = pdf.read_pdf(make_pdf([rows])).text
    assert "entry number 3 of the list 30" in text.replace("\n", " | ")


def test_scripts_and_fractions():
    page = [
        (60, 700, "Let the number x"), (137, 704, "2", 7), (143, 700, "+ y"), (158, 697, "i+1", 7), (170, 700, "be known."),
        (60, 640, "A second line of plain words stands here below."),
    ]  # fmt: skip
    text = pdf.read_pdf(make_pdf([page])).text
    assert "Let the number x^2 + y_{i+1} be known." in text
    assert "^" not in pdf.read_pdf(make_pdf([page]), scripts=False).text


def line(text: str, y: float, size: float = 10, x1: float = 500, x0: float = 60) -> Line:
    return Line(x0, x1, y, size, text)


def prose(n: int, start: float = 700) -> list[Line]:
    return [
        line(f"Word after word of paragraph text number {i} goes on and on in this line", start - 12 * i)
        for i in range(n)
    ]


def test_reference_list_goes_and_the_appendix_stays():
    page = prose(30)
    page += [
        line("References", 300, 14, 120),
        line("[1] A. Author, A title, 1999.", 280),
        line("[2] B. Writer, Other, 2001.", 268),
    ]
    page += [line("Appendix A", 240, 14, 120), line("More about it follows here.", 220)]
    found = clean([page])
    assert "Author" not in found.text and "Appendix A" in found.text and "More about it" in found.text
    assert found.removed["references"] == 3
    assert "Author" in clean([page], strip=False).text


def test_a_section_called_literature_without_entries_stays():
    page = prose(30) + [
        line("Literature", 300, 14, 120),
        line("We read many novels in this course of lectures, all of them.", 280),
    ]
    assert "novels" in clean([page]).text


def test_contents_and_index_go():
    contents = [line("Contents", 700, 14, 120)] + [
        line(f"{i} Chapter . . . . . . . . . . {i}", 680 - 12 * i) for i in range(1, 6)
    ]
    index = [line("Index", 700, 14, 120)] + [line(f"entry {w}, {w * 7}, {w * 9}", 680 - 12 * w) for w in range(1, 20)]
    found = clean([contents, prose(40), prose(40), index])
    assert "Chapter" not in found.text and "entry" not in found.text and "paragraph text number 39" in found.text
    assert found.removed["contents"] == 6 and found.removed["index"] == 20


def test_footnotes_do_not_interrupt_a_sentence():
    first = prose(20) + [line("and the sentence that ends on the", 450), line("1 A note in small type.", 60, 7)]
    second = [line("next page is whole.", 700, x1=200), line("Then a new paragraph begins here.", 660)]
    text = clean([first, second]).text
    assert "ends on the next page is whole." in text
    assert text.index("whole.") < text.index("A note in small type") < text.index("Then a new")


def test_section_titles_at_the_top_of_pages_are_not_running_heads():
    titles = ["The first topic", "Groups", "On rings", "Of fields", "Ideals", "Modules at last"]
    pages = [[line(t, 760, 12, 150), *[line(f"{l.text} {t}", l.y - 10) for l in prose(20)]] for t in titles[:3]]
    text = clean(pages).text
    assert all(t + "\n" in text for t in titles[:3])


def test_hyphens():
    known = vocabulary([line("a well-known fact about different things", 1)])
    assert join_words("wholly differ-", "ent things", known) == "wholly different things"
    assert join_words("are well-", "known by all", known) == "are well-known by all"
    assert join_words("the Hardy-", "Littlewood circle", known) == "the Hardy-Littlewood circle"


@pytest.mark.parametrize(
    "code, font, text",
    [(0xFB01, "X", "fi"), (0x0B, "CMMI10", "α"), (0x14, "CMSY10", "≤"), (0x0C, "CMR10", "fi"), (0x1C, "SFRM1000", "fi"),
     (0xF061, "Symbol", "α"), (0xF732, "CMMI10", "2"), (0xF8F1, "CMEX10", ""), (0xF8F2, "CMEX10", "{"), (0x02, "CMR10", "-"),
     (65, "CMR10", "A"), (0x58, "CMEX10", "∑"), (0x68, "CMSY10", "⟨"), (0x30, "CMSY7", "′"), (0x52, "MSBM10", "ℝ"),
     (0x7C, "CMSY10", "|"), (0x41, "CMSY10", "A"), (0x2C, "CMMI10", ","), (0xE123, "X", "")],
)  # fmt: skip
def test_glyphs_without_unicode_values(code, font, text):
    assert glyph(code, font) == text


ENCRYPTED = (
    "/Encrypt << /Filter /Standard /V 1 /R 2 /O <" + "41" * 32 + "> /U <" + "42" * 32 + "> /P -4 >> /ID [<00> <00>]"
)


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"", "not_pdf"),
        (b"<html>no</html>", "not_pdf"),
        (b"%PDF-1.4 nothing", "truncated"),
        (b"%PDF-1.4 nothing\n%%EOF\n", "not_pdf"),
        (make_pdf([two_columns(1)], ENCRYPTED), "encrypted"),
        (make_pdf([two_columns(1)] * 5), "too_many_pages"),
        (make_pdf([[]]), "no_text"),
        (make_pdf([[(60, 790 - i, f"{i} " * 60) for i in range(0, 780, 8)]]), "too_large"),
    ],
)
def test_bad_files_have_reasons(data, reason):
    with pytest.raises(pdf.BadPdf) as error:
        pdf.read_pdf(data, pdf.Limits(max_pages=4, page_chars=5000))
    assert error.value.reason == reason


def test_a_file_that_claims_millions_of_pages_is_read_or_rejected():
    try:
        assert pdf.read_pdf(make_pdf([two_columns(1)], count=9_000_000)).read < 5
    except pdf.BadPdf as error:
        assert error.reason == "too_many_pages"


def bomb(megabytes: int) -> bytes:
    """A page whose compressed content unfolds to `megabytes` of text operators."""
    unit = b"".join(
        b"BT /F1 10 Tf 1 0 0 1 %d %d Tm (word %d) Tj ET\n" % (i % 500, 800 - i % 797, i) for i in range(20_000)
    )  # fmt: skip
    stream = zlib.compress(unit * (megabytes * 1_000_000 // len(unit)), 9)
    data = make_pdf([[(60, 700, "x")]])
    start, end = data.index(b"4 0 obj"), data.index(b"5 0 obj")
    body = b"4 0 obj\n<< /Filter /FlateDecode /Length %d >>\nstream\n" % len(stream) + stream + b"\nendstream\nendobj\n"
    return data[:start] + body + data[end:]


@pytest.fixture(scope="module")
def reader():
    with pdf.Reader(pdf.Limits(seconds=20.0, memory_bytes=1 << 30)) as reader:
        yield reader


def test_the_reader_survives_what_it_reads(reader):
    good = make_pdf([two_columns(n) for n in (1, 2, 3, 4)])
    expected = pdf.read_pdf(good).text
    assert reader.read(good).text == expected
    with pytest.raises(pdf.BadPdf) as error:
        reader.read(bomb(12))
    assert error.value.reason in ("too_large", "timeout", "memory", "crashed")
    assert reader.read(good).text == expected
    reader._process.kill()
    with pytest.raises(pdf.BadPdf, match="crashed"):
        reader.read(good)
    assert reader.read(good).text == expected


def test_time_is_limited():
    with pdf.Reader(pdf.Limits(seconds=0.01)) as reader:
        with pytest.raises(pdf.BadPdf, match="timeout"):
            reader.read(make_pdf([two_columns(1)]))


def test_mutated_files_give_text_or_a_reason(reader):
    good, rng = make_pdf([two_columns(n) for n in (1, 2)]), random.Random(0)
    outcomes = set()
    for _ in range(120):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 30)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data))]
        try:
            assert isinstance(reader.read(bytes(data)).text, str)
            outcomes.add("text")
        except pdf.BadPdf as error:
            outcomes.add(error.reason)
    assert "text" in outcomes and len(outcomes) > 1
    assert not outcomes & {"crashed", "timeout", "unreadable"}

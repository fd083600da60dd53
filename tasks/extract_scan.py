"""Serialised HTML to elements and text blocks: one pass over the bytes, compiled by numba.

Input is what an HTML5 parser serialised (resiliparse's lexbor: `tree.document.html`), hence well nested, attributes in
double quotes and only &amp; &lt; &gt; &nbsp; &quot; as entities. A block is the text between two block-level
boundaries (or two `<br>` in a row); its text has white space collapsed, except inside `<pre>`. Anything else than
serialised HTML gives worse blocks, never an error: every index is bounded by the buffers' lengths.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tasks.extract_hash import FNV, fnv1a, hash_table, lookup, mix

_BLOCK = (
    "address article aside blockquote body center dd details dialog dir div dl dt fieldset figcaption figure footer form "
    "frameset h1 h2 h3 h4 h5 h6 header hgroup hr html legend li listing main menu nav ol p pre section summary table "
    "tbody td tfoot th thead tr ul caption option optgroup search"
).split()
_INLINE = (
    "a b strong em i u span code tt kbd samp font small time label abbr cite q sub sup mark img br del ins big".split()
)
_VOID = "area base basefont bgsound br col embed frame hr img input keygen link meta param source track wbr".split()
_RAW = "iframe noembed noframes plaintext script style xmp".split()  # serialised without escaping
_SKIP = "audio button canvas datalist head map noscript object select svg template textarea title video rp".split()

TAGS = [""] + list(dict.fromkeys(_BLOCK + _INLINE + _VOID + _RAW + _SKIP))
TAG_ID = {name: number for number, name in enumerate(TAGS)}
IS_BLOCK = np.array([name in _BLOCK for name in TAGS])
IS_VOID = np.array([name in _VOID for name in TAGS])
IS_RAW = np.array([name in _RAW for name in TAGS])
IS_SKIP = np.array([name in _SKIP for name in TAGS])
IS_EMPHASIS = np.array([name in ("b", "strong", "em", "i", "u", "mark") for name in TAGS])
_A, _BR, _PRE, _LI, _TR, _TD, _TH, _IMG = (TAG_ID[t] for t in ("a", "br", "pre", "li", "tr", "td", "th", "img"))
_UL, _OL, _TIME, _CODE = (TAG_ID[t] for t in ("ul", "ol", "time", "code"))
CUSTOM = len(TAGS)  # id of elements with a hyphen in their name: unknown, treated as block-level

# columns of `stats`, counts over one block
COLUMNS = (
    "chars words cjk link_chars links ends commas digits upper emphasis short symbols tags breaks last images code "
    "capitalised pre list_item list_depth row cell times title_words hash"
).split()
(
    CHARS,
    WORDS,
    CJK,
    LINK_CHARS,
    LINKS,
    ENDS,
    COMMAS,
    DIGITS,
    UPPER,
    EMPHASIS,
    SHORT,
    SYMBOLS,
    INLINE_TAGS,
    BREAKS,
    LAST,
    IMAGES,
    CODE,
    CAPITALISED,
    IN_PRE,
    LIST_ITEM,
    LIST_DEPTH,
    ROW,
    CELL,
    TIMES,
    TITLE_WORDS,
    HASH,
) = range(len(COLUMNS))

TEXT, OPEN, CLOSE = 0, 1, 2


_TAG_SLOTS, _TAG_VALUES = hash_table([fnv1a(t.encode()) for t in TAGS[1:]], list(range(1, len(TAGS))), 9)


@njit(cache=True, nogil=True)
def _find(buf, at, tag_start, tag_end):
    """Position of the `</name` that ends a raw-text element, or the length of the buffer."""
    size, length = len(buf), tag_end - tag_start
    while at < size - 1:
        if buf[at] == 60 and buf[at + 1] == 47 and at + 2 + length <= size:
            same = True
            for k in range(length):
                if buf[at + 2 + k] | 32 != buf[tag_start + k] | 32:
                    same = False
                    break
            if same:
                return at
        at += 1
    return size


@njit(cache=True, nogil=True)
def _has_href(buf, start, end):
    for k in range(start, end - 5):
        if buf[k] == 104 and buf[k + 1] == 114 and buf[k + 2] == 101 and buf[k + 3] == 102 and buf[k + 4] == 61:
            return True
    return False


@njit(cache=True, nogil=True)
def _end_word(words, word_block, n_word, word_hash, letters, n_block, stats, title_slots, title_values):
    words[n_word], word_block[n_word] = word_hash, n_block
    if letters <= 3:
        stats[n_block, SHORT] += 1
    stats[n_block, TITLE_WORDS] += int(lookup(title_slots, title_values, word_hash, np.float32(0)))
    return n_word + 1


@njit(cache=True, nogil=True)
def scan(buf, title_slots, title_values):
    """(elements int32[E, 4], text uint8[T], blocks int32[B, 4], stats int64[B, len(COLUMNS)], words) of one page.

    elements: tag, parent (-1 for the root), start and end of the attributes in `buf`. blocks: start and end in `text`,
    innermost block-level element, innermost element at the block's first character. words: uint32[W] hashes and int32[W]
    block numbers of the words of every block, in order. Title words are the keys of the table given.
    """
    size = len(buf)
    tags = 1
    for k in range(size):
        if buf[k] == 60:
            tags += 1
    elements = np.empty((tags + 1, 4), np.int32)
    stack, linked = np.empty(tags + 1, np.int32), np.zeros(tags + 1, np.bool_)
    text = np.empty(size + tags + 8, np.uint8)
    blocks = np.empty((tags + 1, 4), np.int32)
    stats = np.zeros((tags + 1, 26), np.int64)
    words = np.empty(size // 2 + 2, np.uint32)
    word_block = np.empty(size // 2 + 2, np.int32)
    n_el, depth, n_text, n_block, n_word = 0, 0, 0, 0, 0
    skip, links, pre, emphasis, code, list_depth, row, cell, item, pre_element = 0, 0, 0, 0, 0, 0, -1, -1, 0, 0
    begin, pending, breaks, images, times, inline_tags = 0, False, 0, 0, 0, 0
    word_hash, in_word, word_letters = FNV, False, 0
    last, block_hash = np.uint8(0), FNV
    elements[0, 0], elements[0, 1], elements[0, 2], elements[0, 3] = 0, -1, 0, 0
    stack[0] = 0
    n_el, depth = 1, 1
    i = 0
    while i <= size:
        flush, kind, tag, known, match, start, name_end, attributes_end = False, TEXT, 0, 0, 0, 0, 0, 0
        if i == size:
            flush = True
            i += 1
        elif buf[i] != 60:
            if skip > 0:
                while i < size and buf[i] != 60:
                    i += 1
                continue
            c = buf[i]
            step = 1
            space = c == 32 or c == 10 or c == 9 or c == 13 or c == 12
            if c == 38:  # the five entities that a serialiser writes
                if i + 4 < size and buf[i + 1] == 97 and buf[i + 4] == 59:
                    step = 5
                elif i + 3 < size and buf[i + 1] == 108 and buf[i + 3] == 59:
                    c, step = np.uint8(60), 4
                elif i + 3 < size and buf[i + 1] == 103 and buf[i + 3] == 59:
                    c, step = np.uint8(62), 4
                elif i + 5 < size and buf[i + 1] == 110 and buf[i + 2] == 98 and buf[i + 5] == 59:
                    c, step, space = np.uint8(32), 6, True
                elif i + 5 < size and buf[i + 1] == 113 and buf[i + 5] == 59:
                    c, step = np.uint8(34), 6
            i += step
            if (c < 32 and not space) or c == 127:
                continue
            empty = n_text == begin
            if space:
                if in_word:
                    n_word = _end_word(
                        words, word_block, n_word, word_hash, word_letters, n_block, stats, title_slots, title_values
                    )
                    in_word = False
                if pre > 0:
                    if empty:
                        blocks[n_block, 0], blocks[n_block, 3], block_hash = n_text, stack[depth - 1], FNV
                    text[n_text] = c
                    n_text += 1
                elif not empty:
                    pending = True
                continue
            if empty:
                blocks[n_block, 0], blocks[n_block, 3], block_hash = n_text, stack[depth - 1], FNV
            elif breaks > 0:
                text[n_text] = 10
                n_text += 1
                stats[n_block, BREAKS] += 1
            elif pending:
                text[n_text] = 32
                n_text += 1
            pending, breaks = False, 0
            text[n_text] = c
            n_text += 1
            last = c
            block_hash = mix(block_hash, c)
            if c & 192 != 128:
                stats[n_block, CHARS] += 1
                if links > 0:
                    stats[n_block, LINK_CHARS] += 1
                if emphasis > 0:
                    stats[n_block, EMPHASIS] += 1
                if code > 0 or pre > 0:
                    stats[n_block, CODE] += 1
            lower = c
            letter = c >= 128 or (97 <= c <= 122)
            if 65 <= c <= 90:
                lower, letter = c | 32, True
                stats[n_block, UPPER] += 1
                if not in_word:
                    stats[n_block, CAPITALISED] += 1
            elif 48 <= c <= 57:
                stats[n_block, DIGITS] += 1
                letter = True
            elif c == 46 or c == 33 or c == 63:
                stats[n_block, ENDS] += 1
            elif c == 44 or c == 59:
                stats[n_block, COMMAS] += 1
            elif c == 124 or c == 47 or c == 58 or c == 62 or c == 42 or c == 35 or c == 43 or c == 61:
                stats[n_block, SYMBOLS] += 1
            if c >= 0xD8 and i + 1 < size:  # punctuation and scripts without spaces
                d, e = buf[i], buf[i + 1]
                if c == 0xE3 and d == 0x80:
                    stats[n_block, ENDS] += e == 0x82
                    stats[n_block, COMMAS] += e == 0x81
                elif c == 0xEF and d == 0xBC:
                    stats[n_block, ENDS] += e == 0x81 or e == 0x9F
                    stats[n_block, COMMAS] += e == 0x8C
                elif c == 0xD8:
                    stats[n_block, ENDS] += d == 0x9F
                    stats[n_block, COMMAS] += d == 0x8C
                elif c == 0xE0:
                    stats[n_block, ENDS] += d == 0xA5 and e == 0xA4
                    stats[n_block, CJK] += 2 if 0xB8 <= d <= 0xBB else 0
                elif 0xE3 <= c <= 0xE9:
                    stats[n_block, CJK] += 6
                elif c == 0xE1:
                    stats[n_block, CJK] += 2 if 0x80 <= d <= 0x9F else 0
                if c == 0xE2 and d == 0x80:
                    stats[n_block, SYMBOLS] += e == 0xA2 or e == 0xBA
                    letter = False
                if c == 0xC2 and (d == 0xA9 or d == 0xBB or d == 0xB7):
                    stats[n_block, SYMBOLS] += 1
            if letter:
                if not in_word:
                    in_word, word_hash, word_letters = True, FNV, 0
                    stats[n_block, WORDS] += 1
                word_hash = mix(word_hash, lower)
                word_letters += 1
            elif in_word and c < 128 and c != 39:
                n_word = _end_word(
                    words, word_block, n_word, word_hash, word_letters, n_block, stats, title_slots, title_values
                )
                in_word = False
            continue
        else:
            if i + 1 < size and (buf[i + 1] == 33 or buf[i + 1] == 63):  # comment, doctype, processing instruction
                if i + 3 < size and buf[i + 2] == 45 and buf[i + 3] == 45:
                    i += 4
                    while i < size and not (buf[i] == 62 and buf[i - 1] == 45 and buf[i - 2] == 45):
                        i += 1
                else:
                    while i < size and buf[i] != 62:
                        i += 1
                i = min(i + 1, size)
                continue
            closing = i + 1 < size and buf[i + 1] == 47
            start = i + 2 if closing else i + 1
            j, name_hash, hyphen = start, FNV, False
            while j < size and buf[j] != 62 and buf[j] != 32 and buf[j] != 47:
                name_hash = mix(name_hash, buf[j] | 32)
                hyphen |= buf[j] == 45
                j += 1
            # `| 32` leaves digits and the hyphen as they are, and letters lower case
            tag = int(lookup(_TAG_SLOTS, _TAG_VALUES, name_hash, np.float32(0)))
            if tag == 0 and hyphen:
                tag = CUSTOM
            name_end = j
            quoted = False
            while j < size and (quoted or buf[j] != 62):
                if buf[j] == 34:
                    quoted = not quoted
                j += 1
            attributes_end = j
            i = min(j + 1, size)
            known = tag if tag < CUSTOM else 0
            block_level = IS_BLOCK[known] or tag == CUSTOM
            if closing:
                match = depth - 1
                while match > 0 and elements[stack[match], 0] != tag:
                    match -= 1
                if match == 0:
                    continue
                flush, kind = block_level, CLOSE
            elif IS_VOID[known]:
                if tag == _BR and skip == 0:
                    if pre > 0 and n_text > begin:
                        text[n_text] = 10
                        n_text += 1
                    elif pre == 0:
                        breaks += 1
                        flush = breaks > 1
                elif tag == _IMG:
                    images += 1
                elif block_level:
                    flush = True
            else:
                flush, kind = block_level, OPEN
                inline_tags += 1
        if flush:
            if in_word:
                n_word = _end_word(
                    words, word_block, n_word, word_hash, word_letters, n_block, stats, title_slots, title_values
                )
                in_word = False
            if stats[n_block, CHARS] > 0:
                at = depth - 1
                while at > 0:
                    tag_at = elements[stack[at], 0]
                    if tag_at == CUSTOM or IS_BLOCK[tag_at]:
                        break
                    at -= 1
                blocks[n_block, 1], blocks[n_block, 2] = n_text, stack[at]
                stats[n_block, LAST], stats[n_block, HASH] = last, block_hash
                stats[n_block, IMAGES], stats[n_block, TIMES], stats[n_block, INLINE_TAGS] = images, times, inline_tags
                stats[n_block, LIST_DEPTH], stats[n_block, LIST_ITEM] = list_depth, item
                stats[n_block, ROW], stats[n_block, CELL] = row, cell
                stats[n_block, IN_PRE] = pre_element if pre > 0 else 0
                n_block += 1
                images, times, inline_tags, item = 0, 0, 0, 0
            else:
                n_text = begin
                stats[n_block] = 0
            begin, pending, breaks = n_text, False, 0
        if kind == OPEN:
            elements[n_el, 0], elements[n_el, 1] = tag, stack[depth - 1]
            elements[n_el, 2], elements[n_el, 3] = name_end, attributes_end
            stack[depth] = n_el
            linked[depth] = tag == _A and _has_href(buf, name_end, attributes_end)
            n_el += 1
            depth += 1
            if IS_RAW[known]:
                i = _find(buf, i, start, name_end)
            if IS_SKIP[known] or IS_RAW[known]:
                skip += 1
            elif linked[depth - 1]:
                links += 1
                stats[n_block, LINKS] += 1
            elif tag == _PRE:
                pre += 1
                pre_element = n_el - 1
            elif IS_EMPHASIS[known]:
                emphasis += 1
            elif tag == _CODE:
                code += 1
            elif tag == _TIME:
                times += 1
            elif tag == _UL or tag == _OL:
                list_depth += 1
            elif tag == _LI:
                item = 1
            elif tag == _TR:
                row = n_el - 1
            elif tag == _TD or tag == _TH:
                cell = n_el - 1
        elif kind == CLOSE:
            while depth - 1 >= match:  # what is still open inside it ends here too
                depth -= 1
                closed = elements[stack[depth], 0]
                shut = closed if closed < CUSTOM else 0
                if IS_SKIP[shut] or IS_RAW[shut]:
                    skip -= 1
                elif linked[depth]:
                    links -= 1
                elif closed == _PRE:
                    pre -= 1
                elif IS_EMPHASIS[shut]:
                    emphasis -= 1
                elif closed == _CODE:
                    code -= 1
                elif closed == _UL or closed == _OL:
                    list_depth -= 1
                elif closed == _TR:
                    row = -1
                elif closed == _TD or closed == _TH:
                    cell = -1
    return (
        elements[:n_el].copy(),
        text[:n_text].copy(),
        blocks[:n_block].copy(),
        stats[:n_block].copy(),
        words[:n_word].copy(),
        word_block[:n_word].copy(),
    )

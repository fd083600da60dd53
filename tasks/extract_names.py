"""The words in an element's class, id, role and itemprop, and whether it is hidden; compiled by numba.

Run its tests: `python -m pytest tests/tasks/test_extract.py`
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tasks.extract_hash import FNV, mix


@njit(cache=True, nogil=True)
def _attribute(buf, start, end):
    """0 other, 1 class or id, 2 role, itemprop or itemtype, 3 style, 4 hidden, 5 aria-hidden."""
    length = end - start
    if length == 2 and buf[start] == 105 and buf[start + 1] == 100:
        return 1
    if length == 4 and buf[start] == 114 and buf[start + 3] == 101:
        return 2
    if length == 5 and buf[start] == 99 and buf[start + 1] == 108:
        return 1
    if length == 5 and buf[start] == 115 and buf[start + 1] == 116:
        return 3
    if length == 6 and buf[start] == 104 and buf[start + 1] == 105:
        return 4
    if length == 8 and buf[start] == 105 and buf[start + 1] == 116:
        return 2
    if length == 11 and buf[start] == 97 and buf[start + 5] == 104:
        return 5
    return 0


@njit(cache=True, nogil=True)
def element_names(buf, elements):
    """(hashes uint32[K], element numbers int32[K], hidden bool[E]): the words in class, id, role, itemprop and the tag.

    `post-body__Text2` gives post, body, text. Only `display:none`, `hidden` and `aria-hidden="true"` hide.
    """
    count = len(elements)
    total = 0
    for e in range(count):
        total += (elements[e, 3] - elements[e, 2]) // 2 + 2
    hashes, owner = np.empty(total, np.uint32), np.empty(total, np.int32)
    hidden = np.zeros(count, np.bool_)
    n = 0
    for e in range(count):
        at, end = elements[e, 2], elements[e, 3]
        hashes[n], owner[n] = np.uint32(elements[e, 0] + 1), e
        n += 1
        while at < end:
            while at < end and (buf[at] == 32 or buf[at] == 10 or buf[at] == 9 or buf[at] == 47):
                at += 1
            name_start = at
            while at < end and buf[at] != 61 and buf[at] != 32:
                at += 1
            what = _attribute(buf, name_start, at) if at > name_start else 0
            value_start = value_end = at
            if at + 1 < end and buf[at] == 61 and buf[at + 1] == 34:
                value_start = at + 2
                at = value_start
                while at < end and buf[at] != 34:
                    at += 1
                value_end = at
                at += 1
            else:
                at += 1
            if what == 4:
                hidden[e] = True
            elif what == 5:
                hidden[e] |= value_end - value_start == 4 and buf[value_start] == 116
            elif what == 3:
                for k in range(value_start, value_end - 11):
                    if buf[k] == 100 and buf[k + 4] == 108 and buf[k + 7] == 58:  # d...l..: of display:
                        shift = 9 if buf[k + 8] == 32 else 8
                        hidden[e] |= buf[k + shift] == 110 and buf[k + shift + 1] == 111
            elif what == 1 or what == 2:
                value, letters, previous_lower = FNV, 0, False
                for k in range(value_start, value_end + 1):
                    c = buf[k] if k < value_end else np.uint8(32)
                    upper = 65 <= c <= 90
                    letter = upper or 97 <= c <= 122 or c >= 128
                    if letters > 0 and (not letter or (upper and previous_lower)):
                        if letters > 1:
                            hashes[n], owner[n] = value, e
                            n += 1
                        value, letters = FNV, 0
                    if letter:
                        value = mix(value, c | 32 if c < 128 else c)
                        letters += 1
                    previous_lower = letter and not upper
    return hashes[:n].copy(), owner[:n].copy(), hidden

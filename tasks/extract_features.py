"""Features of a page's text blocks, compiled by numba.

What a block is judged by: its own text (length in words, links, punctuation, capitals, words that boilerplate uses),
its place in the tree (tag path, class and id names, text and link density of the containers around it, whether the
subtree that readability-like scoring elects holds it), its place on the page (after the title, between long blocks),
and its neighbours. Lengths are in words; scripts written without spaces count 0.6 word a character (Thai, Lao, Khmer,
Burmese: 0.2), so that no feature depends on the language's spacing.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tasks.extract_hash import lookup
from tasks.extract_scan import (
    BREAKS,
    CAPITALISED,
    CHARS,
    CJK,
    CODE,
    COMMAS,
    CUSTOM,
    DIGITS,
    EMPHASIS,
    ENDS,
    HASH,
    IMAGES,
    IN_PRE,
    INLINE_TAGS,
    LAST,
    LINK_CHARS,
    LINKS,
    LIST_DEPTH,
    SHORT,
    SYMBOLS,
    TAG_ID,
    TAGS,
    TIMES,
    TITLE_WORDS,
    UPPER,
    WORDS,
)

# inherited context: bit per group of tags
GROUPS = (
    ("article",),
    ("main",),
    ("nav", "menu"),
    ("aside",),
    ("footer",),
    ("header", "hgroup"),
    ("form", "fieldset", "label"),
    ("table",),
    ("ul", "ol", "dl"),
    ("blockquote", "q"),
    ("figure", "figcaption", "caption"),
    ("a",),
    ("section",),
    ("address", "time", "small"),
)
HIDDEN = 1 << len(GROUPS)
_TAG_BITS = np.zeros(CUSTOM + 1, np.int64)
for _bit, _names in enumerate(GROUPS):
    for _name in _names:
        _TAG_BITS[TAG_ID[_name]] |= 1 << _bit
_KIND = np.zeros(CUSTOM + 1)  # block tags ordered by how often they carry prose
for _rank, _names in enumerate(
    ("p", "blockquote", "pre code", "li dd", "h1", "h2", "h3", "h4 h5 h6", "td th", "div section article main", "dt")
):
    for _name in _names.split():
        _KIND[TAG_ID[_name]] = _rank + 1
_H1, _P, _DIV, _BODY = TAG_ID["h1"], TAG_ID["p"], TAG_ID["div"], TAG_ID["body"]
_HEADING = np.array([t in ("h1", "h2", "h3", "h4", "h5", "h6") for t in TAGS] + [False])
_HOLDER = np.array([t in ("div", "section", "article", "main", "td", "body", "center", "form") for t in TAGS] + [True])

OWN = (
    "log_words link_density ends_per_word commas_per_word last_kind digit_share upper_share capital_share short_share "
    "emphasis_share code_share symbol_share chars_per_word breaks images inline_tags links times pre list_depth kind "
    "words_mean words_min words_first words_last title_share repeats"
).split()
TREE = (
    [f"in_{names[0]}" for names in GROUPS]
    + "hidden depth own path path_min path_max near siblings".split()
    + "in_top in_top_parent in_top_grandparent top_share top_density".split()
)
CONTAINER = "words link_density long_share share own path blocks".split()
PLACE = (
    "index words_before after_h1 after_title to_long_before to_long_after long_near long_far heading_distance "
    "heading_level page_words page_long page_link_density rank_length"
).split()
NEIGHBOUR = "log_words link_density kind same_parent own words_mean".split()
OFFSETS = (-3, -2, -1, 1, 2, 3)
LEVELS = 3
NAMES = tuple(
    OWN
    + TREE
    + [f"container{level}_{name}" for level in range(LEVELS) for name in CONTAINER]
    + PLACE
    + [f"at{offset:+d}_{name}" for offset in OFFSETS for name in NEIGHBOUR]
)
_NEAR = np.array(OFFSETS)


@njit(cache=True, nogil=True)
def features(elements, hidden, name_hash, name_owner, name_table, name_scores, blocks, stats, word_hash, word_block,
             word_table, word_scores, title_size, width):  # fmt: skip
    """(X float32[B, len(NAMES)], near int32[B, 6]) of a page; `near` is what `second` needs: containers and subtree.

    name_table, word_table: learned log-odds of class names and of words (tasks/extract_hash.hash_table).
    """
    n_el, n = len(elements), len(blocks)
    stats = stats.astype(np.float64)
    x = np.zeros((n, width), np.float32)
    near = np.zeros((n, 6), np.int32)
    own, path = np.zeros(n_el, np.float64), np.zeros(n_el, np.float64)
    low, high = np.zeros(n_el, np.float64), np.zeros(n_el, np.float64)
    bits, level = np.zeros(n_el, np.int64), np.zeros(n_el, np.int32)
    children = np.zeros(n_el, np.int32)
    for k in range(len(name_hash)):
        own[name_owner[k]] += lookup(name_table, name_scores, name_hash[k], np.float32(0))
    for e in range(n_el):
        parent = elements[e, 1]
        tag = elements[e, 0]
        own[e] = min(max(own[e], -4.0), 4.0)
        bits[e] = _TAG_BITS[tag]
        if hidden[e]:
            bits[e] |= HIDDEN
        path[e] = low[e] = high[e] = own[e]
        if parent >= 0:
            bits[e] |= bits[parent]
            level[e] = level[parent] + 1
            path[e] = own[e] + 0.8 * path[parent]
            low[e], high[e] = min(own[e], low[parent]), max(own[e], high[parent])
            children[parent] += 1
    # text of every subtree
    words, links = np.zeros(n, np.float64), np.zeros(n, np.float64)
    total, linked = np.zeros(n_el, np.float64), np.zeros(n_el, np.float64)
    many, long_words = np.zeros(n_el, np.int32), np.zeros(n_el, np.float64)
    first, last = np.full(n_el, n, np.int32), np.full(n_el, -1, np.int32)
    score = np.zeros(n_el, np.float64)
    is_long = np.zeros(n, np.bool_)
    for b in range(n):
        s = stats[b]
        words[b] = s[WORDS] + 0.1 * s[CJK]
        links[b] = s[LINK_CHARS] / s[CHARS]
        is_long[b] = words[b] >= 20 and links[b] < 0.3
        e = blocks[b, 2]
        total[e] += words[b]
        linked[e] += words[b] * links[b]
        many[e] += 1
        if is_long[b]:
            long_words[e] += words[b]
        first[e], last[e] = min(first[e], b), max(last[e], b)
        if s[CHARS] >= 25:
            gain = 1 + s[COMMAS] + min(words[b] / 18, np.float64(3.0))
            holder = e if _HOLDER[elements[e, 0]] else max(elements[e, 1], 0)
            score[holder] += gain
            if elements[holder, 1] >= 0:
                score[elements[holder, 1]] += gain / 2
    for e in range(n_el - 1, 0, -1):
        parent = elements[e, 1]
        total[parent] += total[e]
        linked[parent] += linked[e]
        many[parent] += many[e]
        long_words[parent] += long_words[e]
        first[parent], last[parent] = min(first[parent], first[e]), max(last[parent], last[e])
    top, best = 0, np.float64(-1.0)
    for e in range(n_el):
        if total[e] > 0:
            value = (
                score[e] * (1 - linked[e] / total[e]) * (1.25 if own[e] > 1 else 1.0) * (0.5 if own[e] < -1 else 1.0)
            )
            if value > best:
                top, best = e, np.float64(value)
    top_parent = max(elements[top, 1], 0)
    top_grand = max(elements[top_parent, 1], 0)
    page = max(total[0], np.float64(1.0))
    # words that speak for or against, per block
    w_sum, w_min = np.zeros(n, np.float64), np.zeros(n, np.float64)
    w_first, w_last = np.zeros(n, np.float64), np.zeros(n, np.float64)
    w_count = np.zeros(n)
    for k in range(len(word_hash)):
        b = word_block[k]
        value = lookup(word_table, word_scores, word_hash[k], np.float32(0))
        w_sum[b] += value
        w_min[b] = min(w_min[b], value)
        if w_count[b] < 2:
            w_first[b] += value
        w_count[b] += 1
        w_last[b] = value
    order = np.argsort(stats[:, HASH])
    repeats = np.zeros(n)
    start = 0
    for k in range(1, n + 1):
        if k == n or stats[order[k], HASH] != stats[order[start], HASH]:
            for m in range(start, k):
                repeats[order[m]] = k - start - 1
            start = k
    h1, title, title_best = -1, -1, 0.5
    for b in range(n):
        tag = elements[blocks[b, 2], 0]
        if h1 < 0 and tag == _H1 and words[b] > 2:
            h1 = b
        if title_size > 0 and words[b] < 40:
            share = stats[b, TITLE_WORDS] / max(title_size, stats[b, WORDS])
            if _HEADING[tag]:
                share += 0.2
            if share > title_best:
                title, title_best = b, share
    long_count, most = 0.0, np.float64(1.0)
    for b in range(n):
        long_count += is_long[b]
        most = max(most, words[b])
    before, since_long, heading, heading_tag = 0.0, 50.0, 50.0, 0.0
    for b in range(n):
        s, e = stats[b], blocks[b, 2]
        first_element = blocks[b, 3]
        w = max(words[b], np.float64(0.5))
        chars = max(s[CHARS], 1.0)
        tag = elements[e, 0]
        c = s[LAST]
        last_kind = 0.0
        if c == 46 or c == 33 or c == 63 or c == 34 or c == 0x82 or c == 0x9D or c == 0x9F:
            last_kind = 3.0
        elif c == 58:
            last_kind = 2.0
        elif c == 44 or c == 59:
            last_kind = 1.0
        elif c == 62 or c == 0xBB or c == 0xBA or c == 124 or c == 47:
            last_kind = -1.0
        f = 0
        for value in (
            np.log(w + 1), links[b], s[ENDS] / w, s[COMMAS] / w, last_kind, s[DIGITS] / chars, s[UPPER] / chars,
            s[CAPITALISED] / w, s[SHORT] / w, s[EMPHASIS] / chars, s[CODE] / chars, s[SYMBOLS] / chars, chars / w,
            s[BREAKS], s[IMAGES], s[INLINE_TAGS], s[LINKS], s[TIMES], 1.0 if s[IN_PRE] > 0 else 0.0, s[LIST_DEPTH], _KIND[tag],
            w_sum[b] / max(w_count[b], 1.0), w_min[b], w_first[b], w_last[b],
            s[TITLE_WORDS] / max(title_size, 1.0) if s[WORDS] < 40 else 0.0, min(repeats[b], 20.0),
        ):  # fmt: skip
            x[b, f] = value
            f += 1
        for bit in range(14):
            x[b, f] = (bits[first_element] >> bit) & 1
            f += 1
        nearest = np.float64(0)
        walk = first_element
        for _ in range(64):
            if own[walk] != 0 or elements[walk, 1] < 0:
                nearest = own[walk]
                break
            walk = elements[walk, 1]
        for value in (
            1.0 if bits[first_element] & HIDDEN > 0 else 0.0, min(level[e], 60.0), own[first_element], path[first_element],
            low[first_element], high[first_element], nearest, float(children[max(elements[e, 1], 0)]),
            1.0 if first[top] <= b <= last[top] else 0.0, 1.0 if first[top_parent] <= b <= last[top_parent] else 0.0,
            1.0 if first[top_grand] <= b <= last[top_grand] else 0.0, total[top] / page, linked[top] / max(total[top], 1.0),
        ):  # fmt: skip
            x[b, f] = value
            f += 1
        # the smallest ancestors of 3 blocks, of 100 words, of 30 % of the page
        walk, stage = e, 0
        near[b, 0] = elements[e, 1] if elements[e, 1] >= 0 else 0
        for _ in range(512):
            while stage < 3 and (
                (stage == 0 and many[walk] >= 3)
                or (stage == 1 and total[walk] >= 100)
                or (stage == 2 and total[walk] >= 0.3 * page)
            ):
                stage += 1
                near[b, stage] = walk
            if stage == 3 or elements[walk, 1] < 0:
                break
            walk = elements[walk, 1]
        while stage < 3:
            stage += 1
            near[b, stage] = 0
        near[b, 4] = top
        for k in range(1, 4):
            walk = near[b, k]
            size = max(total[walk], np.float64(1.0))
            for value in (
                np.log(size), linked[walk] / size, long_words[walk] / size, size / page, own[walk], path[walk],
                np.log(many[walk] + 1.0),
            ):  # fmt: skip
                x[b, f] = value
                f += 1
        since_after = 50.0
        close, far = 0.0, 0.0
        for k in range(max(0, b - 10), min(n, b + 11)):
            if is_long[k] and k != b:
                far += 1
                close += abs(k - b) <= 3
                if k > b and since_after == 50:
                    since_after = float(k - b)
        for value in (
            b / n, before / page, 0.0 if h1 < 0 else min(max(b - h1, -20.0), 100.0),
            0.0 if title < 0 else min(max(b - title, -20.0), 100.0),
            since_long, since_after, close, far, heading, heading_tag, np.log(page), long_count, linked[0] / page, w / most,
        ):  # fmt: skip
            x[b, f] = value
            f += 1
        before += words[b]
        since_long = 1.0 if is_long[b] else min(since_long + 1, 50.0)
        heading = 1.0 if _HEADING[tag] else min(heading + 1, 50.0)
        if _HEADING[tag]:
            heading_tag = _KIND[tag]
        for k in range(6):
            other = b + _NEAR[k]
            if 0 <= other < n:
                o = blocks[other, 2]
                for value in (
                    np.log(words[other] + 1), links[other], _KIND[elements[o, 0]],
                    1.0 if o == e else (0.5 if elements[o, 1] == elements[e, 1] else 0.0), own[blocks[other, 3]],
                    w_sum[other] / max(w_count[other], 1.0),
                ):  # fmt: skip
                    x[b, f] = value
                    f += 1
            else:
                for _ in range(6):
                    x[b, f] = -1
                    f += 1
    return x, near

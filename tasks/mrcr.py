"""MRCR-like conversations: find one of several identical requests far back and repeat its answer (notes D.7).

A conversation holds n equal requests ("needles") with different replies among requests that share only their format or only
their topic; the last turn asks for the i-th needle's reply behind a random string. Replies are sentences of the corpus about
the topic. `grade` is the benchmark's own. Used by `python -m tasks long_data` and by evaluations.
"""

from __future__ import annotations

import difflib
import random
import re
import string
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

FORMATS = ("note", "list", "poem", "headline", "letter", "question", "dialogue", "summary")
VARIANTS = ("forward", "backward")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_SENTENCE = re.compile(r"[A-Z][^.!?\n$<>{}|\\]{25,140}[.!?](?=\s|$)")
_COMMON = frozenset(
    "this that with from they have been were which their there about would could when what into more some such than then"
    " these those other also only between after before where while being used using over under most many first second because"
    " does each very just like make made every should must same both through still".split()
)


@dataclass(frozen=True)
class Conversation:
    """`messages` ends with the question; `answer` is the right reply, which starts with `prefix`."""

    messages: tuple[dict[str, str], ...]
    answer: str
    prefix: str
    needles: int
    wanted: int  # 0-based index of the needle asked for
    variant: str


def sentence_bank(
    texts: Iterable[str], least: int = 8, most_topics: int = 200, per_topic: int = 60
) -> dict[str, list[str]]:
    """topic word -> distinct sentences of the corpus that hold it; topics by number of sentences, then alphabetically."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for text in texts:
        for match in _SENTENCE.finditer(text):
            sentence = " ".join(match[0].split())
            for word in set(re.findall(r"\b[a-z]{4,12}\b", sentence)) - _COMMON:
                if len(found[word]) < per_topic:
                    found[word][sentence] = None
    topics = sorted((w for w, s in found.items() if len(s) >= least), key=lambda w: (-len(found[w]), w))[:most_topics]
    return {topic: list(found[topic]) for topic in sorted(topics)}


def write(kind: str, topic: str, sentences: Sequence[str]) -> str:
    """A reply in one of `FORMATS` made of one or two sentences."""
    text = " ".join(sentences)
    if kind == "list":
        return "\n".join(f"- {s}" for s in sentences)
    if kind == "poem":
        return "\n".join(part.strip().lower() for part in re.split(r"[,;.:]\s*", text) if part.strip())
    if kind == "headline":
        return " ".join(w.capitalize() for w in sentences[0].rstrip(".!?").split()[:10])
    if kind == "letter":
        return f"Dear reader,\n{text}\nYours, the {topic} desk"
    if kind == "question":
        return f"Did you know this of {topic}? {text}"
    if kind == "dialogue":
        return f"A: What of {topic}?\nB: {text}"
    if kind == "summary":
        return f"In short: {text}"
    return text


def conversation(
    bank: Mapping[str, Sequence[str]],
    rng: random.Random,
    max_chars: int,
    needles: int,
    variant: str = "forward",
    overhead: int = 0,
) -> Conversation:
    """One conversation of at most `max_chars` characters, the answer included, `overhead` counted per exchange for role tokens.

    ValueError when the bank has too few sentences, or `max_chars` cannot hold the needles.
    """
    topics = sorted(t for t in bank if len(bank[t]) >= needles)
    if len(topics) < 2:
        raise ValueError(f"the corpus has {len(topics)} topics with at least {needles} sentences; two are needed")
    topic, kind = rng.choice(topics), rng.choice(FORMATS)
    used: set[str] = set()

    def turn(kind: str, topic: str) -> tuple[str, str] | None:
        for _ in range(20):
            chosen = rng.sample(list(bank[topic]), min(len(bank[topic]), rng.choice((1, 1, 2))))
            reply = write(kind, topic, chosen)
            if reply not in used:
                used.add(reply)
                return f"Write a {kind} about {topic}.", reply
        return None

    hits = [turn(kind, topic) for _ in range(needles)]
    if None in hits:
        raise ValueError(f"topic {topic!r} has too few sentences for {needles} different replies")
    prefix = "".join(rng.choices(string.ascii_letters + string.digits, k=10))
    wanted = rng.randrange(needles)
    place = _ORDINALS[wanted] if variant == "forward" else f"{_ORDINALS[needles - 1 - wanted]} from last"
    question = f"Prepend {prefix} to the {place} {kind} about {topic}. Do not include any other text in your response."
    answer = prefix + hits[wanted][1]
    size = sum(len(a) + len(b) + overhead for a, b in hits) + len(question) + len(answer) + 2 * overhead
    if size > max_chars:
        raise ValueError(f"{needles} needles take {size} characters, more than the {max_chars} of the context")
    others = []
    misses = 0
    while misses < 20:
        if rng.random() < 0.5:
            pick = (rng.choice([f for f in FORMATS if f != kind]), topic)
        else:
            pick = (kind if rng.random() < 0.6 else rng.choice(FORMATS), rng.choice([t for t in topics if t != topic]))
        made = turn(*pick)
        if made is None or size + len(made[0]) + len(made[1]) + overhead > max_chars:
            misses += 1
            continue
        size += len(made[0]) + len(made[1]) + overhead
        others.append(made)
    slots = sorted(rng.sample(range(len(others) + needles), needles))
    rest, hit = iter(others), iter(hits)
    order = [next(hit) if i in slots else next(rest) for i in range(len(others) + needles)]
    messages = [
        m for ask, reply in order for m in ({"role": "user", "content": ask}, {"role": "assistant", "content": reply})
    ]
    messages.append({"role": "user", "content": question})
    return Conversation(tuple(messages), answer, prefix, needles, wanted, variant)


def grade(response: str, answer: str, prefix: str) -> float:
    """The benchmark's score: 0 without the prefix, else the difflib ratio of what follows it, in [0, 1]."""
    if not response.startswith(prefix):
        return 0.0
    return difflib.SequenceMatcher(None, response.removeprefix(prefix), answer.removeprefix(prefix)).ratio()

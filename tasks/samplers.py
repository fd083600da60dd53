"""Which tokens a training step sees: a pure function of (seed, step), so that a run resumes from its step number alone.

Two sources of rows: `WindowSource` cuts windows at random places of the running text (pre-training keeps this truncation
as augmentation, GLM-4.5 §2.3) and `PackedSource` packs whole documents by best-fit decreasing (mid-training: no document
is cut unless it is longer than the context). `Mixture` deals rows to domains by weight with caps on epochs.

Check it:  python -m pytest tests/tasks/test_samplers.py
"""

from __future__ import annotations

import bisect
import hashlib
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from tasks.tokens import TokenSet, TokenShard

IGNORE = -100
PERIOD = 1024


def _key(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "little")


def permute(index: int, size: int, key: int) -> int:
    """Image of `index` under a permutation of range(size) chosen by `key`, in constant memory (a Feistel network)."""
    if not 0 <= index < size:
        raise ValueError(f"index {index} is outside range({size})")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            mixed = (right * 0x9E3779B97F4A7C15 + key + turn * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
            mixed = ((mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ ((mixed ^ (mixed >> 32)) & mask)
        index = (left << half) | right
        if index < size:  # walk the cycle until the image lies in the range again
            return index


class WindowSource:
    """Windows of seq_len + 1 tokens of one shard's running text, each token a target once per epoch.

    Every epoch shifts the grid of windows by a random phase and visits them in a random order. Rows are numbered without
    end: row n belongs to epoch n // rows_per_epoch.
    """

    def __init__(self, shard: TokenShard, seq_len: int, seed: int) -> None:
        self.shard, self.seq_len, self.seed = shard, seq_len, seed
        self.rows_per_epoch = max(1, len(shard.tokens) // seq_len)
        if len(shard.tokens) < 2:
            raise ValueError(f"{shard.path}: {len(shard.tokens)} tokens are too few to draw windows from")

    def row(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """(input ids, targets), both int64 [seq_len]."""
        epoch, index = divmod(n, self.rows_per_epoch)
        key = _key("window", self.seed, epoch)
        position = permute(index, self.rows_per_epoch, key) * self.seq_len + key % len(self.shard.tokens)
        window = self.shard.window(position, self.seq_len + 1)
        return window[:-1], window[1:]


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins of `capacity`, longest first, each into the fullest bin that has room (ties: first come).

    Returns bins as lists of item indices. Every item must fit: ValueError otherwise.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if order and lengths[order[0]] > capacity:
        raise ValueError(f"an item of {lengths[order[0]]} does not fit a bin of {capacity}")
    bins: list[list[int]] = []
    by_room: dict[int, deque[int]] = {}  # room left -> bins in the order they came to it
    rooms: list[int] = []  # the keys of by_room, ascending
    for item in order:
        at = bisect.bisect_left(rooms, lengths[item])
        if at < len(rooms):
            room = rooms[at]
            members = by_room[room]
            chosen = members.popleft()
            if not members:
                del by_room[room]
                rooms.pop(at)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        left = room - lengths[item]
        if left:
            if left not in by_room:
                by_room[left] = deque()
                bisect.insort(rooms, left)
            by_room[left].append(chosen)
    return bins


class PackedSource:
    """Whole documents packed into rows of seq_len + 1 tokens by best-fit decreasing.

    Only a document longer than that is cut, into consecutive pieces that overlap by one token, so that every token but a
    document's first is a target exactly once. Targets across document borders and on padding are -100.
    """

    def __init__(self, shard: TokenShard, seq_len: int, seed: int) -> None:
        self.shard, self.seq_len, self.seed = shard, seq_len, seed
        self.pieces: list[tuple[int, int]] = []  # (first token, length)
        for start, end in zip(shard.offsets[:-1].tolist(), shard.offsets[1:].tolist()):
            for first in range(start, max(start + 1, end - 1), seq_len):
                if (length := min(seq_len + 1, end - first)) >= 2:
                    self.pieces.append((first, length))
        if not self.pieces:
            raise ValueError(f"{shard.path}: no document of two tokens or more to pack")
        self.bins = best_fit_decreasing([length for _, length in self.pieces], seq_len + 1)
        self.rows_per_epoch = len(self.bins)

    def row(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """(input ids, targets), both int64 [seq_len]; unused places hold <|endoftext|> and target -100."""
        epoch, index = divmod(n, self.rows_per_epoch)
        key = _key("packed", self.seed, epoch)
        members = self.bins[permute(index, self.rows_per_epoch, key)]
        members = [members[permute(i, len(members), key)] for i in range(len(members))]
        eot = int(self.shard.tokens[-1])
        ids = np.full(self.seq_len + 1, eot, dtype=np.int64)
        targets = np.full(self.seq_len + 1, IGNORE, dtype=np.int64)
        at = 0
        for member in members:
            first, length = self.pieces[member]
            piece = self.shard.tokens[first : first + length]
            ids[at : at + length] = piece
            targets[at : at + length - 1] = piece[1:]
            at += length
        return ids[:-1], targets[:-1]

    def fill(self) -> float:
        """Share of the rows' places that hold document tokens."""
        return sum(length for _, length in self.pieces) / (len(self.bins) * (self.seq_len + 1))


def capped_weights(
    weights: Mapping[str, float],
    rows_per_epoch: Mapping[str, float],
    total_rows: int,
    max_epochs: float | Mapping[str, float],
) -> dict[str, float]:
    """Mixture weights that give no domain more than `max_epochs` passes over its rows in a run of `total_rows`.

    max_epochs: one cap for all, or a cap per domain (a domain that is not named has none). What a capped domain loses goes
    to the others in proportion to their weights. Raises ValueError when all domains together cannot fill the run, or when a
    cap names a domain without a weight.
    """
    if isinstance(max_epochs, Mapping):
        unknown = sorted(set(max_epochs) - set(weights))
        if unknown:
            raise ValueError(
                f"max_epochs names {unknown[0]!r}, which has no weight; weighted are {', '.join(sorted(weights))}"
            )
        caps = {d: max_epochs.get(d, float("inf")) for d in weights}
    else:
        caps = dict.fromkeys(weights, max_epochs)
    most = sum(caps[d] * rows_per_epoch[d] for d in weights)
    if total_rows > most:
        have = {d: rows_per_epoch[d] for d in sorted(weights)}
        epochs = f"{max_epochs:g}" if not isinstance(max_epochs, Mapping) else dict(max_epochs)
        raise ValueError(
            f"the run wants {total_rows} rows, but {epochs} epochs over {have} give only "
            f"{int(most)}: raise max_epochs, take fewer tokens, or add data"
        )
    capped: dict[str, float] = {}
    while True:
        free = {d: w for d, w in weights.items() if d not in capped}
        rest, total = 1.0 - sum(capped.values()), sum(free.values())
        shares = {d: rest * w / total for d, w in free.items()} if total else {}
        over = {
            d: caps[d] * rows_per_epoch[d] / total_rows
            for d, share in shares.items()
            if share * total_rows > caps[d] * rows_per_epoch[d] * (1 + 1e-9)
        }
        if not over:
            return {d: capped.get(d, shares.get(d, 0.0)) for d in sorted(weights)}
        capped |= over


class Mixture:
    """Deals row numbers to domains: in every period of 1024 rows each domain gets its exact quota, in shuffled order.

    A domain whose share rounds to no row of a period gets single rows in some periods, in place of the largest domain's.
    """

    def __init__(self, weights: Mapping[str, float], seed: int) -> None:
        total = sum(weights.values())
        if not weights or total <= 0 or min(weights.values()) < 0:
            raise ValueError(f"mixture weights must be positive, got {dict(weights)}")
        self.seed = seed
        self.domains = sorted(d for d, w in weights.items() if w > 0)
        exact = [weights[d] / total * PERIOD for d in self.domains]
        quota = [int(x) for x in exact]
        for i in sorted(range(len(exact)), key=lambda i: (quota[i] - exact[i], i))[: PERIOD - sum(quota)]:
            quota[i] += 1
        self.quota = quota
        self._rare = {d: exact[d] for d in range(len(quota)) if not quota[d]}
        self._largest = quota.index(max(quota))
        if len(self._rare) > quota[self._largest]:
            raise ValueError(f"{len(quota)} domains with shares as small as these cannot be mixed; join some of them")
        self._deal = np.repeat(np.arange(len(quota)), quota)
        self._cache: tuple[int, np.ndarray, np.ndarray] | None = None

    def _period(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(domain of each row of a period, how many rows of that domain came before it in the period)."""
        if self._cache is None or self._cache[0] != number:
            order = np.random.Generator(np.random.PCG64(_key("mixture", self.seed, number))).permutation(PERIOD)
            deal = self._deal.copy()
            now = [d for d in self._rare if self._before(d, number + 1) > self._before(d, number)]
            places = np.flatnonzero(deal == self._largest)[: len(now)]
            deal[places] = now
            dealt = deal[order]
            before = np.zeros(PERIOD, dtype=np.int64)
            for d in range(len(self.quota)):
                places = np.flatnonzero(dealt == d)
                before[places] = np.arange(len(places))
            self._cache = (number, dealt, before)
        return self._cache[1], self._cache[2]

    def _before(self, d: int, number: int) -> int:
        """Rows of a domain in all periods before `number`."""
        if d in self._rare:
            return int(number * self._rare[d] + 0.5)
        taken = sum(self._before(rare, number) for rare in self._rare) if d == self._largest else 0
        return number * self.quota[d] - taken

    def row(self, r: int) -> tuple[str, int]:
        """(domain, number of this row within its domain) of the run's row `r`."""
        number, place = divmod(r, PERIOD)
        dealt, before = self._period(number)
        d = int(dealt[place])
        return self.domains[d], self._before(d, number) + int(before[place])


class BatchSampler:
    """Rows `first .. first + count` of a run as a batch: what training stages read.

    packing: 'window' or 'best_fit'. weights: domain -> share ({} takes the corpus's own proportions of tokens).
    max_epochs: passes over any document at most, for all domains or by domain; where `pack` wrote documents several
    times over (meta "copies"), the
    domain's shard is passed that many times less often. `epochs`: domain -> passes over its shard.
    Raises ValueError naming domains that the corpus does not have.
    """

    def __init__(
        self,
        tokens: TokenSet,
        seq_len: int,
        total_rows: int,
        seed: int,
        weights: Mapping[str, float] | None = None,
        max_epochs: float | Mapping[str, float] = 4.0,
        packing: str = "window",
    ) -> None:
        if packing not in ("window", "best_fit"):
            raise ValueError(f"packing {packing!r} is neither 'window' nor 'best_fit'")
        weights = dict(weights or {d: float(tokens.tokens(d)) for d in tokens.domains if tokens.tokens(d) > 1})
        kind = WindowSource if packing == "window" else PackedSource
        self.sources = {
            d: kind(tokens.shard(d), seq_len, _key("source", seed, d)) for d, w in sorted(weights.items()) if w > 0
        }
        per_epoch = {d: source.rows_per_epoch for d, source in self.sources.items()}
        copies = tokens.meta.get("copies", {})
        distinct = {d: rows / max(1, copies.get(d, 1)) for d, rows in per_epoch.items()}
        self.weights = capped_weights({d: weights[d] for d in self.sources}, distinct, total_rows, max_epochs)
        self.epochs = {d: w * total_rows / per_epoch[d] for d, w in self.weights.items()}
        self.mixture = Mixture(self.weights, seed)

    def batch(self, first: int, count: int, rank: int = 0, world: int = 1) -> dict[str, np.ndarray]:
        """{'input_ids_bs', 'targets_bs'}: int64 [count / world, seq_len]; rank r of w takes every w-th row."""
        rows = []
        for r in range(first + rank, first + count, world):
            domain, n = self.mixture.row(r)
            rows.append(self.sources[domain].row(n))
        return {"input_ids_bs": np.stack([x for x, _ in rows]), "targets_bs": np.stack([y for _, y in rows])}


def validation_windows(shard: TokenShard, seq_len: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Up to `count` windows spread evenly over a shard, no token a target twice: (inputs, targets) int64 [n, seq_len].

    A shard shorter than one window gives one row padded with -100 targets; an empty one gives no row.
    """
    total = len(shard.tokens)
    if total < 2:
        return np.zeros((0, seq_len), np.int64), np.zeros((0, seq_len), np.int64)
    if total < seq_len + 1:
        tail = shard.tokens[:].astype(np.int64)
        ids = np.full((1, seq_len), tail[-1], np.int64)
        targets = np.full((1, seq_len), IGNORE, np.int64)
        ids[0, : total - 1], targets[0, : total - 1] = tail[:-1], tail[1:]
        return ids, targets
    available = (total - 1) // seq_len
    chosen = [i * available // min(count, available) for i in range(min(count, available))]
    windows = np.stack([shard.window(i * seq_len, seq_len + 1) for i in chosen])
    return windows[:, :-1], windows[:, 1:]

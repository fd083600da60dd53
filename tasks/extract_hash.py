"""Hashes of words, tags and class names, and tables of them that compiled code reads.

Run its tests: `python -m pytest tests/tasks/test_extract.py`
"""

from __future__ import annotations

import numpy as np
from numba import njit

FNV, _PRIME = np.uint32(2166136261), np.uint32(16777619)  # of 32-bit FNV-1a


def fnv1a(data: bytes) -> int:
    """32-bit FNV-1a of lower-case bytes: how words, tags and class names are looked up."""
    value = 2166136261
    for byte in data:
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return value


def hash_table(keys: list[int], values: list[float], bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Open-addressed (keys uint32, values float32) of 2**bits places; key 0 marks a free one."""
    slots, found = np.zeros(1 << bits, np.uint32), np.zeros(1 << bits, np.float32)
    if len(keys) >= len(slots):
        raise ValueError(f"hash table of {len(slots)} places for {len(keys)} keys")
    for key, value in zip(keys, values, strict=True):
        place = key & (len(slots) - 1)
        while slots[place] not in (0, key):
            place = (place + 1) & (len(slots) - 1)
        slots[place], found[place] = key, value
    return slots, found


@njit(cache=True, nogil=True)
def lookup(slots, values, key, default):
    """Value of a key of `hash_table`, or `default`."""
    mask = np.uint32(len(slots) - 1)
    place = key & mask
    while slots[place] != 0:
        if slots[place] == key:
            return values[place]
        place = (place + np.uint32(1)) & mask
    return default


@njit(cache=True, nogil=True)
def mix(value, byte):
    """One more byte of a running FNV-1a, which starts at FNV."""
    return np.uint32((value ^ np.uint32(byte)) * _PRIME)

"""drift: two sets of prompts -> how far they are apart, in units of what chance would make of one set.

    prompt ──> hashed words, of length 1 ──> sketch of a set: number, mean, spread ──> distance of two sketches

A sketch says what words are frequent among hashes, and quotes nothing. Feature hashing: Weinberger et al. 2009. The distance
of means in such a space is the linear maximum mean discrepancy (Gretton et al. 2012); over the spread it is the pseudo-F of
PERMANOVA (Anderson 2001).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from zlib import crc32

NUM_BUCKETS = 64
LEAST_SPREAD = 0.01
"""Prompts that are all alike have no spread to compare with."""
WORDS = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """A set of prompts."""

    num: int
    mean: Sequence[float]
    """[NUM_BUCKETS]"""
    spread: float
    """Mean squared distance of a prompt from the mean."""


def sketch(prompts: Iterable[str]) -> Sketch:
    """The set's prompts, of which there is at least one, each as a vector of hashed word counts, scaled to length 1."""
    num, total, squares = 0, [0.0] * NUM_BUCKETS, 0.0
    for prompt in prompts:
        counts: dict[int, int] = {}
        for word in WORDS.findall(prompt.lower()):
            bucket = crc32(word.encode()) % NUM_BUCKETS
            counts[bucket] = counts.get(bucket, 0) + 1
        length = math.sqrt(sum(c * c for c in counts.values()))
        for bucket, count in counts.items():
            total[bucket] += count / length
        num, squares = num + 1, squares + bool(counts)
    mean = [value / num for value in total]
    return Sketch(num=num, mean=[round(v, 6) for v in mean], spread=max(0.0, squares / num - sum(v * v for v in mean)))


def merge(sketches: Sequence[Sketch]) -> Sketch:
    """All their prompts together; the spread is that inside the sets."""
    num = sum(part.num for part in sketches)
    columns = zip(*(part.mean for part in sketches), strict=True)
    mean = [sum(part.num * v for part, v in zip(sketches, column, strict=True)) / num for column in columns]
    return Sketch(num=num, mean=mean, spread=sum(part.num * part.spread for part in sketches) / num)


def pseudo_f(first: Sketch, second: Sketch) -> float:
    """|mean - mean|^2 / (spread (1/n + 1/m)): 1 in the mean where one source gave both sets, more where it changes by
    itself."""
    return _squared(first, second) / (_spread(first, second) * (1 / first.num + 1 / second.num))


def shift(first: Sketch, second: Sketch) -> float:
    """Distance of the sources' means over the spread, what chance makes of it taken off: what does not grow with
    numbers."""
    spread = _spread(first, second)
    return math.sqrt(max(0.0, _squared(first, second) / spread - 1 / first.num - 1 / second.num))


def _squared(first: Sketch, second: Sketch) -> float:
    return sum((a - b) ** 2 for a, b in zip(first.mean, second.mean, strict=True))


def _spread(first: Sketch, second: Sketch) -> float:
    return max(LEAST_SPREAD, merge([first, second]).spread)

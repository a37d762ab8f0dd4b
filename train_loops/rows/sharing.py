"""sharing: rows -> segments of a tree, in which tokens that several rows begin with are computed once.

    row 0  S S S S A A A          segment 0  S S S S      seen by everything that comes after it in a row
    row 1  S S S S B B       ->   segment 1  A A A        sees segment 0 and itself
                                  segment 2  B B          sees segment 0 and itself

Episodes of one task begin with the same prompt, and an agent's prompts with the same instructions: most tokens of a
group of episodes are shared. A token's hidden state depends on what is before it only, so nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

import numpy as np
from numpy.typing import NDArray

MIN_SHARED_TOKENS = 16
"""Shorter common beginnings are computed twice: attention takes longer over many small segments."""

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of consecutive tokens of some row; segments lie end to end."""

    row: int
    begin: int
    """Its first token, counted in its row; position ids go on from there."""
    length: int
    start: int
    """Index of its first token among all segments' tokens."""
    prefix: Indices
    """[begin] indices of the tokens that come before it in its row."""

    @property
    def places(self) -> Indices:
        """Returns [length]: the indices of its own tokens."""
        return np.arange(self.start, self.start + self.length)


def segments_of(rows: Sequence[Sequence[int]], *, share: bool) -> tuple[list[Segment], list[Indices]]:
    """Returns the segments, and for every row the indices of its tokens; without `share` every row is one segment."""
    tree = _Tree(rows)
    if share:
        tree.grow(_sorted(rows), 0, np.empty(0, dtype=np.int64))
    else:
        for row in range(len(rows)):
            tree.places[row] = tree.add(row, 0, len(rows[row]), np.empty(0, dtype=np.int64))
    return tree.segments, [tree.places[row] for row in range(len(rows))]


def neighbours(rows: Sequence[Sequence[int]]) -> list[int]:
    """Returns the rank of every row in an order in which rows that begin alike are neighbours."""
    rank_of = [0] * len(rows)
    for rank, row in enumerate(_sorted(rows)):
        rank_of[row] = rank
    return rank_of


class _Tree:
    """A prefix tree of rows, whose nodes are segments."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self._rows = rows
        self.segments: list[Segment] = []
        self.places: dict[int, Indices] = {}
        self._num_tokens = 0

    def add(self, row: int, begin: int, end: int, prefix: Indices) -> Indices:
        """Adds a segment of `row`; returns the indices of all tokens of the row up to its end."""
        if begin == end:
            return prefix
        segment = Segment(row=row, begin=begin, length=end - begin, start=self._num_tokens, prefix=prefix)
        self.segments.append(segment)
        self._num_tokens += segment.length
        return np.concatenate([prefix, segment.places])

    def grow(self, rows: list[int], depth: int, prefix: Indices) -> None:
        """Adds the tokens after `depth` of sorted `rows`, all of which begin with the tokens at `prefix`."""
        # Rows are sorted, so what a run of them has in common is the least of what its neighbours have.
        shared = [_num_shared(self._rows[a], self._rows[b]) for a, b in pairwise(rows)]
        start = 0
        while start < len(rows):
            alike = list(takewhile(lambda num: num >= depth + MIN_SHARED_TOKENS, shared[start:]))
            family = rows[start : start + len(alike) + 1]
            end = min(alike, default=len(self._rows[family[0]]))
            places = self.add(family[0], depth, end, prefix)
            if alike:
                self.grow(family, end, places)
            else:
                self.places[family[0]] = places
            start += len(family)


def _sorted(rows: Sequence[Sequence[int]]) -> list[int]:
    """Sorts the indices of rows by their tokens, so that rows which begin alike are neighbours."""
    return sorted(range(len(rows)), key=lambda row: list(rows[row]))


def _num_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Counts the tokens with which both begin."""
    length = min(len(a), len(b))
    differs = np.asarray(a[:length]) != np.asarray(b[:length])
    return int(differs.argmax()) if differs.any() else length

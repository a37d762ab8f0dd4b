"""sharing: which tokens of training rows are computed once: turns that extend each other, and beginnings that rows have in common.

    turn 0  prompt A  completion B
    turn 1  prompt A B C  completion D          ->  one row A B C D E F with the completions B, D and F (a chain)
    turn 2  prompt A B C D E  completion F

    row 0  S S S S A A A          segment 0  S S S S      seen by everything that comes after it in a row
    row 1  S S S S B B       ->   segment 1  A A A        sees segment 0 and itself
                                  segment 2  B B          sees segment 0 and itself

Attention is causal: a token's hidden state depends on what is before it only, so that logprobs and gradients are the same as
in rows of their own. Episodes of one task begin with the same prompt, and an agent's prompts with the same instructions: most
tokens of a group of episodes are shared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

import numpy as np
from numpy.typing import NDArray

from train_loops.rows.samples import Sample

MIN_SHARED_TOKENS = 16
"""Shorter common beginnings are computed twice: attention takes longer over many small segments."""
Indices = NDArray[np.int64]
Chain = tuple[int, ...]
"""Samples of one row, in time order. The last one's tokens are the row's; every other one's begin it."""


def chains_of(samples: Sequence[Sample]) -> list[Chain]:
    """Puts every sample into exactly one chain; chains are in the order of their first samples.

    A turn continues a chain of its episode if its prompt starts with exactly the token ids of the chain's last turn,
    prompt and completion; text that only reads the same does not count. Where several chains fit, the longest is taken,
    and where turns branch off the same turn, the first of them continues it. Agents and temperatures may differ. Turns
    that extend nothing are chains of one.

    Args:
        samples: of one model group.
    """
    chains: dict[str, list[list[int]]] = {}
    for i in sorted(range(len(samples)), key=lambda i: (samples[i].turn_index, i)):
        of_episode = chains.setdefault(samples[i].episode_id, [])
        extended = [chain for chain in of_episode if _extends(samples[i], samples[chain[-1]])]
        if extended:
            max(extended, key=lambda chain: len(samples[chain[-1]].token_ids)).append(i)
        else:
            of_episode.append([i])
    return sorted(tuple(chain) for of_episode in chains.values() for chain in of_episode)


def unique_shares(samples: Sequence[Sample], chains: Sequence[Chain]) -> tuple[float, dict[str, float]]:
    """Returns unique tokens over tokens, of all samples and by agent: the share that is computed where `chains` are merged.

    A shared beginning is counted for the turn that came first; 0 without samples.
    """
    tokens, unique = Counter[str](), Counter[str]()
    for chain in chains:
        num_shared = 0
        for sample in (samples[i] for i in chain):
            tokens[sample.agent] += len(sample.token_ids)
            unique[sample.agent] += len(sample.token_ids) - num_shared
            num_shared = len(sample.token_ids)
    return unique.total() / max(tokens.total(), 1), {agent: unique[agent] / n for agent, n in tokens.items()}


def _extends(later: Sample, earlier: Sample) -> bool:
    length = len(earlier.token_ids)
    if length > later.prompt_length:
        return False
    # Comparing the last token first is cheap, and rules most turns out whose prompt was rewritten.
    return later.token_ids[length - 1] == earlier.token_ids[-1] and list(later.token_ids[:length]) == list(
        earlier.token_ids
    )


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

"""draft_tables: positions of completions -> for the last tokens of a sequence, the token that came most often after them.

    position   the tokens before it (a window of WINDOW), its sources, the token
    source     a hash of the agent, or of agent and task
    context    a hash of a source and the last n tokens, for each n of CONTEXTS
    table      context -> the most frequent token, its share of the times, how often the context was seen

A look-up takes the first context that the table has: of agent and task before agent, the longest first. Numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

WINDOW = 8
CONTEXTS = (8, 5, 3, 2, 1)
"""Numbers of last tokens by which a position is found again, the longest first."""
SHARES = (0.3, 0.6, 0.85, 0.97)
"""Bounds of the bins by the share of the times in which the token came."""
COUNTS = (3, 10)
"""Bounds of the bins by how often the context was seen."""
BINS_OF_CONTEXT = (len(SHARES) + 1) * (len(COUNTS) + 1)
NUM_BINS = 2 * len(CONTEXTS) * BINS_OF_CONTEXT
NO_TOKEN = -1
TOKEN_BITS = np.uint64(20)
"""A context's hash and a token share 64 bits, so that one sort brings both into order. Vocabularies are smaller than 2^20."""
_TOKEN_MASK = np.uint64((1 << 20) - 1)

Ints = NDArray[np.int32]
Hashes = NDArray[np.uint64]


def source_id(*names: str) -> int:
    """Returns the 64-bit hash of an agent, or of an agent and a task."""
    return int.from_bytes(sha256("\x1f".join(names).encode()).digest()[:8], "little")


def bin_share() -> NDArray[np.float64]:
    """Returns the middle of each bin's share, by which a bin is judged that was never tried."""
    edges = (0.0, *SHARES, 1.0)
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    return np.tile(np.repeat(middles, len(COUNTS) + 1), 2 * len(CONTEXTS))


@dataclass(frozen=True, slots=True)
class Positions:
    """Places in completions, the oldest first."""

    windows: Ints
    """[N, WINDOW]: the tokens before, the last one at the end; -1 where the sequence begins."""
    agents: Hashes
    """[N]"""
    tasks: Hashes
    """[N]: hashes of agent and task."""
    tokens: Ints
    """[N]: what was sampled there."""

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def none(cls) -> Positions:
        """Returns an empty set of positions."""
        return cls(
            np.empty((0, WINDOW), np.int32), np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.int32)
        )

    @classmethod
    def of(cls, agent: str, task_id: str, token_ids: Sequence[int], num_prompt: int) -> Positions:
        """Returns the positions of a completion. Args: token_ids: the end of its prompt, `num_prompt` tokens, and the completion."""
        padded = np.concatenate([np.full(WINDOW, NO_TOKEN, np.int32), np.asarray(token_ids, np.int32)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[num_prompt : len(token_ids)]
        num = len(token_ids) - num_prompt
        agents, tasks = (np.full(num, source_id(*names), np.uint64) for names in ((agent,), (agent, task_id)))
        return cls(windows, agents, tasks, padded[WINDOW + num_prompt :])

    @classmethod
    def joined(cls, parts: Sequence[Positions], *, newest: int) -> Positions:
        """Returns the last `newest` positions of all parts."""
        columns = (np.concatenate([getattr(p, name) for p in parts])[-newest:] for name in cls.__slots__)
        return cls(*columns)


class DraftTables:
    """What came after what in some positions."""

    def __init__(self, positions: Positions) -> None:
        contexts = _contexts(positions.windows, positions.agents, positions.tasks)
        pairs = ((contexts & ~_TOKEN_MASK) | positions.tokens.astype(np.uint64)[:, None]).ravel()
        pairs.sort()
        begins = np.flatnonzero(_differs(pairs))
        counts = np.diff(begins, append=len(pairs)).astype(np.uint64)
        groups = np.flatnonzero(_differs(pairs[begins] >> TOKEN_BITS))
        # The most frequent token of a context; of two the smaller one.
        ranked = (counts << TOKEN_BITS) | (_TOKEN_MASK - (pairs[begins] & _TOKEN_MASK))
        best = np.maximum.reduceat(ranked, groups) if len(groups) else ranked
        totals = np.add.reduceat(counts, groups) if len(groups) else counts
        shares = (best >> TOKEN_BITS) / totals
        self._contexts = pairs[begins][groups] >> TOKEN_BITS
        self._tokens = (_TOKEN_MASK - (best & _TOKEN_MASK)).astype(np.int32)
        self._bins = (np.digitize(shares, SHARES) * (len(COUNTS) + 1) + np.digitize(totals, COUNTS)).astype(np.int32)

    def look_up(self, windows: Ints, agents: Hashes, tasks: Hashes) -> tuple[Ints, Ints]:
        """Returns the likely next token of each row, [R], NO_TOKEN where nothing like it was seen, and its bin, [R]."""
        if not len(self._contexts):
            return np.full(len(windows), NO_TOKEN, np.int32), np.full(len(windows), NO_TOKEN, np.int32)
        contexts = _contexts(windows, agents, tasks) >> TOKEN_BITS
        places: Any = np.searchsorted(self._contexts, contexts).clip(max=len(self._contexts) - 1)
        is_known = self._contexts[places] == contexts
        first = is_known.argmax(axis=1)
        rows = np.arange(len(windows))
        place, is_seen = places[rows, first], is_known[rows, first]
        tokens = np.where(is_seen, self._tokens[place], NO_TOKEN)
        return tokens, np.where(is_seen, first * BINS_OF_CONTEXT + self._bins[place], NO_TOKEN).astype(np.int32)


def _differs(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns where a sorted array has another value than before; true at its beginning."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]


def _contexts(windows: Ints, agents: Hashes, tasks: Hashes) -> Hashes:
    """Returns the contexts of each position, those to be looked up first in front, [N, 2 * len(CONTEXTS)]."""
    sums = np.cumsum(windows[:, ::-1].astype(np.uint64) * _OF_PLACE, axis=1)  # over the last 1, 2, ... tokens
    tokens = sums[:, np.array(CONTEXTS) - 1] + _OF_CONTEXT
    hashes = np.concatenate([tasks[:, None] + tokens, agents[:, None] + tokens], axis=1) * _ODD
    return hashes ^ (hashes >> np.uint64(32))


def _odd_numbers(name: str, num: int) -> Hashes:
    """Returns numbers to multiply with; the same in every process."""
    return np.array([source_id(name, str(n)) | 1 for n in range(num)], np.uint64)


_ODD = np.uint64(0x9E3779B97F4A7C15)
_OF_PLACE, _OF_CONTEXT = _odd_numbers("place", WINDOW), _odd_numbers("context", len(CONTEXTS))

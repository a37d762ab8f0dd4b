"""draft_tables: positions of completions -> for the last tokens of a sequence, the token that came most often after them.

    position   the tokens before it (a window of WINDOW), its sources, the token
    source     a hash of the agent, or of agent and task
    table      hash of (source, the last n tokens) -> token, share of the times, how often; for each n of CONTEXTS

A look-up takes the longest context that the table has, of agent and task before agent. Numpy only; a look-up of 128 sequences takes 0.2 ms.
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
NUM_BINS = 2 * len(CONTEXTS) * (len(SHARES) + 1) * (len(COUNTS) + 1)
NO_TOKEN = -1
_MIX = np.uint64(0x9E3779B97F4A7C15)

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
        self._of_tasks = [_Table(_hashes(positions.windows, positions.tasks, n), positions.tokens) for n in CONTEXTS]
        self._of_agents = [_Table(_hashes(positions.windows, positions.agents, n), positions.tokens) for n in CONTEXTS]
        self._tasks = np.unique(positions.tasks)

    def look_up(self, windows: Ints, agents: Hashes, tasks: Hashes) -> tuple[Ints, Ints]:
        """Returns the likely next token of each row, [R], NO_TOKEN where nothing like it was seen, and its bin, [R]."""
        tokens = np.full(len(windows), NO_TOKEN, np.int32)
        bins = np.full(len(windows), NO_TOKEN, np.int32)
        left = np.arange(len(windows))
        is_known = np.isin(tasks, self._tasks)
        if is_known.any():
            found = self._search(self._of_tasks, windows, tasks, left[is_known], tokens, bins, first_bin=0)
            left = np.setdiff1d(left, found, assume_unique=True)
        self._search(self._of_agents, windows, agents, left, tokens, bins, first_bin=NUM_BINS // 2)
        return tokens, bins

    def _search(
        self,
        tables: Sequence[_Table],
        windows: Ints,
        sources: Hashes,
        rows: NDArray[np.int64],
        tokens: Ints,
        bins: Ints,
        *,
        first_bin: int,
    ) -> NDArray[np.int64]:
        """Fills in `tokens` and `bins` of those rows that one of the tables has; returns them."""
        found: list[NDArray[np.int64]] = []
        for number, (context, table) in enumerate(zip(CONTEXTS, tables, strict=True)):
            if not len(rows):
                break
            place = table.places(_hashes(windows[rows], sources[rows], context))
            hit = place >= 0
            tokens[rows[hit]] = table.tokens[place[hit]]
            bins[rows[hit]] = first_bin + number * (NUM_BINS // 2 // len(CONTEXTS)) + table.bins[place[hit]]
            found.append(rows[hit])
            rows = rows[~hit]
        return np.concatenate(found) if found else rows[:0]


class _Table:
    """Context hash -> the most frequent next token, for one length of contexts."""

    def __init__(self, contexts: Hashes, nexts: Ints) -> None:
        order = np.lexsort((nexts, contexts))
        contexts, nexts = contexts[order], nexts[order]
        begins = np.flatnonzero(_differs(contexts) | _differs(nexts))
        counts = np.diff(np.append(begins, len(contexts)))
        groups = np.flatnonzero(_differs(contexts[begins]))
        totals = np.add.reduceat(counts, groups) if len(groups) else np.empty(0, np.int64)
        group_of = np.repeat(np.arange(len(groups)), np.diff(np.append(groups, len(begins))))
        by_count = np.lexsort((nexts[begins], -counts, group_of))
        best = by_count[groups]  # the first of its group, in which the most frequent comes first
        self._contexts = contexts[begins][groups]
        self.tokens: Ints = nexts[begins][best].astype(np.int32)
        shares = counts[best] / totals
        self.bins: Ints = (np.digitize(shares, SHARES) * (len(COUNTS) + 1) + np.digitize(totals, COUNTS)).astype(
            np.int32
        )

    def places(self, contexts: Hashes) -> NDArray[np.int64]:
        """Returns the row of each context, -1 where it is not there."""
        if not len(self._contexts):
            return np.full(len(contexts), -1)
        places: Any = np.searchsorted(self._contexts, contexts).clip(max=len(self._contexts) - 1)
        return np.where(self._contexts[places] == contexts, places, -1)


def _differs(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns where a sorted array has another value than before; true at its beginning."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]


def _hashes(windows: Ints, sources: Hashes, num_tokens: int) -> Hashes:
    """Returns the hash of each source with its last `num_tokens` tokens."""
    hashes = _mixed(sources, np.full(len(sources), num_tokens, np.uint64))
    for back in range(1, num_tokens + 1):
        hashes = _mixed(hashes, windows[:, -back].astype(np.uint64))
    return hashes


def _mixed(hashes: Hashes, values: Hashes) -> Hashes:
    hashes = (hashes ^ values) * _MIX
    return hashes ^ (hashes >> np.uint64(29))

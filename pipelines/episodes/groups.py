"""groups: what is stored of each group -> whether a sampling pass has enough, which groups it leaves out, and when it will end.

Episodes are compared within their group (GRPO sense), so only whole groups are trained on and only whole groups are
dropped: if single slow episodes were left out, each group would keep its short ones.

    planned ──start in order──> under way ──last episode stored──> complete ──> pinned
        │                            │
        └─ budget spent: not started └─ enough others complete: cut, its stored episodes excluded from the pin

What this does to the choice of tasks. A spent budget leaves out the tasks that come last in a seeded order: how many is a
matter of speed, which ones is not. Over-sampling leaves out the slowest groups, and slow ones are long ones: often the
hard tasks. Cut, these tasks are seen less often than others, for good. Carried over, they start first in the next
iteration and so are nearly always complete there, but later, under newer versions, and in that iteration they displace
tasks that are as easy as any. Neither biases an episode within its group.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

import pyarrow as pa

from pipelines.config.sections import BudgetConfig
from serve_apps.episode.causes import covered
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.policy.client import CallCounts

WINDOW_S = 30.0
"""The seconds whose tokens make the speed of a pass."""
StoppedBy = Literal["tokens", "seconds", "enough"]


class Groups:
    """The groups of one sampling pass, by what is stored of them; what earlier, interrupted passes left included."""

    def __init__(
        self, specs: Sequence[EpisodeSpec], stored: pa.Table, *, num_enough: int | None, budget: BudgetConfig
    ) -> None:
        """Nothing is counted as spent but what is stored.

        Args:
            specs: the episodes planned, groups in the order in which they start.
            stored: `TraceStore.stored_episodes` of the pass, with tokens where the budget counts them.
            num_enough: complete groups that are enough; None: all are wanted, whatever they cost.
        """
        self.may_stop = num_enough is not None
        self._budget = budget
        self._num_planned = len(specs)
        self.task_of: dict[str, str] = {}
        """Task of every planned group, in order."""
        self._missing: dict[str, int] = {}
        for spec in specs:
            self.task_of[spec.group_id] = spec.task.task_id
            self._missing[spec.group_id] = self._missing.get(spec.group_id, 0) + 1
        self._num_enough = len(self._missing) if num_enough is None else num_enough
        self.num_episodes_enough = len(specs) // max(1, len(self._missing)) * self._num_enough
        self.begun: set[str] = set()
        """Groups of which something is stored."""
        self._num_complete, self._num_tokens = 0, 0
        planned = {spec.episode_id for spec in specs}
        tokens = stored["num_tokens"].to_pylist() if "num_tokens" in stored.column_names else [0] * len(stored)
        columns = stored["episode_id"].to_pylist(), stored["group_id"].to_pylist(), tokens
        for episode, group, num_tokens in zip(*columns, strict=True):
            if episode in planned:  # what a pass plays may be part of what is played under one key, and of a group
                self.add({group: 1}, num_tokens)
        self._spent_s = busy_seconds(stored) if self.may_stop else 0.0

    def add(self, episodes: Mapping[str, int], num_tokens: int) -> None:
        """So many episodes of each group were stored, with so many tokens together."""
        self._num_tokens += num_tokens
        self.begun.update(episodes)
        for group, count in episodes.items():
            self._missing[group] -= count
            self._num_complete += self._missing[group] == 0

    @property
    def complete(self) -> set[str]:
        """Groups of which every episode is stored."""
        return {group for group, missing in self._missing.items() if missing == 0}

    @property
    def num_episodes_left(self) -> int:
        """Episodes until there are enough, if none is played of groups that are left out."""
        num_stored = self._num_planned - sum(self._missing.values())
        return max(0, self.num_episodes_enough - num_stored)

    @property
    def left_out(self) -> list[str]:
        """Planned groups that are not complete, in order."""
        return [group for group, missing in self._missing.items() if missing > 0]

    def describe(self) -> str:
        """Describes what a pass waits for."""
        left = self.left_out
        names = ", ".join(self.task_of[group] for group in left[:3])
        return f"{len(left)} of {len(self._missing)} groups, of tasks {names}{' ...' if len(left) > 3 else ''}"

    @property
    def seconds_left(self) -> float:
        """Of the budget, at the beginning of this pass."""
        return float("inf") if self._budget.seconds is None else max(0.0, self._budget.seconds - self._spent_s)

    def stopped_by(self, seconds: float) -> StoppedBy | None:
        """Why no group has to begin any more, `seconds` after the beginning of this pass; None while one has."""
        if not self.may_stop or self._num_complete == len(self._missing):
            return None
        if self._num_complete >= self._num_enough:
            return "enough"
        if self._budget.tokens is not None and self._num_tokens >= self._budget.tokens:
            return "tokens"
        return "seconds" if seconds >= self.seconds_left else None


def busy_seconds(stored: pa.Table) -> float:
    """Seconds in which at least one of the stored episodes was under way: pauses between passes do not count."""
    starts, durations = stored["started_at"].to_pylist(), stored["duration_s"].to_pylist()
    return covered((start, start + duration) for start, duration in zip(starts, durations, strict=True))


class Pace:
    """Follows one sampling pass."""

    def __init__(self, num_episodes: int, *, at: float | None = None) -> None:
        """Begins now, or `at` by `time.monotonic()`. Args: num_episodes: those that this pass plays."""
        self.calls = CallCounts()
        self._num_episodes, self._num_done, self._num_tokens_done = num_episodes, 0, 0
        self._began = time.monotonic() if at is None else at
        self._seen = deque([(self._began, 0)])
        """(time, tokens sampled until then) within the window, the oldest at its begin."""

    def add(self, calls: CallCounts, *, num_episodes: int, num_tokens: int, at: float | None = None) -> None:
        """Adds what one collector reports.

        Args:
            calls: what became of model calls since its last report.
            num_episodes: episodes that have ended since then.
            num_tokens: completion tokens of these.
        """
        now = time.monotonic() if at is None else at
        self.calls += calls
        self._num_done += num_episodes
        self._num_tokens_done += num_tokens
        self._seen.append((now, self.calls.num_tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Returns the completion tokens per second of the last `WINDOW_S` seconds."""
        (first, before), (last, now) = self._seen[0], self._seen[-1]
        return (now - before) / (last - first) if last > first else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Returns about how long the pass will go on; None before an episode has ended.

        The episodes that are left are taken to have as many tokens as those that have ended, and what is sampled of them
        already counts. The first to end are the short ones: early on it is too little rather than too much.
        """
        if not self._num_done or not self.tokens_per_s:
            return None
        planned = self._num_tokens_done / self._num_done * self._num_episodes
        return max(0.0, planned - self.calls.num_tokens) / self.tokens_per_s

    def describe(self) -> str:
        """Describes speed, end and repeated calls in one line; empty before anything is known."""
        parts = [f"{self.tokens_per_s:,.0f} tokens/s"] if self.tokens_per_s else []
        left_s = self.seconds_left if self._num_done < self._num_episodes else None
        parts += [f"about {in_words(left_s)} left"] if left_s is not None else []
        repeats = repeats_in_words(self.calls)
        return ", ".join(parts) + (f"; {repeats}" if repeats else "")


def repeats_in_words(calls: CallCounts) -> str:
    """Describes how many calls were repeated and the key to raise; empty where none was."""
    parts = []
    if calls.num_late:
        why = (
            "nothing came from the engine for collect.call.call_timeout_s: raise it, or see why the engine stood still"
        )
        parts.append(f"{calls.num_late} repeated ({why})")
    if calls.num_lost:
        parts.append(f"{calls.num_lost} repeated (a replica or its engine failed)")
    return f"of {calls.num_calls} calls {' and '.join(parts)}" if parts else ""


def in_words(seconds: float) -> str:
    """Describes a time in a unit that suits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

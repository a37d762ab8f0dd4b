"""groups: what is stored of each group -> whether a sampling pass has enough, and which groups it leaves out.

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

from collections.abc import Mapping, Sequence
from typing import Literal

import pyarrow as pa

from pipelines.config.sections import BudgetConfig
from serve_apps.episode.causes import covered
from serve_apps.episode_spec import EpisodeSpec

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

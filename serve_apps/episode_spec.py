"""episode_spec: which episode to run -> its key, its group and its seed."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from stores.traces.conventions import VariantName
from stores.types import Purpose, Task, Trace, episode_id

VariantKind = Literal["greedy", "counterfactual", "without"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Describes what differs from the episode that is run again."""

    kind: VariantKind
    agent: str = ""
    """The agent whose turn is changed; empty in a greedy episode."""
    base: Trace | None = None
    """The episode that is replayed; None where nothing is (greedy)."""
    changed_at: int = 0
    """The index of the changed turn: later events are not replayed."""
    sibling: int = 0
    """Which of the replays with this change it is; each has a seed of its own."""

    @property
    def variant(self) -> str:
        """The name of the variant, which is part of the episode's key."""
        changed = {"greedy": "", "counterfactual": str(self.changed_at), "without": self.agent}[self.kind]
        return str(VariantName(kind=self.kind, changed=changed, sibling=self.sibling))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """Names an episode: whose run, which iteration, purpose, team, task and index."""

    run_id: str
    iteration: int
    purpose: Purpose
    team_key: str
    task: Task
    episode_index: int
    run_seed: int
    script: Script | None = None
    """What the episode replays and changes; None where it replays nothing."""

    @property
    def variant(self) -> str:
        """The name of the script; empty without one."""
        return "" if self.script is None else self.script.variant

    @property
    def episode_id(self) -> str:
        """The key of the episode."""
        return episode_id(
            run_id=self.run_id,
            iteration=self.iteration,
            purpose=self.purpose,
            team_key=self.team_key,
            task_id=self.task.task_id,
            episode_index=self.episode_index,
            variant=self.variant,
        )

    @property
    def seed(self) -> int:
        """The seed of the episode. It does not depend on the team: two teams play a task with common random numbers."""
        parts = (self.run_seed, self.iteration, self.purpose, self.task.task_id, self.episode_index, self.variant)
        return int.from_bytes(sha256(repr(parts).encode()).digest()[:4], "big") >> 1

    @property
    def group_id(self) -> str:
        """The group of the episodes of this task, iteration, purpose and team.

        Each kind of variant has a group of its own.
        """
        return episode_id(
            run_id=self.run_id,
            iteration=self.iteration,
            purpose=self.purpose,
            team_key=self.team_key,
            task_id=self.task.task_id,
            episode_index=-1,
            variant="" if self.script is None else self.script.kind,
        )

"""episode_spec: which episode to run -> its key, its group and its seed."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from serve_apps.replay import Script
from stores.types import Purpose, Task, episode_id


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSpec:
    """Which episode to run."""

    run_id: str
    iteration: int
    purpose: Purpose
    team_key: str
    task: Task
    episode_index: int
    run_seed: int
    script: Script | None = None
    """What the episode replays and changes; None: it is an episode of its own."""

    @property
    def variant(self) -> str:
        """Name of the script; empty without one."""
        return "" if self.script is None else self.script.variant

    @property
    def episode_id(self) -> str:
        """Key of the episode."""
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
        """Seed of the episode: same run seed, task and index give the same, whatever team plays (common random numbers)."""
        parts = (self.run_seed, self.iteration, self.purpose, self.task.task_id, self.episode_index, self.variant)
        return int.from_bytes(sha256(repr(parts).encode()).digest()[:4], "big") >> 1

    @property
    def group_id(self) -> str:
        """Episodes of the same task, iteration, purpose and team; their variants are groups of their own, by kind."""
        return episode_id(
            run_id=self.run_id,
            iteration=self.iteration,
            purpose=self.purpose,
            team_key=self.team_key,
            task_id=self.task.task_id,
            episode_index=-1,
            variant="" if self.script is None else self.script.kind,
        )

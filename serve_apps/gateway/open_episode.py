"""open_episode: a team and a caller's request -> an episode that waits for calls, and for its outcome."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from serve_apps.agent import Agent
from serve_apps.gateway.api_keys import ApiKey
from serve_apps.gateway.service import Service
from serve_apps.gateway.teams import ServedTeam
from serve_apps.gateway.workflow_runs import episode_spec
from serve_apps.openai_api.protocol import EpisodeRequest
from serve_apps.program.episode import ProgramEpisode
from serve_apps.runner import Recorder, via
from serve_apps.workflow import Outcome, Workflow
from stores.types import Task


@dataclass(kw_only=True)
class OpenEpisode(ProgramEpisode):
    """An episode that a caller of the gateway plays."""

    team: ServedTeam
    key: ApiKey
    store: bool | None
    idle_s: float
    num_on_their_way: int = 0
    asked: str = ""
    """The last thing that the user said in the first call: the task, where none was given."""
    _called_at: float = field(default_factory=time.monotonic)

    @property
    def headers(self) -> dict[str, str]:
        """See ProgramEpisode."""
        return self.team.headers(self.id)

    @property
    def idle_left_s(self) -> float:
        """Until it ends for want of calls."""
        return self.idle_s - (0 if self.num_on_their_way else time.monotonic() - self._called_at)

    @contextmanager
    def called(self) -> Iterator[None]:
        """Around a call."""
        self.num_on_their_way += 1
        try:
            yield
        finally:
            self.num_on_their_way -= 1
            self._called_at = time.monotonic()


class Elsewhere(Workflow):
    """A workflow whose program somebody else plays: it waits for the outcome."""

    def __init__(self, agents: dict[str, Agent]) -> None:
        """Args: agents: those of the team."""
        self.agents = agents
        self.episode: OpenEpisode | None = None

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """What was posted. Raises TimeoutError where nobody called for too long, and what we failed with."""
        episode = self.episode
        assert episode is not None, "it is set before the recorder runs"
        while not episode.is_over.is_set():
            if episode.idle_left_s <= 0:
                raise TimeoutError(f"no call for {episode.idle_s:g} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(episode.idle_left_s):
                    await episode.is_over.wait()
        if episode.failure is not None:
            raise episode.failure
        return episode.outcome_of("")


def begun(service: Service, team: ServedTeam, request: EpisodeRequest, key: ApiKey) -> OpenEpisode:
    """An episode of a team; its recorder does not run yet."""
    config = service.config.episodes
    name = f"ep-{service.replica}-{secrets.token_hex(12)}"
    spec = episode_spec(team, request, name=name)
    workflow = Elsewhere(dict(team.acting.workflow.agents))
    limits = team.team_spec.limits.model_copy(update={"episode_timeout_s": config.max_s})
    recorder = Recorder(spec, replace(team.acting, workflow=workflow), via(service.client(team)), limits)
    workflow.episode = OpenEpisode(
        recorder=recorder,
        id=name,
        max_turns=config.max_turns,
        team=team,
        key=key,
        store=request.store,
        idle_s=config.idle_s,
    )
    return workflow.episode

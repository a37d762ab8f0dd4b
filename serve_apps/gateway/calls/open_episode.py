"""open_episode: a team and a caller's request -> an episode that waits for its program's calls and its outcome."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.config import GatewayEpisodesConfig
from serve_apps.episode.recorder import Recorder
from serve_apps.episode.team import via
from serve_apps.gateway.calls.workflow_runs import episode_spec
from serve_apps.gateway.traffic.api_keys import ApiKey
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.teams import ServedTeam
from serve_apps.openai_api.protocol import EpisodeRequest
from serve_apps.program.episode import ProgramEpisode
from stores.types import Task


@dataclass(kw_only=True)
class OpenEpisode(ProgramEpisode):
    """An episode that the program of a gateway's caller runs."""

    team: ServedTeam
    key: ApiKey
    store: bool | None
    idle_s: float
    num_calls_in_flight: int = 0
    num_characters: int = 0
    """Characters of the requests that it was opened with and that its program has made."""
    first_question: str = ""
    """The last user message of the first call: it serves as the task's prompt where the caller gave none."""
    _called_at: float = field(default_factory=time.monotonic)

    @property
    def headers(self) -> dict[str, str]:
        """Returns the headers that name the team and the episode."""
        return self.team.headers(self.id)

    @property
    def idle_left_s(self) -> float:
        """Seconds until the episode ends because no call comes; calls in flight stop the clock."""
        return self.idle_s - (0 if self.num_calls_in_flight else time.monotonic() - self._called_at)

    @contextmanager
    def call_in_flight(self) -> Iterator[None]:
        """Counts the work inside as a call in flight."""
        self.num_calls_in_flight += 1
        try:
            yield
        finally:
            self.num_calls_in_flight -= 1
            self._called_at = time.monotonic()


class ExternalProgram(Workflow):
    """A workflow whose program runs with the caller; it only waits for the outcome."""

    def __init__(self, agents: dict[str, Agent]) -> None:
        """Args: agents: the team's agents, which the program may call."""
        self.agents = agents
        self.episode: OpenEpisode | None = None

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns the posted outcome. Raises TimeoutError where no call came for `idle_s`, and `episode.failure`."""
        episode = self.episode
        assert episode is not None, "begin_episode sets it before the recorder runs"
        while not episode.is_over.is_set():  # a call during the wait moves the deadline: look at it again each time
            if episode.idle_left_s <= 0:
                raise TimeoutError(f"no call for {episode.idle_s:g} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(episode.idle_left_s):
                    await episode.is_over.wait()
        if episode.failure is not None:
            raise episode.failure
        return episode.outcome_of("")


def begin_episode(
    service: Service, team: ServedTeam, request: EpisodeRequest, key: ApiKey, limits_of_team: GatewayEpisodesConfig
) -> OpenEpisode:
    """Makes an episode of a team; its recorder does not run yet."""
    name = f"ep-{service.replica}-{secrets.token_hex(12)}"
    spec = episode_spec(team, request, name=name)
    workflow = ExternalProgram(dict(team.acting.workflow.agents))
    limits = team.team_spec.limits.model_copy(update={"episode_timeout_s": limits_of_team.max_s})
    recorder = Recorder(spec, replace(team.acting, workflow=workflow), via(service.client(team)), limits)
    workflow.episode = OpenEpisode(
        recorder=recorder,
        id=name,
        max_turns=limits_of_team.max_turns,
        team=team,
        key=key,
        store=request.store,
        idle_s=limits_of_team.idle_s,
    )
    return workflow.episode

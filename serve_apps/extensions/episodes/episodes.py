"""episodes: a program that runs with the caller -> one episode of a team, call by call, until its outcome is posted.

    open ──> run_attempt ──────────── waits ───────────> Trace ──> capture, with the score as feedback
               ▲ chat ──> a slot, the team still loaded ──> a turn    ▲ outcome posted | no call for idle_s | our failure

Every call is answered by the team version on which the episode began. Only a call keeps a set of policy apps busy, not the open
episode: otherwise a waiting episode would keep the next team from being loaded. An episode whose set may have another team
loaded by now ends at its next call.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.config import GatewayEpisodesConfig
from serve_apps.episode.recorder import Recorder
from serve_apps.episode.runner import run_attempt
from serve_apps.episode.team import via
from serve_apps.gateway.calls.workflow_runs import episode_spec
from serve_apps.gateway.traffic.callers import ApiKey
from serve_apps.gateway.traffic.figures import chat_figures
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.teams import Production, ServedTeam
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.protocol import ApiError, EpisodeRequest
from serve_apps.policy.client import PolicyCallError
from serve_apps.program.episode import PostedOutcome, ProgramEpisode
from stores.types import Task, Trace

MAX_CHARACTERS = 64_000_000
"""Characters of the requests of all open episodes."""
MAX_ENDED = 1000
"""Number of ended episodes whose end is remembered."""


class GatewayEpisodes:
    """`program.routes.Episodes` of one gateway replica. It lives in the replica's event loop; `close` it at the end."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._open: dict[str, OpenEpisode] = {}
        self._recordings: dict[str, asyncio.Task[Trace]] = {}
        self._ended: OrderedDict[str, tuple[ApiKey, dict[str, Any]]] = OrderedDict()

    def open_episode(self, production: Production, request: EpisodeRequest, key: ApiKey) -> OpenEpisode:
        """Begins an episode on a team; ApiError 429 where too many episodes are open."""
        limits = production.config.settings.episodes
        team = production.choose_contender(request.user)
        of_team = [episode for episode in self._open.values() if episode.team.name == team.name]
        num_own = sum(episode.key.holder == key.holder for episode in of_team)
        share = self._service.share_of_a_key
        if len(of_team) >= limits.max_open or num_own >= max(1, int(share * limits.max_open)):
            raise ApiError(
                429,
                f"{len(of_team)} episodes are open here, {num_own} of them of API key {key.name!r}, and at most {limits.max_open} may "
                "be: end some, or try again later",
                code="too_many_episodes",
                retry_after_s=5,
            )
        self._check_kept(key, request.num_characters)
        episode = begin_episode(self._service, team, request, key, limits)
        episode.num_characters += request.num_characters
        self._open[episode.id] = episode
        self._service.num_episodes += 1
        recording = self._recordings[episode.id] = asyncio.ensure_future(
            run_attempt(
                episode.recorder,
                1,
                served=episode.team.in_spans(episode_id=episode.id, hides_texts=episode.store is False),
            )
        )
        recording.add_done_callback(lambda task: self._episode_ended(episode, task))
        return episode

    def find(self, episode_id: str, request: Request) -> OpenEpisode:
        """Returns an open episode that this caller began, or any for a key with scope `admin`; ApiError 404 or 410."""
        keys = self._service.keys_of(request, "call", "admin")
        episode = self._open.get(episode_id)
        owner, ended = self._ended.get(episode_id, (None, {}))
        team = episode.team.name if episode is not None else ended["troupe"]["team"] if owner is not None else ""
        key = keys.get(team) or next(iter(keys.values()))
        self._service.count_request(request, key)
        if episode is not None and _may_see(keys.get(team), episode.key):
            return episode
        if owner is not None and _may_see(keys.get(team), owner):
            raise self._ended_error(episode_id)
        raise ApiError(
            404,
            f"there is no episode {episode_id!r} that API key {key.name!r} began: it never existed, it ended long ago, or "
            "its gateway replica is gone",
            code="episode_not_found",
        )

    async def chat(self, episode: ProgramEpisode, agent: str, body: ChatRequest) -> dict[str, Any]:
        """Answers one call of an episode, which becomes a turn, with the team on which the episode began; ApiError."""
        assert isinstance(episode, OpenEpisode), "only `find` returns episodes"
        if (
            body.store is False
        ):  # a caller who says so in one call means the whole episode, which holds this call's text
            episode.store = False
            episode.recorder.spans.hide_texts()
        if not episode.first_question:
            episode.first_question = body.last_user_text
        self._check_kept(episode.key, body.num_characters)
        episode.num_characters += body.num_characters
        with episode.call_in_flight():
            reply = await self._sample_turn(episode, agent, body)
        return {
            **reply,
            "system_fingerprint": episode.team.fingerprint,
            "troupe": {**episode.team.reply_fields, "episode": episode.id, **reply["troupe"]},
        }

    async def outcome(self, episode: ProgramEpisode, posted: PostedOutcome) -> dict[str, Any]:
        """Ends an episode with its outcome; returns how it ended, and whether it is stored."""
        assert isinstance(episode, OpenEpisode), "only `find` returns episodes"
        await self._check_open(episode)
        if episode.num_calls_in_flight:
            raise ApiError(
                409,
                f"{episode.num_calls_in_flight} calls of this episode are in flight: post the outcome once they are answered",
                code="calls_in_flight",
            )
        episode.outcome = posted
        episode.is_over.set()
        await asyncio.wait({self._recordings[episode.id]})
        return self._ended[episode.id][1]

    async def close(self) -> None:
        """Ends all open episodes as failed, because their replica stops."""
        for episode in self._open.values():
            episode.fail(PolicyCallError("the gateway replica of this episode was stopped"))
        if self._recordings:
            await asyncio.wait({*self._recordings.values()})

    async def _sample_turn(self, episode: OpenEpisode, agent: str, body: ChatRequest) -> dict[str, Any]:
        service = self._service
        try:
            slot = await service.take_slot_on(episode.team, episode.key)
        except ApiError as error:
            if error.status == 410:
                episode.fail(PolicyCallError(str(error)))
            raise
        with slot:
            await self._check_open(episode)  # again: the outcome may have come while this call waited for its slot
            with service.counting_failures(episode.team):
                reply = await service.within_timeout(episode.chat(agent, body))
        service.count_answer(slot, episode.key, reply["usage"]["completion_tokens"], chat_figures(reply))
        return reply

    def _check_kept(self, key: ApiKey, num_more: int) -> None:
        """ApiError 429 where open episodes keep too much: what a call says stays in memory until its episode ends."""
        num_own = sum(e.num_characters for e in self._open.values() if e.key.holder == key.holder) + num_more
        num = sum(e.num_characters for e in self._open.values()) + num_more
        if num > MAX_CHARACTERS or num_own > self._service.share_of_a_key * MAX_CHARACTERS:
            raise ApiError(
                429,
                f"open episodes keep {num:,} characters of requests here, {num_own:,} of them of API key {key.name!r}, and at most "
                f"{MAX_CHARACTERS:,} are kept: end some, or try again later",
                code="too_many_episodes",
                retry_after_s=5,
            )

    async def _check_open(self, episode: OpenEpisode) -> None:
        """ApiError 410 where the episode has ended or is about to: a call that comes now would not be in its trace."""
        recording = self._recordings.get(episode.id)
        if recording is not None and episode.is_over.is_set():
            await asyncio.wait({recording})
        if episode.id not in self._open:
            raise self._ended_error(episode.id)

    def _ended_error(self, episode_id: str) -> ApiError:
        summary = self._ended[episode_id][1]
        why = summary["error"] or summary["stop_reason"]
        return ApiError(410, f"episode {episode_id!r} has ended: {summary['status']}, {why}", code="episode_ended")

    def _episode_ended(self, episode: OpenEpisode, recording: asyncio.Task[Trace]) -> None:
        del self._open[episode.id], self._recordings[episode.id]
        self._service.num_episodes -= 1
        if recording.cancelled():  # the event loop is closing
            return
        trace = replace(recording.result(), episode_id=episode.id)
        if not trace.task.prompt:
            trace = replace(trace, task=replace(trace.task, prompt=episode.first_question))
        service, posted, captured = self._service, episode.outcome, "not_kept"
        score = None if posted is None or posted.score is None else 2 * posted.score - 1  # [0, 1] -> [-1, 1]
        if service.capture.should_keep(episode.team, episode.store):
            has_turns = bool(trace.turns)
            captured = service.capture.keep_trace(
                trace, team=episode.team, key=episode.key, is_trainable=has_turns, score=score
            )
        service.metrics.count_episode(episode.team.name, episode.team.version, trace.status.value)
        self._ended[episode.id] = episode.key, _summary_of(trace, episode, captured)
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)


def _summary_of(trace: Trace, episode: OpenEpisode, captured: str) -> dict[str, Any]:
    """The reply to a posted outcome; it holds no text of the episode."""
    return {
        "id": episode.id,
        "object": "episode.outcome",
        "status": trace.status.value,
        "stop_reason": trace.stop_reason,
        "error": trace.error,
        "num_turns": len(trace.turns),
        "conversations": episode.growth,
        "capture": captured,
        "troupe": episode.team.reply_fields,
    }


def _may_see(key: ApiKey | None, owner: ApiKey) -> bool:
    """Args: key: that of the caller for the episode's team; None: it has none."""
    return key is not None and (key.name == owner.name or "admin" in key.scopes)


@dataclass(eq=False, kw_only=True)
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

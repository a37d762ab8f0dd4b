"""episodes: a program that runs elsewhere -> one episode of a team, call by call, until its outcome is posted.

    open ──> Recorder.run ─────────── waits ───────────> Trace ──> capture, with the score as feedback
               ▲ chat ──> a place, the team still loaded ──> a turn    ▲ outcome posted | nobody called | we failed

Every call is answered by the team version on which the episode began. Only a call holds its set of policy apps, not the
episode: one that waits would keep the next team from being loaded. A set that may hold another team ends it at its next call.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from typing import Any

from fastapi import Request

from serve_apps.gateway.api_keys import ApiKey
from serve_apps.gateway.figures import chat_figures
from serve_apps.gateway.open_episode import OpenEpisode, begun
from serve_apps.gateway.service import Service
from serve_apps.openai_api.protocol import ApiError, ChatRequest, EpisodeRequest
from serve_apps.policy.client import PolicyCallError
from serve_apps.program.episode import PostedOutcome, ProgramEpisode
from stores.types import Trace

MAX_ENDED = 1000
"""Episodes that ended of which is remembered how."""


class GatewayEpisodes:
    """`program.routes.Episodes` of one gateway replica. Lives in its event loop; `close` it at the end."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._open: dict[str, OpenEpisode] = {}
        self._playing: dict[str, asyncio.Task[Trace]] = {}
        self._ended: OrderedDict[str, tuple[ApiKey, dict[str, Any]]] = OrderedDict()

    def open(self, request: EpisodeRequest, key: ApiKey) -> OpenEpisode:
        """Begins an episode on the team that answers now; ApiError 404 without such a team, 429 where too many are open."""
        config = self._service.config.episodes
        team = self._service.team(request.team).choose(request.user)
        if len(self._open) >= config.max_open:
            raise ApiError(
                429,
                f"{len(self._open)} episodes are open here, and at most {config.max_open} may be: end some, or come again",
                code="too_many_episodes",
                retry_after_s=5,
            )
        episode = begun(self._service, team, request, key)
        self._open[episode.id] = episode
        self._service.num_episodes += 1
        playing = self._playing[episode.id] = asyncio.ensure_future(episode.recorder.run(1))
        playing.add_done_callback(lambda of: self._has_ended(episode, of))
        return episode

    def find(self, episode_id: str, request: Request) -> OpenEpisode:
        """An open one that this caller began, or a key with scope `admin`; ApiError 404, and 410 where it has ended."""
        key = self._service.caller(request, "call", counts=True)
        episode = self._open.get(episode_id)
        if episode is not None and _may_see(key, episode.key):
            return episode
        whose, _ = self._ended.get(episode_id, (None, {}))
        if whose is not None and _may_see(key, whose):
            raise self._ended_as(episode_id)
        raise ApiError(
            404,
            f"there is no episode {episode_id!r} that API key {key.name!r} began: it never was, ended long ago, or its gateway "
            "replica is gone",
            code="episode_not_found",
        )

    async def chat(self, episode: ProgramEpisode, agent: str, body: ChatRequest) -> dict[str, Any]:
        """A turn, by the team on which the episode began; ApiError."""
        assert isinstance(episode, OpenEpisode), "only `find` hands them out"
        if body.store is False:  # whoever says so of a call means what is in it
            episode.store = False
        if not episode.asked:
            said = [m.for_template()["content"] for m in body.messages if m.role == "user"]
            episode.asked = said[-1] if said else ""
        with episode.called():
            answer = await self._answered(episode, agent, body)
        about = {**episode.team.about, "arm": episode.team.arm, "episode": episode.id}
        return {
            **answer,
            "system_fingerprint": episode.team.fingerprint,
            "troupe": {**about, **answer["troupe"]},
        }

    async def outcome(self, episode: ProgramEpisode, posted: PostedOutcome) -> dict[str, Any]:
        """Ends the episode; returns how, and whether it is kept."""
        assert isinstance(episode, OpenEpisode), "only `find` hands them out"
        await self._check_open(episode)
        if episode.num_on_their_way:
            raise ApiError(
                409,
                f"{episode.num_on_their_way} calls of this episode are on their way: post the outcome once they are answered",
                code="calls_on_their_way",
            )
        episode.outcome = posted
        episode.is_over.set()
        await asyncio.wait({self._playing[episode.id]})
        return self._ended[episode.id][1]

    async def close(self) -> None:
        """Ends all that are open: their replica goes."""
        for episode in self._open.values():
            episode.fail(PolicyCallError("the gateway replica of this episode was stopped"))
        if self._playing:
            await asyncio.wait({*self._playing.values()})

    async def _answered(self, episode: OpenEpisode, agent: str, body: ChatRequest) -> dict[str, Any]:
        service = self._service
        try:
            held = await service.take_again(episode.team)
        except ApiError as error:
            if error.status == 410:
                episode.fail(PolicyCallError(str(error)))
            raise
        with held:
            await self._check_open(episode)
            with service.failures_of(episode.team):
                answer = await service.in_time(episode.chat(agent, body))
        service.answered(held, episode.key, answer["usage"]["completion_tokens"], chat_figures(answer))
        return answer

    async def _check_open(self, episode: OpenEpisode) -> None:
        """ApiError 410 where it has ended, or is about to: what comes now would be neither recorded nor counted."""
        playing = self._playing.get(episode.id)
        if playing is not None and episode.is_over.is_set():
            await asyncio.wait({playing})
        if episode.id not in self._open:
            raise self._ended_as(episode.id)

    def _ended_as(self, episode_id: str) -> ApiError:
        told = self._ended[episode_id][1]
        why = told["error"] or told["stop_reason"]
        return ApiError(410, f"episode {episode_id!r} has ended: {told['status']}, {why}", code="episode_ended")

    def _has_ended(self, episode: OpenEpisode, playing: asyncio.Task[Trace]) -> None:
        del self._open[episode.id], self._playing[episode.id]
        self._service.num_episodes -= 1
        if playing.cancelled():  # with the event loop
            return
        trace = replace(playing.result(), episode_id=episode.id)
        if not trace.task.prompt:
            trace = replace(trace, task=replace(trace.task, prompt=episode.asked))
        service, posted, kept = self._service, episode.outcome, "not_kept"
        score = None if posted is None or posted.score is None else 2 * posted.score - 1
        if service.capture.wants(episode.store):
            has_turns = bool(trace.turns)
            kept = service.keep(trace, team=episode.team, key=episode.key, is_trainable=has_turns, score=score)
        service.metrics.episode(episode.team.name, episode.team.version, trace.status.value)
        self._ended[episode.id] = episode.key, _told(trace, episode, kept)
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)


def _told(trace: Trace, episode: OpenEpisode, kept: str) -> dict[str, Any]:
    """What the poster of an outcome is told; no text of the episode."""
    return {
        "id": episode.id,
        "object": "episode.outcome",
        "status": trace.status.value,
        "stop_reason": trace.stop_reason,
        "error": trace.error,
        "num_turns": len(trace.turns),
        "conversations": episode.growth,
        "capture": kept,
        "troupe": {**episode.team.about, "arm": episode.team.arm},
    }


def _may_see(key: ApiKey, owner: ApiKey) -> bool:
    return key.name == owner.name or "admin" in key.scopes

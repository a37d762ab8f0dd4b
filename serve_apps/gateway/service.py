"""service: what all requests of one gateway replica share."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request

from serve_apps.config import GatewayConfig
from serve_apps.gateway.admission import Admission
from serve_apps.gateway.api_keys import ApiKey, KeyRing, Scope
from serve_apps.gateway.capture import Capture, Kept
from serve_apps.gateway.figures import Tally
from serve_apps.gateway.metrics import GatewayMetrics
from serve_apps.gateway.peer_replicas import Alone, Siblings, Status
from serve_apps.gateway.policy_stream import PolicyStreams, ServeStreams
from serve_apps.gateway.shadowing import Nobody, Played, Player, Shadowing, ShadowJob
from serve_apps.gateway.teams import Production, ServedTeam
from serve_apps.openai_api.protocol import ApiError, ChatRequest, FeedbackRequest, RunRequest
from serve_apps.policy.client import ServeClient
from stores.served import Feedback
from stores.types import Trace

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Held:
    """A place and the team that a request is answered by, until `release`."""

    def __init__(self, service: Service, team: ServedTeam) -> None:
        self._service, self.team = service, team
        self.began = time.perf_counter()
        self._is_held = True

    @property
    def seconds(self) -> float:
        """Since the request came."""
        return time.perf_counter() - self.began

    def release(self) -> None:
        """Gives both back; once is enough."""
        if self._is_held:
            self._is_held = False
            self._service.release(self.team)

    def __enter__(self) -> ServedTeam:
        return self.team

    def __exit__(self, *_: object) -> None:
        self.release()


class Service:
    """Teams, keys, places, figures. Lives in one event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        name: str = "",
        streams: PolicyStreams | None = None,
        siblings: Siblings | None = None,
        player: Player | None = None,
        address: str = "",
    ) -> None:
        """No team is in service yet. ValueError where the keys cannot be read.

        Args:
            name: of the cluster, by which gateways on one port are told apart.
            player: of shadows; None: they are dropped.
            address: `http://HOST:PORT` at which this replica alone is reached.
        """
        self.config, self.name, self.address = config, name, address
        self.replica = secrets.token_hex(4)
        """Its name among its siblings."""
        self.siblings = siblings or Alone()
        self.num_episodes = 0
        """That are open here."""
        self.teams: Mapping[str, Production] = {}
        self.streams = streams or ServeStreams()
        self.keys = KeyRing(Path(config.keys_file) if config.keys_file else None)
        self.admission = Admission(
            max_in_flight=config.max_in_flight, max_queued=config.max_queued, queue_timeout_s=config.queue_timeout_s
        )
        self.metrics = GatewayMetrics(self.admission)
        self.capture = Capture(config.capture, count=self.metrics.captured)
        self.started_at = time.time()
        self._in_flight: Counter[tuple[str, str, int]] = Counter()
        """By team, set and version."""
        self._tallies: dict[tuple[str, int], Tally] = {}
        self._shadowing = Shadowing(player or Nobody(), max_open=config.max_shadows)
        self._clients: dict[tuple[tuple[str, str], ...], ServeClient] = {}

    def team(self, name: str) -> Production:
        """A team by name; 404 names those there are."""
        if name not in self.teams:
            raise ApiError(
                404,
                f"there is no team {name!r}; teams are {', '.join(sorted(self.teams)) or 'none: none is in service'}",
                code="team_not_found",
                param="team",
            )
        return self.teams[name]

    def caller(self, request: Request, scope: Scope, *, counts: bool = False) -> ApiKey:
        """Whose request this is, and, where it counts, one more of theirs; ApiError 401, 403 or 429."""
        key = self.keys.check(request.headers.get("authorization"), scope)
        if counts:
            self.admission.count(key)
        return key

    async def in_time(self, work: Awaitable[T]) -> T:
        """`work`, which ends within `request_timeout_s`; ApiError 504."""
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                return await work
        except TimeoutError:
            raise self.too_late from None

    @property
    def too_late(self) -> ApiError:
        """What is told who waited in vain."""
        return ApiError(504, f"not done within {self.config.request_timeout_s:g} s", code="timeout")

    async def take(self, name: str, user: str | None) -> Held:
        """A place, and the team that answers, chosen once there is one: a switch while a request waits counts for it.

        Give it back with `release`. ApiError where there is no place or no such team.
        """
        self.team(name)
        await self.admission.enter()
        try:
            team = self.team(name).choose(user)
        except BaseException:
            self.admission.leave()
            raise
        return self._held(team)

    async def take_again(self, team: ServedTeam) -> Held:
        """A place for one more call on a team that was chosen before; ApiError 410 where its set may hold another by now.

        Nothing is awaited between the look and the count, so that a set on which nothing is in flight can be loaded anew.
        """
        await self.admission.enter()
        production = self.teams.get(team.name)
        if production is not None and production.holds(team):
            return self._held(team)
        self.admission.leave()
        now = "nobody" if production is None else production.champion.fingerprint
        raise ApiError(
            410,
            f"{team.fingerprint}, on which this episode began, is not loaded any more and {now} answers: begin a new episode",
            code="team_gone",
        )

    def _held(self, team: ServedTeam) -> Held:
        self._on_the_way(team, 1)
        return Held(self, team)

    def release(self, team: ServedTeam) -> None:
        """What `take` took."""
        self._on_the_way(team, -1)
        self.admission.leave()

    def _on_the_way(self, team: ServedTeam, num: int) -> None:
        self._in_flight[team.name, team.set_name, team.version] += num

    def in_flight(self) -> list[dict[str, Any]]:
        """Requests on their way: {"team", "set_name", "team_version", "num"}."""
        return [
            {"team": name, "set_name": set_name, "team_version": version, "num": num}
            for (name, set_name, version), num in self._in_flight.items()
            if num
        ]

    def status(self) -> Status:
        """What this replica is doing and has done; no prompt, no answer, no user."""
        return {
            "replica": self.replica,
            "address": self.address,
            "pid": os.getpid(),
            "started_at": self.started_at,
            "in_flight": self.in_flight(),
            "figures": self.figures(),
            "num_in_flight": self.admission.num_in_flight,
            "num_waiting": self.admission.num_waiting,
            "num_episodes": self.num_episodes,
            "keys_fault": self.keys.fault,
        }

    def client(self, team: ServedTeam) -> ServeClient:
        """For the model calls of a team's workflow runs; they are coalesced with those of the others."""
        apps = tuple(sorted(team.apps.items()))
        if apps not in self._clients:
            self._clients[apps] = ServeClient(team.apps, self.config.call)
        return self._clients[apps]

    def answered(self, held: Held, key: ApiKey, num_tokens: int, figures: Mapping[str, float] | None) -> None:
        """Counts an answer, and what it was like; None where the caller did not stay to its end."""
        team = held.team
        self.metrics.answer(team.name, team.version, key.name, num_tokens)
        if figures is not None:
            self._tally(team).add({**figures, "seconds": held.seconds, "failure_share": 0.0})

    def keep(
        self, trace: Trace, *, team: ServedTeam, key: ApiKey, is_trainable: bool, score: float | None = None
    ) -> Kept:
        """Has an episode stored where its team's served episodes are, with what its caller thinks of it, -1 to 1."""
        stores = self.teams[team.name].config.stores if team.name in self.teams else None
        return self.capture.keep(stores, trace, team=team, key=key, is_trainable=is_trainable, score=score)

    async def judge(self, trace_id: str, feedback: FeedbackRequest, key: ApiKey) -> Feedback:
        """Stores what a caller thinks of an answer, whichever team gave it; ApiError 404 where none is kept for it."""
        uris = dict.fromkeys(p.config.stores.served for p in self.teams.values() if p.config.stores is not None)
        return await self.capture.judge(list(uris), trace_id, feedback, key)

    def failed(self, team: ServedTeam) -> None:
        """Counts a request that a team took on and did not answer."""
        self._tally(team).add({"failure_share": 1.0})

    @contextmanager
    def failures_of(self, team: ServedTeam) -> Iterator[None]:
        """Counts what ends the work inside as a failure of the team, unless it is the caller's fault; it goes on its way."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, ApiError) or error.status >= 500:
                self.failed(team)
            raise

    def shadow(
        self, held: Held, request: ChatRequest | RunRequest, *, key: ApiKey, task_id: str, is_kept: bool
    ) -> None:
        """Has the candidate answer what the champion has answered, where traffic is shadowed and nobody waits for a place."""
        production = self.teams.get(held.team.name)
        team = None if production is None else production.shadow(held.team)
        if team is None:
            return
        job = ShadowJob(
            team=team.name,
            team_version=team.version,
            set_name=team.set_name,
            request=request,
            task_id=task_id,
            is_kept=is_kept,
        )
        if self.admission.num_waiting or not self._shadowing.add(job, partial(self._shadow_ended, team, key)):
            self.metrics.shadow(team.name, team.version, "dropped")
            return
        self._on_the_way(team, 1)

    def _shadow_ended(self, team: ServedTeam, key: ApiKey, played: Played) -> None:
        self._on_the_way(team, -1)
        self.metrics.shadow(team.name, team.version, played.outcome)
        if played.outcome == "answered":
            self._tally(team).add({**played.figures, "failure_share": 0.0})
        elif played.outcome == "failed":
            self.failed(team)
        if played.trace is not None:
            self.keep(played.trace, team=team, key=key, is_trainable=played.is_trainable)

    def figures(self) -> list[dict[str, Any]]:
        """What the teams' answers were like: {"team", "team_version", "sums"}."""
        return [
            {"team": name, "team_version": version, "sums": tally.sums}
            for (name, version), tally in self._tallies.items()
        ]

    def _tally(self, team: ServedTeam) -> Tally:
        return self._tallies.setdefault((team.name, team.version), Tally())

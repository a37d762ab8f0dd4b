"""service: what all requests of one gateway replica share: teams, keys, slots, figures, capture, shadow requests."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from serve_apps.authoring.fair_lanes import CALLER
from serve_apps.config import CallConfig, GatewayPortConfig
from serve_apps.gateway.traffic.admission import Admission, InFlight, Slot
from serve_apps.gateway.traffic.callers import ApiKey, Callers, Scope, with_scope
from serve_apps.gateway.traffic.capture import Captures
from serve_apps.gateway.traffic.figures import COUNTED, Counted, Tally
from serve_apps.gateway.traffic.metrics import GatewayMetrics
from serve_apps.gateway.traffic.peer_replicas import PeerReplicas, Status
from serve_apps.gateway.traffic.shadowing import Player, Shadowing, ShadowJob, ShadowResult
from serve_apps.gateway.traffic.teams import Production, ServedTeam, team_named, team_of_model
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.protocol import ApiError, RunRequest
from serve_apps.policy.policy_stream import PolicyStreams, ServeStreams
from serve_apps.policy.serve_client import NO_REPLICA_S, ServeClient

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Service:
    """The state of one gateway replica. It lives in one event loop."""

    def __init__(
        self,
        config: GatewayPortConfig,
        *,
        name: str = "",
        streams: PolicyStreams | None = None,
        peers: PeerReplicas | None = None,
        player: Player | None = None,
        address: str = "",
    ) -> None:
        """Starts without any team.

        Args:
            name: of the cluster, by which gateways on one port are told apart. Everybody may read it.
            player: answers shadow requests; None: they are dropped.
            address: `http://HOST:PORT` at which this replica alone is reached.
        """
        self.config, self.name, self.address = config, name, address
        self.replica = secrets.token_hex(4)
        """The name of this replica among its peers."""
        self.peers = peers
        """None: it is alone."""
        self.num_episodes = 0
        """Episodes that are open on this replica."""
        self.teams: Mapping[str, Production] = {}
        self.streams = streams or ServeStreams()
        self.callers = Callers(host=config.host)
        self.admission = Admission(
            max_in_flight=config.max_in_flight, max_queued=config.max_queued, queue_timeout_s=config.queue_timeout_s
        )
        self.metrics = GatewayMetrics(self.admission)
        self.capture = Captures(count=self.metrics.count_captured)
        self.started_at = time.time()
        self._answer_times: set[asyncio.Timeout] = set()
        self._stops_at = math.inf
        """The time of the event loop by which every answer must have ended."""
        self._in_flight = InFlight()
        self._tallies: dict[tuple[str, int], dict[Counted, Tally]] = {}
        self._shadowing = Shadowing(player, max_open=config.max_shadows)
        self._clients: dict[tuple[tuple[tuple[str, str], ...], CallConfig], ServeClient] = {}

    def deploy(self, teams: Mapping[str, Production]) -> None:
        """Answers with these teams from now on; ValueError where the keys of one cannot be read, and nothing changes."""
        self.callers.admit_to({name: production.config.settings for name, production in teams.items()})
        self.capture.follow({name: production.config for name, production in teams.items()})
        self.teams = teams

    def authorize(
        self,
        request: Request,
        *scopes: Scope,
        team: str | None = None,
        model: str | None = None,
        counts: bool = False,
    ) -> tuple[Production, ApiKey]:
        """Returns the team that a request asks, and by which key it may; ApiError 401, 403, 404 or 429.

        A caller learns no more of a team that it has no key for than of one that there is not.

        Args:
            scopes: one of them is enough.
            team: its name, or else
            model: the id of one of its models.
            counts: whether the request counts towards the key's rate.
        """
        keys = self.keys_of(request, *scopes)
        reached = {name: self.teams[name] for name in keys}
        try:
            production = team_named(reached, team) if team is not None else team_of_model(reached, model or "")
        except ApiError as unknown:
            self.count_request(request, next(iter(keys.values())), counts=counts)
            if (lacks := self.callers.lacks_key(request.headers)) is None:
                raise
            raise ApiError(401, f"without an API key {unknown}; {lacks}", code=lacks.code) from None
        self.count_request(request, keys[production.name], counts=counts)
        return production, keys[production.name]

    def keys_of(self, request: Request, *scopes: Scope) -> dict[str, ApiKey]:
        """Returns the teams that a request reaches with one of the scopes, and its key for each; ApiError 401 or 403 for none."""
        return with_scope(self.callers.keys(request.headers), *scopes)

    def count_request(self, request: Request, key: ApiKey, *, counts: bool = True) -> None:
        """Counts a request towards the rate of its key, if it `counts`; ApiError 429. What it has done is that key's holder's."""
        CALLER.set(key.holder)
        if counts:
            try:
                self.admission.count_request(key)
            finally:
                request.state.rate_headers = self.admission.rate_headers(key)

    async def within_timeout(self, work: Awaitable[T]) -> T:
        """Awaits `work` for at most `request_timeout_s`; ApiError 504, or 503 where this replica stops before."""
        try:
            async with self.answer_time():
                return await work
        except TimeoutError:
            raise self.timeout_error from None

    @asynccontextmanager
    async def answer_time(self) -> AsyncIterator[None]:
        """Limits the work inside to the time that an answer may take; TimeoutError."""
        end = asyncio.get_running_loop().time() + self.config.request_timeout_s
        async with asyncio.timeout_at(min(end, self._stops_at)) as limit:
            self._answer_times.add(limit)
            try:
                yield
            finally:
                self._answer_times.discard(limit)

    def end_answers(self, *, within_s: float) -> None:
        """Gives no answer more than this time, since this replica stops: their callers are told.

        Requests that wait in the queue get their slot later, and have no more time than the others.
        """
        self._stops_at = asyncio.get_running_loop().time() + within_s
        for limit in self._answer_times:
            # One that has expired cannot be set anew, and its answer is about to end.
            if not limit.expired() and (when := limit.when()) is not None:
                limit.reschedule(min(when, self._stops_at))

    @property
    def timeout_error(self) -> ApiError:
        """The error for a request that was not answered in time."""
        if self._stops_at < math.inf:
            return ApiError(503, "this gateway replica stops: ask again", code="replica_gone", retry_after_s=2)
        return ApiError(504, f"not done within {self.config.request_timeout_s:g} s", code="timeout")

    async def take_slot(self, name: str, user: str | None, key: ApiKey) -> Slot:
        """Waits for a slot and returns it with the team that answers; ApiError where there is no slot or no such team.

        The team is chosen only once there is a slot: a switch to another team also applies to the requests in the queue.
        """
        await self._enter(key)
        production = self.teams.get(name)
        if production is not None:
            return self._slot_of(production.choose_contender(user), key)
        self.admission.leave(key.holder)
        # Without the names of other teams, which this caller may not reach.
        raise ApiError(404, f"there is no team {name!r} any more", code="team_not_found", param="team")

    async def take_slot_on(self, team: ServedTeam, key: ApiKey) -> Slot:
        """Waits for a slot for one more call of a team that was chosen before.

        ApiError 410 where its set of policy apps may have another team loaded by now. Nothing is awaited between this check
        and the count in `InFlight`, so that a set on which nothing is in flight can safely be loaded with another team.
        """
        await self._enter(key)
        production = self.teams.get(team.name)
        if production is not None and production.has_loaded(team):
            return self._slot_of(team, key)
        self.admission.leave(key.holder)
        champion = "none" if production is None else production.champion.fingerprint
        raise ApiError(
            410,
            f"{team.fingerprint}, on which this episode began, is not loaded any more (champion now: {champion}): begin a "
            "new episode",
            code="team_gone",
        )

    @property
    def share_of_a_key(self) -> float:
        """The share of places that one key may have; where there are several keys, one of them never has all."""
        return self.config.key_share if self.callers.num > 1 else 1.0

    async def _enter(self, key: ApiKey) -> None:
        await self.admission.enter(key.holder, share=self.share_of_a_key)

    def _slot_of(self, team: ServedTeam, key: ApiKey) -> Slot:
        return Slot(team, key=key.holder, admission=self.admission, in_flight=self._in_flight)

    def in_flight(self) -> list[dict[str, Any]]:
        """Returns the requests in flight as {"team", "set_name", "team_version", "num"}."""
        return self._in_flight.rows()

    def status(self) -> Status:
        """Returns what this replica is doing and has done; no prompt, no answer, no user."""
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
            "keys_faults": self.callers.refresh(),
        }

    def client(self, team: ServedTeam) -> ServeClient:
        """Returns the client for the model calls of a team's workflow runs, which coalesces the calls of all runs."""
        call = self.teams[team.name].config.settings.call if team.name in self.teams else CallConfig()
        of_team = tuple(sorted(team.apps.items())), call
        if of_team not in self._clients:
            self._clients[of_team] = ServeClient(team.apps, call, replica_timeout_s=NO_REPLICA_S)
        return self._clients[of_team]

    def count_answer(self, slot: Slot, key: ApiKey, num_tokens: int, figures: Mapping[str, float] | None) -> None:
        """Counts an answer with its figures; `figures` is None where it is not complete, or says nothing of the team."""
        team = slot.team
        self.metrics.count_answer(team.name, team.version, key.name, num_tokens, is_complete=figures is not None)
        if figures is not None:
            slot.is_counted = True
            self._tally(team).add({"failure_share": 0.0, **figures, "latency_s": slot.seconds})

    def count_left(self, slot: Slot) -> None:
        """Counts a request whose caller left before its end: by the time that it waited, where answers take less.

        So a team that hangs is slow also where nobody waits for the error; who leaves early says nothing of a team. Before a version has
        answers it is the champion's that count.
        """
        production = self.teams.get(slot.team.name)
        versions = (slot.team, *([] if production is None else [production.champion]))
        usual_s = next(filter(None, (self._tally(version).mean("latency_s") for version in versions)), math.inf)
        if not slot.is_counted and slot.seconds > usual_s:
            self._tally(slot.team).add({"latency_s": slot.seconds})

    def count_failure(self, team: ServedTeam) -> None:
        """Counts a request that a team took on and did not answer."""
        self._tally(team).add({"failure_share": 1.0})

    @contextmanager
    def counting_failures(self, team: ServedTeam) -> Iterator[None]:
        """Counts an error of the work inside as a failure of the team, unless the caller caused it; raises it again."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, ApiError) or error.status >= 500:
                self.count_failure(team)
            raise

    def send_shadow(
        self,
        slot: Slot,
        request: ChatRequest | RunRequest,
        *,
        key: ApiKey,
        figures: Mapping[str, float] | None,
        task_id: str,
        is_kept: bool,
    ) -> None:
        """Copies a request that the champion has answered to the candidate, if its team has shadow traffic.

        A shadow request never takes a slot: it is dropped while requests wait in the queue.

        Args: figures: those of the champion's answer, with which the candidate's is compared.
        """
        production = self.teams.get(slot.team.name)
        candidate = None if production is None else production.choose_shadow_team(slot.team)
        if candidate is None:
            return
        job = ShadowJob(
            team=candidate.name,
            team_version=candidate.version,
            set_name=candidate.set_name,
            request=request,
            task_id=task_id,
            is_kept=is_kept,
        )
        if self.admission.num_waiting or not self._shadowing.add(
            job, partial(self._shadow_ended, candidate, key, figures)
        ):
            self.metrics.count_shadow(candidate.name, candidate.version, "dropped")
            return
        # The candidate's set counts as busy, so that it is not loaded with another team under the shadow request.
        self._in_flight.add(candidate, 1)

    def _shadow_ended(
        self, candidate: ServedTeam, key: ApiKey, shadowed: Mapping[str, float] | None, result: ShadowResult
    ) -> None:
        self._in_flight.add(candidate, -1)
        self.metrics.count_shadow(candidate.name, candidate.version, result.outcome)
        if shadowed is not None and result.outcome in ("answered", "failed"):
            # Without `latency_s`: at low priority it says nothing about the candidate.
            own = {"failure_share": 0.0, **result.figures} if result.outcome == "answered" else {"failure_share": 1.0}
            self._tally(candidate, "copies").add(own)
            self._tally(candidate, "shadowed").add(shadowed)
        if result.trace is not None:
            self.capture.keep_trace(result.trace, team=candidate, key=key, is_trainable=result.is_trainable)

    def figures(self) -> list[dict[str, Any]]:
        """Returns the figures of the teams' answers as {"team", "team_version", "sums", "copies", "shadowed"}.

        `sums`: answers to callers. `copies`: those to copies of requests. `shadowed`: the champion's answers to these requests.
        """
        return [
            {"team": name, "team_version": version, **{of: tally.sums for of, tally in tallies.items()}}
            for (name, version), tallies in self._tallies.items()
            if any(num for tally in tallies.values() for num, *_ in tally.sums.values())
        ]

    def _tally(self, team: ServedTeam, of: Counted = "sums") -> Tally:
        return self._tallies.setdefault((team.name, team.version), {kind: Tally() for kind in COUNTED})[of]

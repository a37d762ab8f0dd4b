"""service: what all requests of one gateway replica share: teams, keys, slots, figures, capture, shadow requests."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request

from serve_apps.config import GatewayConfig
from serve_apps.gateway.admission import Admission
from serve_apps.gateway.api_keys import ApiKey, KeyRing, Scope, key_header
from serve_apps.gateway.capture import Capture, Captured
from serve_apps.gateway.figures import Tally
from serve_apps.gateway.metrics import GatewayMetrics
from serve_apps.gateway.peer_replicas import NoPeers, PeerReplicas, Status
from serve_apps.gateway.policy_stream import PolicyStreams, ServeStreams
from serve_apps.gateway.shadowing import NoPlayer, Player, Shadowing, ShadowJob, ShadowResult
from serve_apps.gateway.slots import InFlight, Slot
from serve_apps.gateway.teams import Production, ServedTeam
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.kept_responses import KeptResponses
from serve_apps.openai_api.protocol import MAX_ECHO, ApiError, FeedbackRequest, RunRequest
from serve_apps.policy.serve_client import ServeClient
from stores.served import Feedback
from stores.types import Trace

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Service:
    """The state of one gateway replica. It lives in one event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        name: str = "",
        streams: PolicyStreams | None = None,
        peers: PeerReplicas | None = None,
        player: Player | None = None,
        address: str = "",
    ) -> None:
        """Starts without any team. ValueError where the keys cannot be read.

        Args:
            name: of the cluster, by which gateways on one port are told apart. Everybody may read it.
            player: answers shadow requests; None: they are dropped.
            address: `http://HOST:PORT` at which this replica alone is reached.
        """
        self.config, self.name, self.address = config, name, address
        self.replica = secrets.token_hex(4)
        """The name of this replica among its peers."""
        self.peers = peers or NoPeers()
        self.num_episodes = 0
        """Episodes that are open on this replica."""
        self.teams: Mapping[str, Production] = {}
        self.streams = streams or ServeStreams()
        self.keys = KeyRing(Path(config.keys_file) if config.keys_file else None)
        self.admission = Admission(
            max_in_flight=config.max_in_flight, max_queued=config.max_queued, queue_timeout_s=config.queue_timeout_s
        )
        self.metrics = GatewayMetrics(self.admission)
        self.capture = Capture(config.capture, count=self.metrics.count_captured)
        self.responses = KeptResponses()
        self.started_at = time.time()
        self._in_flight = InFlight()
        self._tallies: dict[tuple[str, int], Tally] = {}
        self._shadowing = Shadowing(player or NoPlayer(), max_open=config.max_shadows)
        self._clients: dict[tuple[tuple[str, str], ...], ServeClient] = {}

    def team(self, name: str) -> Production:
        """Returns a team by its name; ApiError 404 names the teams that there are."""
        if name not in self.teams:
            raise ApiError(
                404,
                f"there is no team {name[:MAX_ECHO]!r}; teams are {', '.join(sorted(self.teams)) or 'none: no team is deployed'}",
                code="team_not_found",
                param="team",
            )
        return self.teams[name]

    def authorize(self, request: Request, *scopes: Scope, counts: bool = False) -> ApiKey:
        """Returns the API key of a request; ApiError 401, 403 or 429.

        Args:
            scopes: one of them is enough.
            counts: whether the request counts towards the key's rate.
        """
        key = self.keys.check(key_header(request.headers), *scopes)
        if counts:
            try:
                self.admission.count_request(key)
            finally:
                request.state.rate_headers = self.admission.rate_headers(key)
        return key

    async def within_timeout(self, work: Awaitable[T]) -> T:
        """Awaits `work` for at most `request_timeout_s`; ApiError 504."""
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                return await work
        except TimeoutError:
            raise self.timeout_error from None

    @property
    def timeout_error(self) -> ApiError:
        """The error for a request that was not answered in time."""
        return ApiError(504, f"not done within {self.config.request_timeout_s:g} s", code="timeout")

    async def take_slot(self, name: str, user: str | None, key: ApiKey) -> Slot:
        """Waits for a slot and returns it with the team that answers; ApiError where there is no slot or no such team.

        The team is chosen only once there is a slot: a switch to another team also applies to the requests in the queue.
        """
        self.team(name)
        await self._enter(key)
        try:
            team = self.team(name).choose_contender(user)
        except BaseException:
            self.admission.leave(key.name)
            raise
        return self._slot_of(team, key)

    async def take_slot_on(self, team: ServedTeam, key: ApiKey) -> Slot:
        """Waits for a slot for one more call of a team that was chosen before.

        ApiError 410 where its set of policy apps may have another team loaded by now. Nothing is awaited between this check
        and the count in `InFlight`, so that a set on which nothing is in flight can safely be loaded with another team.
        """
        await self._enter(key)
        production = self.teams.get(team.name)
        if production is not None and production.has_loaded(team):
            return self._slot_of(team, key)
        self.admission.leave(key.name)
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
        return self.config.key_share if self.keys.num_callers > 1 else 1.0

    async def _enter(self, key: ApiKey) -> None:
        await self.admission.enter(key.name, share=self.share_of_a_key)

    def _slot_of(self, team: ServedTeam, key: ApiKey) -> Slot:
        return Slot(team, key=key.name, admission=self.admission, in_flight=self._in_flight)

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
            "keys_fault": self.keys.fault,
        }

    def client(self, team: ServedTeam) -> ServeClient:
        """Returns the client for the model calls of a team's workflow runs, which coalesces the calls of all runs."""
        apps = tuple(sorted(team.apps.items()))
        if apps not in self._clients:
            self._clients[apps] = ServeClient(team.apps, self.config.call)
        return self._clients[apps]

    def count_answer(self, slot: Slot, key: ApiKey, num_tokens: int, figures: Mapping[str, float] | None) -> None:
        """Counts an answer with its figures; `figures` is None where the caller left before its end."""
        team = slot.team
        self.metrics.count_answer(team.name, team.version, key.name, num_tokens)
        if figures is not None:
            self._tally(team).add({"failure_share": 0.0, **figures, "latency_s": slot.seconds})

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

    def keep_trace(
        self, trace: Trace, *, team: ServedTeam, key: ApiKey, is_trainable: bool, score: float | None = None
    ) -> Captured:
        """Has an episode stored in its team's store of served episodes, with its caller's score of it, -1 to 1."""
        stores = self.teams[team.name].config.stores if team.name in self.teams else None
        return self.capture.keep_trace(stores, trace, team=team, key=key, is_trainable=is_trainable, score=score)

    async def store_feedback(self, trace_id: str, feedback: FeedbackRequest, key: ApiKey) -> Feedback:
        """Stores a caller's feedback on an answer of any team; ApiError 404 where no such answer of this caller is stored."""
        uris = dict.fromkeys(p.config.stores.served for p in self.teams.values() if p.config.stores is not None)
        return await self.capture.store_feedback(list(uris), trace_id, feedback, key)

    def send_shadow(
        self, slot: Slot, request: ChatRequest | RunRequest, *, key: ApiKey, task_id: str, is_kept: bool
    ) -> None:
        """Copies a request that the champion has answered to the candidate, if its team has shadow traffic.

        A shadow request never takes a slot: it is dropped while requests wait in the queue.
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
        if self.admission.num_waiting or not self._shadowing.add(job, partial(self._shadow_ended, candidate, key)):
            self.metrics.count_shadow(candidate.name, candidate.version, "dropped")
            return
        # The candidate's set counts as busy, so that it is not loaded with another team under the shadow request.
        self._in_flight.add(candidate, 1)

    def _shadow_ended(self, candidate: ServedTeam, key: ApiKey, result: ShadowResult) -> None:
        self._in_flight.add(candidate, -1)
        self.metrics.count_shadow(candidate.name, candidate.version, result.outcome)
        if result.outcome == "answered":  # without `latency_s`: at low priority it says nothing about the candidate
            self._tally(candidate).add({"failure_share": 0.0, **result.figures})
        elif result.outcome == "failed":
            self.count_failure(candidate)
        if result.trace is not None:
            self.keep_trace(result.trace, team=candidate, key=key, is_trainable=result.is_trainable)

    def figures(self) -> list[dict[str, Any]]:
        """Returns the figures of the teams' answers as {"team", "team_version", "sums"}."""
        return [
            {"team": name, "team_version": version, "sums": tally.sums}
            for (name, version), tally in self._tallies.items()
        ]

    def _tally(self, team: ServedTeam) -> Tally:
        return self._tallies.setdefault((team.name, team.version), Tally())

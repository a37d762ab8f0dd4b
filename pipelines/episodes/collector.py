"""collector: warm actors that play many episodes at once and store them in batches as they finish.

    collectors(n) ──handles──> hand_over (a Ray Data task) ──a share of the specs──> Collector.run ──> trace store
                                                                                         └──> a row per stored batch

They belong to the calling process and live as long as it does: Ray Data's own actor pools would start, and import
everything, anew in every pass. They are not detached, so that they never run yesterday's workflow code.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import ray

from pipelines.cluster.observe import Observer, log_failed, tell
from pipelines.config.sections import CollectConfig
from serve_apps.config import CallConfig
from serve_apps.episode.runner import run_episode
from serve_apps.episode.team import ActingTeam, TeamSpec, via
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.policy.client import CountingClient
from serve_apps.spans import begin_spans, process_spans
from stores.logs import carried
from stores.traces.store import TraceStore
from stores.types import Cause, Trace

logger = logging.getLogger(__name__)

IDLE_S = 0.5
"""Where no episode finishes for this long, those that have finished are stored."""
WRITE_EVERY_S = 1.0
"""A finished episode waits at most this long before it is stored: budgets and early stops count what is stored."""
WRITE_BATCH = 128
"""Finished episodes that are stored in one commit: fewer make more commits, more are lost where a collector ends."""
TELL_EVERY_S = 2.0
"""How often a collector in which no episode ends says what became of the model calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """Which groups may begin in a pass that may end early."""

    pass_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    begun: frozenset[str]
    """Groups of which some episodes are stored: they are completed in any case."""
    open_s: float
    """Seconds after which no other group is begun."""


class _EarlyStopState:
    """An `EarlyStop` at work in one collector."""

    def __init__(self, early_stop: EarlyStop) -> None:
        self._begun = set(early_stop.begun)
        self._closes_at = time.monotonic() + early_stop.open_s
        self.tasks: set[asyncio.Task[Trace | None]] = set()

    def lets_in(self, group_id: str) -> bool:
        """Whether an episode of this group may start."""
        if group_id not in self._begun and time.monotonic() >= self._closes_at:
            return False
        self._begun.add(group_id)
        return True

    def close(self, *, is_cut: bool) -> None:
        """Lets no other group begin; with `is_cut` those under way are cancelled as well."""
        self._closes_at = 0.0
        for task in self.tasks if is_cut else ():
            task.cancel()


_Connection = tuple[str, str]
"""Ray's session, of which each cluster has one, and its job id: the first job of each cluster has the same one."""
_warm: list[tuple[_Connection, Any]] = []
"""Collectors of this process; those of an earlier connection to Ray are gone."""


def collectors(count: int) -> list[Any]:
    """`count` warm collectors, spread over the cluster's nodes."""
    connection = _forget_earlier()
    while len(_warm) < count:
        options = {"num_cpus": 0.1, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": "SPREAD"}
        _warm.append((connection, ray.remote(Collector).options(**options).remote()))
    return [handle for _, handle in _warm[:count]]


def end_collectors() -> None:
    """Ends the collectors of this process, whatever they are doing; the next pass starts others."""
    if ray.is_initialized():
        _forget_earlier()
    else:
        _warm.clear()
    while _warm:
        ray.kill(_warm.pop()[1], no_restart=True)


def _forget_earlier() -> _Connection:
    """Forgets collectors of earlier connections, since Ray aborts a process that sends such a handle on; returns this one."""
    context = ray.get_runtime_context()
    connection = (context.get_session_name(), context.get_job_id())
    _warm[:] = [one for one in _warm if one[0] == connection]
    return connection


def hand_over(
    batch: dict[str, np.ndarray], workers: Sequence[Any], work: Mapping[str, Any]
) -> Iterator[dict[str, np.ndarray]]:
    """Gives each share of the specs to its collector and passes on what comes back; a Ray Data task."""
    for place, specs in zip(batch["place"], batch["specs"], strict=True):
        run = workers[int(place)].run.options(num_returns="streaming")
        for ref in run.remote(pickle.loads(specs), place=str(place), **work):
            yield ray.get(ref)


PULSE = {name: np.array(["{}"]) for name in ("groups", "statuses", "causes", "calls")} | {
    name: np.zeros(1, kind)
    for name, kind in (("num", int), ("num_tokens", int), ("started_at", float), ("ended_at", float))
}
"""A row of no episode. Ray Data holds each row back until the next one comes: without it the caller would learn too late
that the group which the pass was waiting for is complete."""


class Collector:
    """An actor that runs many episodes at once and stores them in batches as they finish."""

    def __init__(self) -> None:
        import lancedb  # noqa: F401
        import pyarrow  # noqa: F401 - imported now, so that the first episode does not wait for it
        from ray import serve  # noqa: F401
        from transformers import PreTrainedTokenizerFast  # noqa: F401

        self._stop_states: dict[str, _EarlyStopState] = {}

    async def run(
        self,
        specs: Sequence[EpisodeSpec],
        *,
        team_spec: TeamSpec,
        apps: Mapping[str, str],
        capacity: Mapping[str, int],
        store: TraceStore,
        config: CollectConfig,
        place: str,
        log: Mapping[str, Any],
        replaced: Sequence[Cause] = (),
        early_stop: EarlyStop | None = None,
    ) -> AsyncIterator[dict[str, np.ndarray]]:
        """Yields the summary of every batch of episodes once it is stored.

        A restarted collector is handed the same specs again and skips what is stored. Args: capacity: by application, the
        model calls that may be under way at once, for all collectors together.
        """
        await asyncio.to_thread(begin_spans, config.telemetry, service="troupe-episodes")
        shares = {app: share_of(total, int(place), config.num_workers) for app, total in capacity.items()}
        client = self.client(apps, config.call, shares)
        told, told_at = client.counts, time.monotonic()
        stop_state = _EarlyStopState(early_stop) if early_stop else None
        if early_stop and stop_state:  # before anything is awaited: a call of `stop` may come from now on
            self._stop_states = {early_stop.pass_id: stop_state}
        missing = await asyncio.to_thread(_missing, specs, store, replaced)
        left = _start(missing, team_spec, client, stop_state, in_flight=config.episodes_in_flight)
        if stop_state:
            stop_state.tasks = set(left)
        finished: list[Trace] = []
        oldest = 0.0  # when the first of them finished
        while left:
            done, left = await asyncio.wait(left, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
            oldest = oldest if finished else time.monotonic()
            finished += [trace for task in done if not task.cancelled() and (trace := task.result()) is not None]
            is_due = not done or time.monotonic() >= oldest + WRITE_EVERY_S
            if finished and (len(finished) >= WRITE_BATCH or not left or is_due):
                await asyncio.to_thread(store.write_episodes, finished, replaced=replaced)
                with carried(log):
                    log_failed(finished, is_last=not left)
                num_in_flight = min(len(left), config.episodes_in_flight)
                tell(Observer.episodes, finished, num_in_flight=num_in_flight, collector=place)
                summary, finished = _summary(finished), []
            elif not done and (stop_state or time.monotonic() > told_at + TELL_EVERY_S):
                summary = PULSE
            else:
                continue
            before, told, told_at = told, client.counts, time.monotonic()
            yield {**summary, "calls": np.array([json.dumps(asdict(told - before))])}
        await asyncio.to_thread(process_spans().flush)

    async def stop(self, pass_id: str, *, is_cut: bool) -> None:
        """Begins no group of a pass any more; `is_cut`: also drops those under way, but for what has finished."""
        if pass_id in self._stop_states:
            self._stop_states[pass_id].close(is_cut=is_cut)

    def client(self, apps: Mapping[str, str], call: CallConfig, capacity: Mapping[str, int]) -> CountingClient:
        """The client that answers the model calls."""
        from serve_apps.policy.serve_client import ServeClient

        return ServeClient(dict(apps), call, capacity=capacity)


def _start(
    specs: Sequence[EpisodeSpec],
    team_spec: TeamSpec,
    client: CountingClient,
    stop_state: _EarlyStopState | None,
    *,
    in_flight: int,
) -> set[asyncio.Task[Trace | None]]:
    """Starts to play the episodes, `in_flight` at once, in their order; the result of one that is not let in is None."""
    team: ActingTeam = team_spec.build()
    for line in team.workflow.preflight():
        logger.info("%s", line)
    complete, slots = via(client), asyncio.Semaphore(in_flight)

    async def play(spec: EpisodeSpec) -> Trace | None:
        async with slots:
            if stop_state and not stop_state.lets_in(spec.group_id):
                return None
            return await run_episode(spec, team=team, complete=complete, limits=team_spec.limits)

    return {asyncio.create_task(play(spec)) for spec in specs}


def share_of(total: int, place: int, num_places: int) -> int:
    """The part of `total` calls at once that the collector at a place, counted from 0, may have: at least one."""
    return max(1, total // num_places + (place < total % num_places))  # the first places take what is left over


def _missing(specs: Sequence[EpisodeSpec], store: TraceStore, replaced: Sequence[Cause]) -> list[EpisodeSpec]:
    if not len(specs):
        return []
    first = specs[0]
    stored = store.stored_ids(
        run_id=first.run_id,
        iteration=first.iteration,
        purpose=first.purpose,
        team_key=first.team_key,
        but_not=replaced,
    )
    return [spec for spec in specs if spec.episode_id not in stored]


def _summary(traces: Sequence[Trace]) -> dict[str, np.ndarray]:
    """One row: Ray Data would cut more into blocks of a row each, and 400 of those cost 0.1 s."""
    statuses = Counter(t.status.value for t in traces)
    return {
        "num": np.array([len(traces)]),
        "statuses": np.array([json.dumps(statuses)]),
        "causes": np.array([json.dumps(Counter(str(t.cause) or "sound" for t in traces))]),
        "groups": np.array([json.dumps(Counter(t.group_id for t in traces))]),
        "num_tokens": np.array([sum(len(u.completion_token_ids) for t in traces for u in t.turns)]),
        "started_at": np.array([min(t.started_at for t in traces)]),
        "ended_at": np.array([max(t.started_at + t.duration_s for t in traces)]),
    }

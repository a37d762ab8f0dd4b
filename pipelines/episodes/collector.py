"""collector: warm actors that play many episodes at once, and one that stores them; `operators` calls them.

    rows of groups ──play──> Collector.run ──blocks of finished episodes──> StoreBlocks ──> Writer ──> trace store
                                 ^                                              │
                                 └───────── stored: there is room for others ───┴──> counts, to the caller

A collector holds at most `episodes_in_flight` + `MAX_UNSTORED` episodes that are not stored, whatever the store takes for a commit.
The actors belong to the calling process and live as long as it does: Ray Data's own actor pools would start, and import
everything, anew in every pass. They are not detached, so that they never run yesterday's workflow code.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import pickle
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipelines.cluster.observe import Observer, log_failed, tell
from pipelines.config.sections import CollectConfig
from serve_apps.config import CallConfig
from serve_apps.episode.runner import run_episode
from serve_apps.episode.team import ActingTeam, TeamSpec, via
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.policy.client import CountingClient
from serve_apps.spans import begin_spans, process_spans
from stores.logs import carried
from stores.traces.rows import episode_table
from stores.traces.store import TraceStore
from stores.types import Cause, Trace

logger = logging.getLogger(__name__)

IDLE_S = 0.5
"""Where no episode finishes for this long, those that have finished are handed over."""
WRITE_EVERY_S = 1.0
"""A finished episode waits at most this long while nothing else is being stored: budgets and early stops count what is stored."""
WRITE_BATCH = 128
"""Finished episodes that are stored in one commit: fewer make more commits, more are lost where a collector ends."""
MAX_UNSTORED = 2 * WRITE_BATCH
"""Finished episodes of a collector that may wait for the store: one batch that is written, and one that is filled."""
TELL_EVERY_S = 2.0
"""How often a collector in which no episode ends says what became of the model calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop:
    """Which groups may begin in a pass."""

    begun: frozenset[str] = frozenset()
    """Groups of which some episodes are stored: they are completed in any case."""
    open_s: float = float("inf")
    """Seconds after which no other group is begun."""


class _Pass:
    """A pass at work in one collector: what may begin, and what has finished and is not stored."""

    def __init__(self, early_stop: EarlyStop, *, in_flight: int, log: Mapping[str, Any], place: int) -> None:
        self._begun = set(early_stop.begun)
        self._closes_at = time.monotonic() + early_stop.open_s
        self._log, self._place, self._in_flight = log, place, in_flight
        self.left: set[asyncio.Task[Trace | None]] = set()
        """Episodes that have not ended."""
        self.slots = asyncio.Semaphore(in_flight)
        self.rooms = asyncio.Semaphore(in_flight + MAX_UNSTORED)
        """Held by an episode from its beginning until it is stored."""
        self._handed: dict[str, Sequence[Trace]] = {}
        self.all_stored = asyncio.Event()
        self.all_stored.set()

    def lets_in(self, group_id: str) -> bool:
        """Whether an episode of this group may start."""
        if group_id not in self._begun and time.monotonic() >= self._closes_at:
            return False
        self._begun.add(group_id)
        return True

    def close(self, *, is_cut: bool) -> None:
        """Lets no other group begin; with `is_cut` those under way are cancelled as well."""
        self._closes_at = 0.0
        for task in self.left if is_cut else ():
            task.cancel()

    def hand_over(self, finished: Sequence[Trace]) -> str:
        """Notes that these are on their way to the store, and returns the name of their block."""
        name = uuid.uuid4().hex
        self._handed[name] = finished
        self.all_stored.clear()
        return name

    def stored(self, block: str) -> None:
        """Notes that a block is stored; one of a collector that this one replaces is not known, and nothing is noted."""
        traces = self._handed.pop(block, ())
        for _ in traces:
            self.rooms.release()
        if traces:
            with carried(self._log):
                log_failed(traces, is_last=not self.left)
            num_in_flight = min(len(self.left), self._in_flight)
            tell(Observer.episodes, traces, num_in_flight=num_in_flight, collector=str(self._place))
        if not self._handed:
            self.all_stored.set()


_Connection = tuple[str, str]
"""Ray's session, of which each cluster has one, and its job id: the first job of each cluster has the same one."""
_warm: dict[type, list[tuple[_Connection, Any]]] = {}
"""Actors of this process by their class; those of an earlier connection to Ray are gone."""


def collectors(count: int) -> list[Any]:
    """`count` warm collectors, spread over the cluster's nodes."""
    # Its tasks are not retried: of a generator that begins again, Ray drops as many items as it has passed on already. The operator asks again.
    return _warm_actors(Collector, count, max_task_retries=0)


def writer() -> Any:
    """The warm writer; it may write a block twice, since the store takes each episode once."""
    return _warm_actors(Writer, 1, max_task_retries=-1, **beside_the_driver())[0]


def beside_the_driver() -> dict[str, Any]:
    """Options of what carries episodes: on the caller's node, so that another one takes none but collectors with it when it dies.

    It waits more than it works, and a head often has no CPUs to give.
    """
    node = ray.get_runtime_context().get_node_id()
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}


def end_collectors() -> None:
    """Ends the collectors and the writer of this process, whatever they are doing; the next pass starts others."""
    if ray.is_initialized():
        _forget_earlier()
        for _, handle in itertools.chain(*_warm.values()):
            ray.kill(handle, no_restart=True)
    _warm.clear()


def _warm_actors(kind: type, count: int, **more: Any) -> list[Any]:
    connection, found = _forget_earlier(), _warm.setdefault(kind, [])
    while len(found) < count:
        options = {"num_cpus": 0.1, "max_restarts": -1, "scheduling_strategy": "SPREAD"} | more
        found.append((connection, ray.remote(kind).options(**options).remote()))
    return [handle for _, handle in found[:count]]


def _forget_earlier() -> _Connection:
    """Forgets actors of earlier connections, since Ray aborts a process that sends such a handle on; returns this one."""
    context = ray.get_runtime_context()
    connection = (context.get_session_name(), context.get_job_id())
    for found in _warm.values():
        found[:] = [one for one in found if one[0] == connection]
    return connection


class Writer:
    """An actor that stores episodes: one per driver, since concurrent commits to a table make each other wait."""

    def __init__(self) -> None:
        import lancedb  # noqa: F401 - imported now, so that the first block does not wait for it

        self._opened: tuple[bytes, TraceStore, Sequence[Cause]] | None = None

    def write(self, episodes: pa.ListArray, target: bytes) -> None:
        """Merges the episodes into a store by their ids. Args: target: the pickled store, and causes of failures that are replaced."""
        if self._opened is None or self._opened[0] != target:
            self._opened = (target, *pickle.loads(target))
        _, store, replaced = self._opened
        store.write_rows(pa.Table.from_struct_array(episodes.flatten()), replaced=replaced)


class Collector:
    """An actor that plays many episodes at once and hands them over in blocks as they finish."""

    def __init__(self) -> None:
        from ray import serve  # noqa: F401
        from transformers import PreTrainedTokenizerFast  # noqa: F401 - imported now, so that the first episode does not wait

        self._passes: dict[str, _Pass] = {}

    async def play(self, groups: Sequence[bytes], *, place: int, work: bytes) -> AsyncIterator[pa.Table]:
        """Does what `run` does. Args: groups: pickled specs of each; work: the pickled other arguments."""
        specs = [spec for group in groups for spec in pickle.loads(group)]
        async for block in self.run(specs, place=place, **pickle.loads(work)):
            yield block

    async def run(
        self,
        specs: Sequence[EpisodeSpec],
        *,
        pass_id: str,
        team_spec: TeamSpec,
        apps: Mapping[str, str],
        capacity: Mapping[str, int],
        store: TraceStore,
        config: CollectConfig,
        place: int,
        log: Mapping[str, Any],
        replaced: Sequence[Cause] = (),
        early_stop: EarlyStop,
    ) -> AsyncIterator[pa.Table]:
        """Yields a block of finished episodes at a time: one row, since Ray Data would pass on each of several by itself.

        What is stored already is not played. It ends when the last block is stored (see `stored`). A block has the columns
        {place, name, episodes: list of rows of the `episodes` table, num, groups, calls, num_tokens}. Args: place: the collector's, counted from 0. capacity: by application, the model calls that may
        be under way at once, for all collectors together.
        """
        await self.forget(pass_id)  # where a task of Ray Data that asks for it was lost and begins again
        playing = _Pass(early_stop, in_flight=config.episodes_in_flight, log=log, place=place)
        self._passes[pass_id] = playing  # before anything is waited for: a call of `stop` may come from now on
        await asyncio.to_thread(begin_spans, config.telemetry, service="troupe-episodes")
        shares = {app: share_of(total, place, config.num_workers) for app, total in capacity.items()}
        client = self.client(apps, config.call, shares)
        told, told_at = client.counts, time.monotonic()
        playing.left = _start(await asyncio.to_thread(_missing, specs, store, replaced), team_spec, client, playing)
        finished: list[Trace] = []
        oldest = 0.0  # when the first of them finished
        while playing.left:
            done, playing.left = await asyncio.wait(playing.left, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
            if self._passes.get(pass_id) is not playing:  # forgotten
                return
            oldest = oldest if finished else time.monotonic()
            finished += [trace for task in done if not task.cancelled() and (trace := task.result()) is not None]
            is_due = playing.all_stored.is_set() and (not done or time.monotonic() >= oldest + WRITE_EVERY_S)
            if finished and (len(finished) >= WRITE_BATCH or not playing.left or is_due):
                name, traces, finished = playing.hand_over(finished), finished, []
            elif not done and time.monotonic() > told_at + TELL_EVERY_S:
                name, traces = "", []
            else:
                continue
            before, told, told_at = told, client.counts, time.monotonic()
            calls = json.dumps(asdict(told - before))
            yield pa.table({"place": [place], "name": [name], "calls": [calls]} | _carried(traces))
        await playing.all_stored.wait()
        if self._passes.get(pass_id) is playing:
            del self._passes[pass_id]
        await asyncio.to_thread(process_spans().flush)

    async def stored(self, pass_id: str, block: str) -> None:
        """Notes that a block that `run` yielded is in the store."""
        if pass_id in self._passes:
            self._passes[pass_id].stored(block)

    async def stop(self, pass_id: str, *, is_cut: bool) -> None:
        """Begins no group of a pass any more; `is_cut`: also drops those under way, but for what has finished."""
        if pass_id in self._passes:
            self._passes[pass_id].close(is_cut=is_cut)

    async def forget(self, pass_id: str) -> None:
        """Drops what is under way or waits to be stored of a pass whose caller has left it."""
        if playing := self._passes.pop(pass_id, None):
            playing.close(is_cut=True)
            playing.all_stored.set()

    def client(self, apps: Mapping[str, str], call: CallConfig, capacity: Mapping[str, int]) -> CountingClient:
        """The client that answers the model calls."""
        from serve_apps.policy.serve_client import ServeClient

        return ServeClient(dict(apps), call, capacity=capacity)


def _start(
    specs: Sequence[EpisodeSpec], team_spec: TeamSpec, client: CountingClient, playing: _Pass
) -> set[asyncio.Task[Trace | None]]:
    """Starts to play the episodes in their order; the result of one that is not let in is None."""
    team: ActingTeam = team_spec.build()
    for line in team.workflow.preflight():
        logger.info("%s", line)
    complete = via(client)

    async def play_one(spec: EpisodeSpec) -> Trace | None:
        async with playing.slots:
            await playing.rooms.acquire()
            trace = None
            try:
                if playing.lets_in(spec.group_id):
                    trace = await run_episode(spec, team=team, complete=complete, limits=team_spec.limits)
            finally:
                if trace is None:
                    playing.rooms.release()
            return trace

    return {asyncio.create_task(play_one(spec)) for spec in specs}


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


def _carried(traces: Sequence[Trace]) -> dict[str, Any]:
    """The columns of a block that say what it holds, one row each."""
    rows = episode_table(traces).to_struct_array().combine_chunks()
    return {
        "episodes": pa.ListArray.from_arrays([0, len(traces)], rows),
        "num": [len(traces)],
        "groups": [json.dumps(Counter(t.group_id for t in traces))],
        "num_tokens": [sum(len(u.completion_token_ids) for t in traces for u in t.turns)],
    }

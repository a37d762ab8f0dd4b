"""sampling: tasks, a cast, a purpose -> episodes in the trace store. What collect and evaluate share.

    specs ── Ray Data ──> Collector (warm actor, one event loop, many episodes at once) ──> policy apps
                              │ finished episodes, in batches
                              └──> trace store (exactly once) ──> counts back to the caller

Collectors are actors of the calling process and live as long as it does: Ray Data's own actor pools would start, and
import everything, anew in every pass. They are not detached, so that they never run yesterday's workflow code.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.config import CollectConfig
from pipelines.observe import episode_points, log_failed
from pipelines.run import Cast
from serve_apps.client import PolicyClient
from serve_apps.config import CallConfig
from serve_apps.runner import ActingTeam, EpisodeSpec, run_episode, via
from stores.logs import carried, carry
from stores.metrics import send
from stores.traces import TraceStore
from stores.types import EpisodeStatus, Purpose, Task, Trace, TracesRef

FAILED = (EpisodeStatus.AGENT_ERROR, EpisodeStatus.TOOL_ERROR, EpisodeStatus.TIMEOUT, EpisodeStatus.INFRA_ERROR)
WRITE_EVERY_S = 0.5
"""A finished episode waits at most this long for company before it is stored, if nothing else finishes."""

Progress = Callable[[int, int, str], None]
"""Called with episodes done, episodes in all, and a word on what is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What a sampling pass produced."""

    traces: TracesRef
    num_new: int
    num_kept: int
    """Episodes that were there from an earlier, interrupted pass."""
    statuses: Mapping[str, int]
    num_tokens: int
    """Completion tokens of the new episodes."""
    sampling_seconds: float
    """From the first episode's start to the last one's end, on the workers' clock."""
    seconds: float


class TooManyFailures(RuntimeError):
    """The share of failed episodes is above the limit; what was collected is kept."""


def sample_episodes(
    tasks: Sequence[Task],
    *,
    run_id: str,
    iteration: int,
    purpose: Purpose,
    cast: Cast,
    apps: Mapping[str, str],
    store: TraceStore,
    config: CollectConfig,
    episodes_per_task: int,
    seed: int,
    progress: Progress | None = None,
) -> Sampled:
    """Runs the episodes that are not stored yet and pins them all.

    Args:
        tasks: each gives `episodes_per_task` episodes, one GRPO group.
        apps: Serve application of every model group.

    Raises:
        TooManyFailures: more than `config.max_failed_share` of the episodes failed.
        TimeoutError: `config.stage_timeout_s` passed; finished episodes are kept.
    """
    began = time.perf_counter()
    where: dict[str, Any] = {"run_id": run_id, "iteration": iteration, "purpose": purpose, "team_key": cast.team_key}
    stored = store.stored_ids(**where)
    specs = [
        EpisodeSpec(**where, task=task, episode_index=index, run_seed=seed)
        for task in tasks
        for index in range(episodes_per_task)
    ]
    todo = [spec for spec in specs if spec.episode_id not in stored]
    statuses: dict[str, int] = {}
    num_new, num_tokens, first, last = 0, 0, np.inf, 0.0
    if todo:
        for row in _run(todo, cast=cast, apps=apps, store=store, config=config):
            num_new += int(row["num"])
            num_tokens += int(row["num_tokens"])
            first, last = min(first, row["started_at"]), max(last, row["ended_at"])
            for status, count in json.loads(row["statuses"]).items():
                statuses[status] = statuses.get(status, 0) + count
            if progress:
                progress(len(specs) - len(todo) + num_new, len(specs), "")
            if time.perf_counter() - began > config.stage_timeout_s:
                raise TimeoutError(
                    f"collect: {num_new} of {len(todo)} episodes after {config.stage_timeout_s:g} s; they are kept, "
                    "run the same command again to go on"
                )
    ref = store.pin_episodes(**where)
    _check_failures(ref, store=store, config=config)
    return Sampled(
        traces=ref,
        num_new=num_new,
        num_kept=len(specs) - len(todo),
        statuses=statuses,
        num_tokens=num_tokens,
        sampling_seconds=max(0.0, last - first) if num_new else 0.0,
        seconds=time.perf_counter() - began,
    )


def _check_failures(ref: TracesRef, *, store: TraceStore, config: CollectConfig) -> None:
    counts: dict[str, int] = {}
    errors: list[str] = []
    for batch in store.read_batches(ref, columns=["status", "error"]):
        for status, error in zip(batch["status"].to_pylist(), batch["error"].to_pylist(), strict=True):
            counts[status] = counts.get(status, 0) + 1
            if status in FAILED and len(errors) < 3 and error not in errors:
                errors.append(error)
    failed = sum(counts.get(status, 0) for status in FAILED)
    if ref.num_episodes and failed / ref.num_episodes > config.max_failed_share:
        raise TooManyFailures(
            f"{failed} of {ref.num_episodes} episodes failed ({counts}), more than collect.max_failed_share = "
            f"{config.max_failed_share:g}; first errors: {' | '.join(errors)}"
        )


def _run(
    specs: Sequence[EpisodeSpec],
    *,
    cast: Cast,
    apps: Mapping[str, str],
    store: TraceStore,
    config: CollectConfig,
) -> Iterator[dict[str, Any]]:
    """Rows {num, statuses, num_tokens, started_at, ended_at}, one per batch of episodes, as they are written."""
    import ray
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = 1  # hand on every batch at once: it is news for the person who waits
    work = {"cast": cast, "apps": dict(apps), "store": store, "call": config.call}
    work |= {"in_flight": config.episodes_in_flight, "write_batch": config.write_batch, "log": carry()}
    collectors = _collectors(config.num_workers)
    shares = [{"place": i, "specs": pickle.dumps(list(specs[i :: len(collectors)]))} for i in range(len(collectors))]
    data = ray.data.from_items(shares, override_num_blocks=len(shares))
    rows = data.map_batches(
        _hand_over,  # type: ignore[arg-type]
        fn_kwargs={"collectors": collectors, "work": work},
        batch_size=None,
        num_cpus=0.01,
    )
    return iter(rows.iter_rows())


_warm: list[Any] = []
"""Collectors of this process."""


def _collectors(count: int) -> list[Any]:
    """`count` warm collectors, spread over the cluster's nodes."""
    import ray

    cluster = ray.get_runtime_context().get_job_id()
    if _warm and _warm[0][0] != cluster:
        _warm.clear()
    while len(_warm) < count:
        options = {"num_cpus": 0.1, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": "SPREAD"}
        _warm.append((cluster, ray.remote(Collector).options(**options).remote()))
    return [handle for _, handle in _warm[:count]]


def warm_up(count: int) -> None:
    """Starts the collectors without waiting for them."""
    _collectors(count)


def _hand_over(
    batch: dict[str, np.ndarray], collectors: Sequence[Any], work: Mapping[str, Any]
) -> Iterator[dict[str, np.ndarray]]:
    """A Ray Data task: gives each share of the specs to its collector and passes on what comes back."""
    import ray

    for place, specs in zip(batch["place"], batch["specs"], strict=True):
        run = collectors[int(place)].run.options(num_returns="streaming")
        for ref in run.remote(pickle.loads(specs), place=str(place), **work):
            yield ray.get(ref)


class Collector:
    """An actor that runs many episodes at once and stores them in batches as they finish."""

    def __init__(self) -> None:
        import lancedb  # noqa: F401
        import pyarrow  # noqa: F401 - while nobody waits
        from ray import serve  # noqa: F401
        from transformers import PreTrainedTokenizerFast  # noqa: F401

    async def run(
        self,
        specs: Sequence[EpisodeSpec],
        *,
        cast: Cast,
        apps: Mapping[str, str],
        store: TraceStore,
        call: CallConfig,
        in_flight: int,
        write_batch: int,
        place: str,
        log: Mapping[str, Any],
    ) -> AsyncIterator[dict[str, np.ndarray]]:
        """Yields the summary of every batch of episodes once it is stored.

        A restarted collector is handed the same specs again and skips what is stored.
        """
        team: ActingTeam = cast.build()
        complete = via(self.client(apps, call))
        room = asyncio.Semaphore(in_flight)

        async def one(spec: EpisodeSpec) -> Trace:
            async with room:
                return await run_episode(spec, team=team, complete=complete, limits=cast.limits)

        left = {asyncio.create_task(one(spec)) for spec in await asyncio.to_thread(_missing, specs, store)}
        finished: list[Trace] = []
        while left:
            done, left = await asyncio.wait(left, timeout=WRITE_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            finished += [task.result() for task in done]
            if finished and (len(finished) >= write_batch or not left or not done):
                await asyncio.to_thread(store.write_episodes, finished)
                with carried(log):
                    log_failed(finished)
                send(episode_points(finished, num_in_flight=min(len(left), in_flight), collector=place))
                yield _summary(finished)
                finished = []

    def client(self, apps: Mapping[str, str], call: CallConfig) -> PolicyClient:
        """What answers the model calls."""
        from serve_apps.client import ServeClient

        return ServeClient(dict(apps), call)


def _missing(specs: Sequence[EpisodeSpec], store: TraceStore) -> list[EpisodeSpec]:
    if not len(specs):
        return []
    first = specs[0]
    stored = store.stored_ids(
        run_id=first.run_id, iteration=first.iteration, purpose=first.purpose, team_key=first.team_key
    )
    return [spec for spec in specs if spec.episode_id not in stored]


def _summary(traces: Sequence[Trace]) -> dict[str, np.ndarray]:
    """One row: Ray Data would cut more into blocks of a row each, and 400 of those cost 0.1 s."""
    statuses = Counter(t.status.value for t in traces)
    return {
        "num": np.array([len(traces)]),
        "statuses": np.array([json.dumps(statuses)]),
        "num_tokens": np.array([sum(len(u.completion_token_ids) for t in traces for u in t.turns)]),
        "started_at": np.array([min(t.started_at for t in traces)]),
        "ended_at": np.array([max(t.started_at + t.duration_s for t in traces)]),
    }

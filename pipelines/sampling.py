"""sampling: tasks, a cast, a purpose -> episodes in the trace store. What collect and evaluate share.

specs ── Ray Data ──> EpisodeWorker (actor, one event loop, many episodes at once) ──> policy apps
                            │ finished episodes, in batches
                            └──> trace store (exactly once) ──> counts back to the caller
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.config import CollectConfig
from pipelines.run import Cast
from serve_apps.config import CallConfig
from serve_apps.runner import ActingTeam, EpisodeSpec, run_episode, via
from stores.traces import TraceStore
from stores.types import EpisodeStatus, Purpose, Task, Trace, TracesRef

FAILED = (EpisodeStatus.AGENT_ERROR, EpisodeStatus.TOOL_ERROR, EpisodeStatus.TIMEOUT, EpisodeStatus.INFRA_ERROR)
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
    where = {"run_id": run_id, "iteration": iteration, "purpose": purpose, "team_key": cast.team_key}
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
            num_new += 1
            num_tokens += int(row["num_tokens"])
            first, last = min(first, row["started_at"]), max(last, row["ended_at"])
            statuses[row["status"]] = statuses.get(row["status"], 0) + 1
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
) -> Any:
    """Rows {status, num_tokens, started_at, ended_at}, one per episode, as they are written."""
    import ray

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    num_blocks = max(1, min(len(specs), -(-len(specs) // 64)))
    data = ray.data.from_items([{"spec": spec} for spec in specs], override_num_blocks=num_blocks)
    calls = -(-config.episodes_in_flight // 64)
    rows = data.map_batches(
        EpisodeWorker,
        fn_constructor_kwargs={
            "cast": cast,
            "apps": dict(apps),
            "store": store,
            "call": config.call,
            "in_flight": config.episodes_in_flight,
        },
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(
            size=config.num_workers, max_tasks_in_flight_per_actor=calls * 2, max_concurrent_calls_per_actor=calls
        ),
        num_cpus=0.1,
    )
    return rows.iter_rows()


class EpisodeWorker:
    """A Ray Data actor: runs episodes of several batches at once on one event loop and stores each batch."""

    def __init__(
        self, cast: Cast, apps: Mapping[str, str], store: TraceStore, call: CallConfig, in_flight: int
    ) -> None:
        from serve_apps.client import ServeClient

        self._team: ActingTeam = cast.build()
        self._limits = cast.limits
        self._complete = via(ServeClient(dict(apps), call))
        self._store = store
        self._room = asyncio.Semaphore(in_flight)

    async def __call__(self, batch: dict[str, np.ndarray]) -> AsyncIterator[dict[str, np.ndarray]]:
        """Episode specs in, one row per stored episode out."""
        traces = await asyncio.gather(*(self._one(spec) for spec in batch["spec"]))
        await asyncio.to_thread(self._store.write_episodes, traces)
        yield _summary(traces)

    async def _one(self, spec: EpisodeSpec) -> Trace:
        async with self._room:
            return await run_episode(spec, team=self._team, complete=self._complete, limits=self._limits)


def _summary(traces: Sequence[Trace]) -> dict[str, np.ndarray]:
    return {
        "status": np.array([t.status.value for t in traces]),
        "num_tokens": np.array([sum(len(u.completion_token_ids) for u in t.turns) for t in traces]),
        "started_at": np.array([t.started_at for t in traces]),
        "ended_at": np.array([t.started_at + t.duration_s for t in traces]),
    }

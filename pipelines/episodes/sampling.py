"""sampling: tasks, a team spec, a purpose -> episodes in the trace store; for collect and evaluate.

    groups ── play ──> Collector (warm actor, one event loop, many episodes at once) ──> policy apps
                           │ finished episodes, in blocks
                           └── StoreBlocks ──> trace store (exactly once) ──> counts back to the caller

`play` and `StoreBlocks` are operators of one Ray Data pipeline; the design page says what each bounds.

A pass that was interrupted goes on: what is stored is kept. What the policy caused to fail is an outcome and never played
again; where too many other episodes failed, a repetition plays these again.
"""

from __future__ import annotations

import json
import logging
import pickle
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray.data
from ray.exceptions import NodeDiedError, ObjectLostError, WorkerCrashedError
from ray.util.annotations import RayDeprecationWarning

from pipelines.cluster.faults import InfrastructureLost
from pipelines.config.sections import CollectConfig
from pipelines.episodes.collector import EarlyStop, beside_the_driver, collectors, writer
from pipelines.episodes.groups import Groups, Pace, StoppedBy, repeats_in_words
from pipelines.episodes.operators import StoreBlocks, play
from pipelines.run.run import Run
from pipelines.run.scoring import Ending, failures_alike, without_ids
from pipelines.run.serving import app_names, capacities
from serve_apps.episode.runner import CONTEXT_EXHAUSTED
from serve_apps.episode.team import TeamSpec
from serve_apps.episode_spec import EpisodeSpec
from serve_apps.policy.client import CallCounts
from stores.journal.waiting import waiting
from stores.logs import carry
from stores.traces.store import TraceStore
from stores.types import Cause, Purpose, Task, TracesRef

logger = logging.getLogger(__name__)

MISSING = (Cause.INFRASTRUCTURE, Cause.AUTHOR)
"""The causes of episodes that failed and are no outcome of the policy."""

WHOLE: Mapping[str, Any] = {"batch_size": None, "batch_format": "pyarrow"}
"""How an operator is given a block: as it is."""

Progress = Callable[[int, int, str], None]
"""Called with the number of episodes done, the number of all, and how fast it goes in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What a sampling pass produced."""

    traces: TracesRef
    num_new: int
    num_kept: int
    """Episodes that were there from an earlier, interrupted pass."""
    statuses: Mapping[str, int]
    causes: Mapping[str, int] = field(default_factory=dict)
    """Number of new episodes by the cause of their failure, `sound` for none."""
    num_tokens: int
    """Completion tokens of the new episodes."""
    sampling_seconds: float
    """From the first episode's start to the last one's end, on the workers' clock."""
    seconds: float
    groups: Sequence[str]
    """Ids of the complete ones, which are those that are pinned."""
    stopped_by: StoppedBy | None
    """Why the pass ended before all its groups were complete; None where they are."""
    tasks_left: Sequence[str]
    """Tasks of the groups that are not pinned, in order."""
    calls: CallCounts = field(default_factory=CallCounts)
    """What became of the model calls."""

    def repinned(self, traces: TracesRef) -> Sampled:
        """The pass with another ref, nothing of which is counted again."""
        return replace(self, traces=traces, num_new=0, statuses={}, causes={}, num_tokens=0, sampling_seconds=0.0)


class TooManyFailures(RuntimeError):
    """The share of episodes that infrastructure or author caused to fail is above the limit.

    They are kept, and played again when the stage is repeated.
    """


class PromptsTooLong(ValueError):
    """The share of episodes that had no turn, because not even their first prompt fits, is above the limit."""


class InfrastructureFailures(TooManyFailures, InfrastructureLost):
    """Too many failures, most of them of the infrastructure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Whose episodes are sampled, on which engines and into which store."""

    run_id: str
    iteration: int
    purpose: Purpose
    team_spec: TeamSpec
    apps: Mapping[str, str]
    """Serve application of every model group."""
    capacity: Mapping[str, int]
    """By application, how many model calls its engines sample at once; no more are under way."""
    store: TraceStore
    config: CollectConfig
    seed: int

    @classmethod
    def of(
        cls,
        run: Run,
        team_spec: TeamSpec,
        *,
        iteration: int,
        purpose: Purpose = Purpose.TRAIN,
        config: CollectConfig | None = None,
    ) -> Pass:
        """A pass on the run's rollout engines. Args: config: None: the run's section `collect`."""
        return cls(
            run_id=run.run_id,
            iteration=iteration,
            purpose=purpose,
            team_spec=team_spec,
            apps=app_names(run),
            capacity=capacities(run),
            store=run.traces,
            config=config or run.config.collect,
            seed=run.config.seed,
        )

    @property
    def where(self) -> dict[str, Any]:
        """The key under which its episodes are stored."""
        key = self.team_spec.team_key
        return {"run_id": self.run_id, "iteration": self.iteration, "purpose": self.purpose, "team_key": key}

    def pin(self, groups: Collection[str]) -> TracesRef:
        """Pins what is stored under its key of these groups."""
        stored = set(self.store.stored_episodes(**self.where)["group_id"].to_pylist())
        return self.store.pin_episodes(**self.where, excluded_groups=sorted(stored - set(groups)))


def sample_episodes(
    tasks: Sequence[Task],
    sampling_pass: Pass,
    *,
    episodes_per_task: int,
    num_enough: int | None = None,
    progress: Progress | None = None,
) -> Sampled:
    """Runs the episodes that are not stored yet and pins the complete groups, which is all of them by default.

    A repetition goes on with what is stored. Where more of it failed than the limit allows, and not by the policy, the failed
    episodes are played again under their ids and seeds and replaced: the policy does the same again, tools and timing may
    not. What an earlier pass pinned stays as it is, and what is pinned now holds the repetitions: no reader sees both.

    Args:
        tasks: each gives `episodes_per_task` episodes, one GRPO group.
        num_enough: the pass may end with so many complete groups, or when `config.budget` is spent; None: neither.

    Raises:
        TooManyFailures: infrastructure or author caused more than `config.max_failed_share` of the episodes to fail.
        PromptsTooLong: more than `config.max_failed_share` of them had no turn because their prompts are too long.
        InfrastructureLost: collectors ended and groups are incomplete all the same.
    """
    specs = [
        EpisodeSpec(**sampling_pass.where, task=task, episode_index=index, run_seed=sampling_pass.seed)
        for task in tasks
        for index in range(episodes_per_task)
    ]
    return play_specs(specs, sampling_pass, num_enough=num_enough, progress=progress)


def play_specs(
    specs: Sequence[EpisodeSpec],
    sampling_pass: Pass,
    *,
    num_enough: int | None = None,
    kept_groups: Collection[str] = (),
    repeats_failed: bool = False,
    progress: Progress | None = None,
) -> Sampled:
    """Does what `sample_episodes` does, for given specs.

    Args:
        kept_groups: groups of earlier passes under the same key, which are pinned with these.
        repeats_failed: whether stored episodes that failed are played again however few they are.
    """
    where, store, config = sampling_pass.where, sampling_pass.store, sampling_pass.config
    began = time.perf_counter()
    counts_tokens = num_enough is not None and config.budget.tokens is not None
    stored = store.stored_episodes(**where, with_tokens=counts_tokens)
    groups = Groups(specs, stored, num_enough=num_enough, budget=config.budget)
    again = _to_repeat(stored, groups, store=store, limit=0.0 if repeats_failed else config.max_failed_share)
    if again:
        stored, begun = stored.filter(pc.invert(pc.is_in(stored["episode_id"], pa.array(again)))), groups.begun
        groups = Groups(specs, stored, num_enough=num_enough, budget=config.budget)
        groups.begun |= begun  # also where nothing but failures is stored: a spent budget completes what has begun
    stored_ids = set(stored["episode_id"].to_pylist())
    todo = _not_stored(specs, stored_ids, groups)
    tally = _Tally(Pace(min(len(todo), groups.num_episodes_left)))
    # What may be replaced is of the episodes in `todo` only.
    replaced = (*MISSING, Cause.POLICY) if again else ()
    is_left = bool(todo)
    lost: Exception | None = None
    while is_left:  # once more where a task of the pipeline was lost, and blocks with it
        try:
            _play(todo, groups, sampling_pass, tally, replaced=replaced, num_planned=len(specs), progress=progress)
        except (WorkerCrashedError, NodeDiedError, ObjectLostError) as error:
            logger.warning("a task that carries episodes was lost: %s", error)
            lost = error
        stored = store.stored_episodes(**where, with_tokens=counts_tokens or lost is not None)
        groups = Groups(specs, stored, num_enough=num_enough, budget=config.budget)
        done, num_before = set(stored["episode_id"].to_pylist()), len(todo)
        todo = [spec for spec in todo if spec.episode_id not in done]
        is_left = 0 < len(todo) < num_before and groups.stopped_by(time.perf_counter() - began) is None
    stopped_by = groups.stopped_by(time.perf_counter() - began)
    if groups.left_out and stopped_by is None:
        raise _incomplete(groups) from lost
    complete = groups.complete
    _check_failures(stored, complete, store=store, config=config)
    _check_contexts(stored, complete, config=config)
    ids = {spec.episode_id for spec in specs} - stored_ids
    new = stored.filter(pc.is_in(stored["episode_id"], pa.array(sorted(ids), pa.string())))
    return Sampled(
        traces=sampling_pass.pin(complete.union(kept_groups)),
        **_counted(new),
        num_kept=len(stored_ids),
        num_tokens=tally.num_tokens if lost is None else pc.sum(new["num_tokens"]).as_py() or 0,
        seconds=time.perf_counter() - began,
        groups=sorted(complete),
        stopped_by=stopped_by,
        tasks_left=[groups.task_of[group] for group in groups.left_out],
        calls=tally.pace.calls,
    )


def _not_stored(specs: Sequence[EpisodeSpec], stored_ids: Collection[str], groups: Groups) -> list[EpisodeSpec]:
    """Returns what is left to play: where the pass has ended already, the rest of the groups that a spent budget left begun."""
    todo = [spec for spec in specs if spec.episode_id not in stored_ids]
    if reason := groups.stopped_by(0.0):
        return [spec for spec in todo if reason != "enough" and spec.group_id in groups.begun]
    return todo


def _play(
    todo: Sequence[EpisodeSpec],
    groups: Groups,
    sampling_pass: Pass,
    tally: _Tally,
    *,
    replaced: Sequence[Cause],
    num_planned: int,
    progress: Progress | None,
) -> None:
    """Plays episodes, counts them in `tally`, and tells how far it is."""
    num_kept = num_planned - len(todo) - tally.num_new
    if progress:
        progress(num_kept + tally.num_new, num_planned, "")  # clears what the pass before reported
    sampling_pass.store.begin(run_id=sampling_pass.run_id, iteration=sampling_pass.iteration)
    for row in _run(todo, groups, sampling_pass, replaced=replaced):
        tally.add(row)
        if progress:
            progress(num_kept + tally.num_new, num_planned, tally.pace.describe())
    if repeats := repeats_in_words(tally.pace.calls):
        logger.warning("%s", repeats)


class _Tally:
    """What the collectors of a pass have reported, summed up."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.num_new = self.num_tokens = 0

    def add(self, row: Mapping[str, Any]) -> None:
        num, num_tokens = int(row["num"]), int(row["num_tokens"])
        self.num_new += num
        self.num_tokens += num_tokens
        self.pace.add(CallCounts(**json.loads(row["calls"])), num_episodes=num, num_tokens=num_tokens)


def _incomplete(groups: Groups) -> InfrastructureLost:
    return InfrastructureLost(
        f"{len(groups.left_out)} of {len(groups.task_of)} groups are not complete though their collectors ended; "
        "what is stored is kept, a repetition plays the rest"
    )


def _counted(episodes: pa.Table) -> dict[str, Any]:
    """Figures of `Sampled` that the rows of the new episodes say; sampling lasts from the begin of the first to the end of the last."""
    starts, seconds = episodes["started_at"], 0.0
    if len(episodes):
        seconds = pc.max(pc.add(starts, episodes["duration_s"])).as_py() - pc.min(starts).as_py()
    return {
        "num_new": len(episodes),
        "statuses": dict(Counter(episodes["status"].to_pylist())),
        "causes": dict(Counter(cause or "sound" for cause in episodes["cause"].to_pylist())),
        "sampling_seconds": float(seconds),
    }


def _to_repeat(stored: pa.Table, groups: Groups, *, store: TraceStore, limit: float) -> list[str]:
    """Ids of the stored episodes to play again: those that failed, where they are too many however the others end.

    Other passes under the same key (refills, variants) are counted by themselves.
    """
    endings = _endings(stored, groups.task_of)
    is_over = groups.stopped_by(0.0) is not None or not groups.left_out
    if is_over:
        endings = [ending for ending in endings if ending.group_id in groups.complete]
    alike = failures_alike((e for e in endings if e.group_id in groups.complete), store.completions_of)
    failed = [ending.episode_id for ending in endings if ending.cause in MISSING or ending.episode_id in alike]
    return failed if len(failed) > limit * (len(endings) if is_over else groups.num_episodes_enough) else []


def _endings(stored: pa.Table, groups: Container[str]) -> list[Ending]:
    """How the stored episodes of these groups ended."""
    rows = stored.select([column.name for column in fields(Ending)]).to_pylist()
    return [Ending(**row) for row in rows if row["group_id"] in groups]


def _check_failures(stored: pa.Table, complete: set[str], *, store: TraceStore, config: CollectConfig) -> None:
    """Raises TooManyFailures, with how often which error came, over the episodes of complete groups.

    Failures that the policy caused are outcomes, and may be as many as they are, unless all of their task are alike.
    """
    endings = _endings(stored, complete)
    alike = failures_alike(endings, store.completions_of)
    failed = [ending for ending in endings if ending.cause in MISSING or ending.episode_id in alike]
    if len(failed) <= config.max_failed_share * len(endings):
        return
    kinds = Counter((ending.status, without_ids(ending.error)) for ending in failed)
    counts = Counter(ending.status for ending in endings)
    causes = "; ".join(f"{number} x {status}: {error}" for (status, error), number in kinds.most_common(3))
    is_infrastructure = sum(ending.cause == Cause.INFRASTRUCTURE for ending in failed) > len(failed) / 2
    whatever = " (whatever was sampled, all episodes of these tasks fail in this way)" if alike else ""
    raise (InfrastructureFailures if is_infrastructure else TooManyFailures)(
        f"{len(failed)} of {len(endings)} episodes failed ({dict(counts)}), more than collect.max_failed_share = "
        f"{config.max_failed_share:g}: {causes}{whatever}; a repetition of the stage plays the failed ones again"
    )


def _check_contexts(stored: pa.Table, complete: set[str], *, config: CollectConfig) -> None:
    """Raises PromptsTooLong, with the first task, over the episodes of complete groups."""
    columns = ["group_id", "task_id", "stop_reason", "num_turns", "error"]
    rows = [row for row in stored.select(columns).to_pylist() if row["group_id"] in complete]
    stuck = [row for row in rows if row["stop_reason"] == CONTEXT_EXHAUSTED and not row["num_turns"]]
    if len(stuck) <= config.max_failed_share * len(rows):
        return
    first = min(stuck, key=lambda row: row["task_id"])
    raise PromptsTooLong(
        f"{len(stuck)} of {len(rows)} episodes had no turn because their prompts are too long, more than collect.max_failed_share = "
        f"{config.max_failed_share:g}; task {first['task_id']}: {first['error']}: raise serve.max_model_len or leave out "
        "such tasks"
    )


def _run(
    specs: Sequence[EpisodeSpec], groups: Groups, sampling_pass: Pass, *, replaced: Sequence[Cause]
) -> Iterator[dict[str, Any]]:
    """Figures {num, groups, calls, num_tokens}: of each block of episodes, as it is stored, and in between some of no episode, with what
    became of model calls.

    Counts them in `groups`, and has the collectors stop as soon as these say so. Args: replaced: causes of stored failures that the
    episodes replace.
    """
    pass_id = uuid.uuid4().hex
    stop = EarlyStop(begun=frozenset(groups.begun), open_s=groups.seconds_left) if groups.may_stop else EarlyStop()
    work = {
        "pass_id": pass_id,
        "team_spec": sampling_pass.team_spec,
        "apps": dict(sampling_pass.apps),
        "capacity": dict(sampling_pass.capacity),
        "store": sampling_pass.store,
        "replaced": replaced,
        "config": sampling_pass.config,
        "early_stop": stop,
        "log": carry(),
    }
    workers = collectors(sampling_pass.config.num_workers)
    blocks = _pipeline(_deal(specs, len(workers)), workers, work)
    began = sent_at = time.monotonic()
    sent: StoppedBy | None = None
    try:
        with waiting(groups.describe):
            # Without `prefetch_batches=0` each would be held back until the next one comes.
            for block in blocks.iter_batches(prefetch_batches=0, **WHOLE):
                row = block.to_pylist()[0]
                groups.add(json.loads(row["groups"]), row["num_tokens"])
                now = time.monotonic()
                reason = groups.stopped_by(now - began)
                if reason and (reason != sent or now > sent_at + 1):  # repeated: a collector may be a new one
                    for worker in workers:
                        worker.stop.remote(pass_id, is_cut=reason == "enough")
                    sent, sent_at = reason, now
                yield row
    finally:
        for worker in workers:
            worker.forget.remote(pass_id)


def _pipeline(dealt: pa.Table, workers: Sequence[Any], work: Mapping[str, Any]) -> ray.data.Dataset:
    """The operators between groups and figures. Args: dealt: see `_deal`. work: the arguments of `Collector.run` but specs and place."""
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    warnings.filterwarnings(
        "ignore", category=RayDeprecationWarning
    )  # no other key of `map_batches` takes `max_retries`
    context.target_max_block_size = 1  # hands on every block at once, so that progress is shown as it happens
    target = pickle.dumps((work["store"], work["replaced"]))
    into = {"workers": workers, "writer": writer(), "pass_id": work["pass_id"], "target": target}
    beside = beside_the_driver()
    return (
        # `from_arrow` has a task of a whole CPU look at a table: it waits for ever where engines and trainers have them all.
        ray.data.from_blocks([dealt])
        .map_batches(
            play,
            fn_kwargs={"workers": workers, "work": pickle.dumps(work)},
            num_cpus=0,
            ray_remote_args_fn=lambda: beside | {"max_retries": 0},
            **WHOLE,
        )
        .map_batches(
            StoreBlocks,
            fn_constructor_kwargs=into,
            compute=ray.data.ActorPoolStrategy(size=1),
            num_cpus=0,
            ray_remote_args_fn=lambda: beside,
            **WHOLE,
        )
    )


def _deal(specs: Sequence[EpisodeSpec], num_shares: int) -> pa.Table:
    """{place of a collector, group, specs: pickled}: a row per group, dealt in turn, in order."""
    groups: dict[str, list[EpisodeSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.group_id, []).append(spec)
    rows = [
        {"place": number % num_shares, "group": group, "specs": pickle.dumps(own)}
        for number, (group, own) in enumerate(groups.items())
    ]
    return pa.Table.from_pylist(rows)

"""retrain: RUN@ITERATION -> an iteration of this run that trains on that run's traces instead of sampling its own.

    RUN@ITERATION ── pin_source ──> the next iteration of this run has its traces from there, whoever does it
                     collect: a copy of the traces in this run's own store, pinned
                     score:   this run's credit rule          train: this run's algorithm, importance weights always on

Reads the other run's journal, traces and model versions (for the tokenizer), and writes nothing of it. From sync on the
iteration is one like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.config.run_config import near
from pipelines.episodes.chosen_traces import HELD_OUT, HeldOut
from pipelines.episodes.vocabulary import version_that_acted, vocabulary_of
from pipelines.run.iterations import next_iteration
from pipelines.run.run import Run, plain
from pipelines.run.stored_runs import stored_run
from stores.files import is_uri, local_path
from stores.types import ModelVersionRef, Trace, TracesRef
from train_loops import mismatch
from train_loops.config import BASELINE_ALGORITHMS, TrainConfig

DOOR = "--from-traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Whose traces."""

    run: str
    iteration: int
    store: str
    """The folder that holds the run, or its journal's URL."""

    def __str__(self) -> str:
        return f"{self.run}@{self.iteration}"


def parse_source(run: Run, text: str, store: str) -> Source:
    """RUN@ITERATION as the command line takes it; an empty `store` is where this run is kept itself."""
    name, _, iteration = text.rpartition("@")
    if not name or not iteration.isdigit() or int(iteration) < 1:
        raise ValueError(f"{DOOR} {text!r} is not of the form RUN@ITERATION, e.g. demo@3")
    place = store or run.config.storage.journal or run.config.storage.root
    place = place if is_uri(place) else str(local_path(place).resolve())
    return Source(run=name, iteration=int(iteration), store=place)


def pin_source(run: Run, source: Source) -> int:
    """The iteration of this run that trains on the source's traces: the one that did or began to, or else the next.

    Raises ValueError where the traces cannot be trained on, or where there is no iteration for them.
    """
    for iteration in range(1, run.config.iterations + 1):
        if source_of(run, iteration) == source:
            return iteration
    wanted = next_iteration(run)
    if wanted is None:
        raise ValueError(
            f"{DOOR}: all {run.config.iterations} iterations of run {run.run_id!r} are done: raise `iterations`, or give "
            "another run name"
        )
    if run.journal.ref(run.key(wanted, "collect")) is None and source_of(run, wanted) is None:
        read_source(run, wanted, source)
        run.journal.pin_value(run.run_id, _name(wanted), asdict(source))
    if (kept := source_of(run, wanted)) != source:
        has = f"trains on the traces of {kept}" if kept else "has sampled episodes of its own"
        raise ValueError(
            f"{DOOR}: iteration {wanted} of run {run.run_id!r} {has}, finish it first (`troupe train RUN.yaml`), or give "
            "another run name"
        )
    return wanted


def source_of(run: Run, iteration: int) -> Source | None:
    """Where an iteration has its traces from; None if it samples them itself."""
    kept = run.journal.value(run.run_id, _name(iteration))
    return None if kept is None else Source(**kept)


def adopt_traces(run: Run, iteration: int, source: Source) -> dict[str, Any]:
    """The collect of an iteration that samples nothing: copies and pins the source's traces; returns what `collect` does.

    Also returns "from", whose traces they are, and "sampled_by", the versions that acted in them.
    """
    models = run.parents(iteration)
    ref, traces = read_source(run, iteration, source)
    where: dict[str, Any] = {
        "run_id": ref.run_id,
        "iteration": ref.iteration,
        "purpose": ref.purpose,
        "team_key": ref.team_key,
    }
    num_new = run.traces.write_episodes(traces)
    groups = {trace.group_id for trace in traces}
    num_groups = len({trace.group_id for trace in traces if not trace.variant})
    stored = set(run.traces.stored_episodes(**where)["group_id"].to_pylist())
    before = run.journal.ref(run.key(iteration - 1, "collect"))
    return {
        "traces": plain(run.traces.pin_episodes(**where, excluded_groups=sorted(stored - groups))),
        "policy_versions": {group: model.version for group, model in sorted(models.items())},
        "statuses": dict(Counter(trace.status.value for trace in traces if not trace.variant)),
        "num_new": num_new,
        "num_tokens": 0,
        "sampling_seconds": 0.0,
        "groups": {"wanted": num_groups, "planned": num_groups, "done": num_groups},
        "stopped_by": None,
        "carried": (before or {}).get("carried", []),
        "from": asdict(source),
        "sampled_by": dict(traces[0].policy_versions),
    }


def read_source(run: Run, iteration: int, source: Source) -> tuple[TracesRef, list[Trace]]:
    """The source's pinned traces, without those of tasks that this run holds out.

    Raises ValueError where there are none, where agents belong to other model groups there, or where another tokenizer
    made the token ids.
    """
    other = stored_run(source.run, source.store)
    collected = other.journal.ref(other.key(source.iteration, "collect"))
    if collected is None:
        done = [row.iteration for row in other.journal.stages(source.run) if row.stage == "collect" and row.ref]
        raise ValueError(
            f"{DOOR} {source}: collect of iteration {source.iteration} is not done there; it is of iterations "
            f"{', '.join(map(str, done)) or 'none'}"
        )
    ref, held_out = TracesRef(**collected["traces"]), HeldOut(run)
    traces = [trace for trace in other.traces.read_traces(ref) if not held_out.has(trace)]
    if not traces:
        raise ValueError(
            f"{DOOR} {source}: no trace is left: {held_out.num_seen} of {ref.num_episodes} are of tasks in tasks."
            f"{', tasks.'.join(HELD_OUT)} of this run"
        )
    _check_variants(run, source, traces)
    _check_agents(run, source, traces)
    _check_tokenizers(source, run.parents(iteration), other, traces)
    return ref, traces


def _check_variants(run: Run, source: Source, traces: Sequence[Trace]) -> None:
    kinds = {trace.variant.partition("-")[0].replace("without", "leave_one_out") for trace in traces if trace.variant}
    for group in run.config.model_groups:
        algorithm = run.config.train_config(group).algorithm
        wanted = BASELINE_ALGORITHMS.get(algorithm)
        if wanted is not None and wanted not in kinds:
            raise ValueError(
                f"{DOOR} {source}: model group {group!r}: algorithm {algorithm!r} holds turns against {wanted} episodes, and "
                f"there are none among these traces (variants: {', '.join(sorted(kinds)) or 'none'}): take rloo, which needs none"
            )


def train_config(run: Run, iteration: int, model_group: str) -> TrainConfig:
    """How a model group learns in an iteration: as configured, and on foreign traces always with importance weights."""
    config = run.config.train_config(model_group)
    return config if source_of(run, iteration) is None else off_policy(config)


def off_policy(config: TrainConfig) -> TrainConfig:
    """Settings for traces that other versions sampled: weights always on, and a floor under the effective sample size."""
    return config.model_copy(update={"mismatch": mismatch.off_policy(config.mismatch)})


def _name(iteration: int) -> str:
    return f"traces/{iteration}"


def _check_agents(run: Run, source: Source, traces: Sequence[Trace]) -> None:
    played = sorted({(turn.agent, turn.model_group) for trace in traces for turn in trace.turns})
    fix = "map agents to model groups as that run does"
    for agent, group in played:
        if agent not in run.config.group_of:
            raise ValueError(
                f"{DOOR} {source}: agent {agent!r} played there, which this run does not have"
                f"{near(agent, run.config.group_of)}"
            )
        if group not in run.config.model_groups or agent not in run.config.agents_of(group):
            raise ValueError(
                f"{DOOR} {source}: agent {agent!r} belongs to model group {group!r} there and to "
                f"{run.config.group_of[agent]!r} here: {fix}"
            )
    for group in run.config.model_groups:
        if group not in {name for _, name in played}:
            raise ValueError(f"{DOOR} {source}: model group {group!r} has no turn there: {fix}")


def _check_tokenizers(
    source: Source, models: Mapping[str, ModelVersionRef], other: Run, traces: Sequence[Trace]
) -> None:
    for group, model in models.items():
        acted = version_that_acted(other.weights, group, traces)
        if acted is None:
            raise ValueError(
                f"{DOOR} {source}: {other.weights_uri} holds none of the versions of {group!r} that acted, so nothing "
                "tells whether their tokenizer is the same"
            )
        if vocabulary_of(acted) != vocabulary_of(model):
            raise ValueError(
                f"{DOOR} {source}: the traces hold token ids of the tokenizer in {acted.uri}, model group {group!r} has "
                f"another one in {model.uri}: start it from a model with that tokenizer"
            )

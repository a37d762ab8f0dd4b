"""from_run: RUN@ITERATION -> an iteration of this run that trains on that run's traces instead of sampling its own.

    RUN@ITERATION ── pin_source ──> the next iteration of this run has its traces from there, whoever does it
                     collect: a copy of the traces in this run's own store, pinned
                     score:   this run's credit rule          train: this run's algorithm, importance weights always on

Reads the other run's journal, traces and model versions (for the tokenizer), and writes nothing of it. From sync on the
iteration is one like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pipelines.cluster.connect import connect
from pipelines.config.messages import near
from pipelines.config.run_config import RunConfig
from pipelines.extensions.other_runs.chosen_traces import version_that_acted, vocabulary_of
from pipelines.report.progress import Screen
from pipelines.run.held_out import HeldOut
from pipelines.run.iteration import Iteration
from pipelines.run.iterations import next_iteration
from pipelines.run.run import Run
from pipelines.run.scoring import counts_by_cause
from pipelines.run.stored_runs import stored_run
from pipelines.runners.begin import make_version_zero
from pipelines.stages.steps import complete, do_step
from pipelines.stages.table import Step
from pipelines.tasks.splits import HELD_OUT
from stores.files import is_uri, local_path
from stores.journal.run_values import RunValue
from stores.journal.stage_results import Collected, TracesSource, Trained
from stores.types import ModelVersionRef, Trace, TracesRef

OPTION = "--from-traces"
"""The option of `troupe train` that this module is behind, for messages."""


def train_on_traces(
    config: RunConfig, source: str, *, store: str = "", address: str = "", screen: Screen
) -> tuple[int, dict[str, Trained]]:
    """Trains one iteration on the traces of `source` (RUN@ITERATION) as far as its new versions: nothing is sampled or served.

    `train_team` evaluates it afterwards, and continues the run. Returns the iteration and what `train` recorded by model group.
    """
    run = Run(config)
    parsed = parse_source(run, source, store)
    stored_run(parsed.run, parsed.store, is_read_only=True)  # an unknown one is refused before anything starts
    run.begin()
    with screen.stage("connect"):
        connect(address)
    run.traces.create()
    with screen.stage("warm start") as progress:
        make_version_zero(run, progress=progress)
    iteration = pin_source(run, parsed)

    def do(own: Run, step: Step) -> None:
        with screen.stage(step.stage, step.iteration) as progress:
            do_step(own, step, progress=progress)

    complete(run, Step(iteration, Trained.STAGE), do)
    return iteration, run.iteration(iteration).trained


def parse_source(run: Run, text: str, store: str) -> TracesSource:
    """RUN@ITERATION as the command line takes it; an empty `store` is where this run is kept itself."""
    name, _, iteration = text.rpartition("@")
    if not name or not iteration.isdigit() or int(iteration) < 1:
        raise ValueError(f"{OPTION} {text!r} is not of the form RUN@ITERATION, e.g. demo@3")
    root = store or run.config.storage.journal or run.config.storage.root
    root = root if is_uri(root) else str(local_path(root).resolve())
    return TracesSource(run=name, iteration=int(iteration), store=root)


def pin_source(run: Run, source: TracesSource) -> int:
    """The iteration of this run that trains on the source's traces: the one that did or began to, or else the next.

    Raises ValueError where the traces cannot be trained on, or where there is no iteration for them.
    """
    for iteration in range(1, run.config.iterations + 1):
        if run.source(iteration) == source:
            return iteration
    following = next_iteration(run)
    if following is None:
        raise ValueError(
            f"{OPTION}: all {run.config.iterations} iterations of run {run.run_id!r} are done: raise `iterations`, or give "
            "another run name"
        )
    if run.iteration(following).find(Collected) is None and run.source(following) is None:
        read_source(run, source, run.samplers(following))
        run.journal.pin_value(run.run_id, RunValue.SOURCE.of(following), asdict(source))
    if (pinned := run.source(following)) != source:
        has = f"trains on the traces of {pinned}" if pinned else "has sampled episodes of its own"
        raise ValueError(
            f"{OPTION}: iteration {following} of run {run.run_id!r} {has}, finish it first (`troupe train RUN.yaml`), or give "
            "another run name"
        )
    return following


def adopt_traces(run: Run, iteration: Iteration, source: TracesSource) -> Collected:
    """Copies and pins the source's traces: the collect of an iteration that samples nothing."""
    ref, traces = read_source(run, source, iteration.models)
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
    before = iteration.before[0].find(Collected) if iteration.before else None
    return Collected(
        traces=run.traces.pin_episodes(**where, excluded_groups=sorted(stored - groups), by_run=run.run_id),
        policy_versions={group: model.version for group, model in sorted(iteration.models.items())},
        statuses=dict(Counter(trace.status.value for trace in traces if not trace.variant)),
        causes=counts_by_cause(traces),
        num_new=num_new,
        num_tokens=0,
        sampling_seconds=0.0,
        groups={"wanted": num_groups, "planned": num_groups, "done": num_groups},
        stopped_by=None,
        carried=() if before is None else before.carried,  # nothing was sampled: they wait for the next iteration
        source=source,
        sampled_by=dict(traces[0].policy_versions),
    )


def read_source(run: Run, source: TracesSource, models: Mapping[str, ModelVersionRef]) -> tuple[TracesRef, list[Trace]]:
    """The source's pinned traces, without those of tasks that this run holds out.

    Args: models: versions of this run, whose tokenizers are compared.

    Raises ValueError where there are none, where agents belong to other model groups there, or where another tokenizer
    made the token ids.
    """
    other = stored_run(source.run, source.store, is_read_only=True)
    collected = other.iteration(source.iteration).find(Collected)
    if collected is None:
        done = [row.iteration for row in other.journal.stages(source.run) if row.stage == "collect" and row.ref]
        raise ValueError(
            f"{OPTION} {source}: collect of iteration {source.iteration} is not done there; it is of iterations "
            f"{', '.join(map(str, done)) or 'none'}"
        )
    ref, held_out = collected.traces, HeldOut(run)
    traces = [trace for trace in other.traces.read_traces(ref) if not held_out.has(trace)]
    if not traces:
        raise ValueError(
            f"{OPTION} {source}: no trace is left: {held_out.num_seen} of {ref.num_episodes} are of tasks in tasks."
            f"{', tasks.'.join(HELD_OUT)} of this run"
        )
    _check_variants(run, source, traces)
    _check_agents(run, source, traces)
    _check_tokenizers(source, models, other, traces)
    return ref, traces


def _check_variants(run: Run, source: TracesSource, traces: Sequence[Trace]) -> None:
    kinds = {trace.variant.partition("-")[0].replace("without", "leave_one_out") for trace in traces if trace.variant}
    for group in run.config.model_groups:
        train = run.config.train_config(group)
        variant = train.estimator.variants
        if variant and variant not in kinds:
            raise ValueError(
                f"{OPTION} {source}: model group {group!r}: algorithm {train.algorithm!r} compares turns with {variant} episodes, and "
                f"there are none among these traces (variants: {', '.join(sorted(kinds)) or 'none'}): take rloo, which needs none"
            )


def _check_agents(run: Run, source: TracesSource, traces: Sequence[Trace]) -> None:
    played = sorted({(turn.agent, turn.model_group) for trace in traces for turn in trace.turns})
    fix = "map agents to model groups as that run does"
    for agent, group in played:
        if agent not in run.config.group_of:
            raise ValueError(
                f"{OPTION} {source}: agent {agent!r} played there, which this run does not have"
                f"{near(agent, run.config.group_of)}"
            )
        if group not in run.config.model_groups or agent not in run.config.agents_of(group):
            raise ValueError(
                f"{OPTION} {source}: agent {agent!r} belongs to model group {group!r} there and to "
                f"{run.config.group_of[agent]!r} here: {fix}"
            )
    for group in run.config.model_groups:
        if group not in {name for _, name in played}:
            raise ValueError(f"{OPTION} {source}: model group {group!r} has no turn there: {fix}")


def _check_tokenizers(
    source: TracesSource, models: Mapping[str, ModelVersionRef], other: Run, traces: Sequence[Trace]
) -> None:
    for group, model in models.items():
        acted = version_that_acted(other.weights, group, traces)
        if acted is None:
            raise ValueError(
                f"{OPTION} {source}: {other.weights_uri} holds none of the versions of {group!r} that acted, so nothing "
                "tells whether their tokenizer is the same"
            )
        if vocabulary_of(acted) != vocabulary_of(model):
            raise ValueError(
                f"{OPTION} {source}: the traces hold token ids of the tokenizer in {acted.uri}, model group {group!r} has "
                f"another one in {model.uri}: start it from a model with that tokenizer"
            )

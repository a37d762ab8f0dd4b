"""chosen_traces: another run's best episodes -> demonstrations, none of a task that this run is measured on.

Where this run puts the agents of that one under an orchestrator, its choices are the order in which they acted. Reads: episodes
that the other run trained on, their rewards, and its model versions for the tokenizer.
"""

from __future__ import annotations

import heapq
import json
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.run.held_out import HeldOut
from pipelines.run.run import Run
from pipelines.tasks.splits import HELD_OUT
from serve_apps.authoring.agent import AuthorError
from serve_apps.episode.team import ActingTeam
from stores.traces.conventions import allowed_tokens
from stores.traces.store import TraceStore
from stores.types import ModelVersionRef, Purpose, Trace
from stores.weights.manifest import whole_model
from stores.weights.store import WeightStore
from stores.weights.weight_cache import fetch

if TYPE_CHECKING:
    from pipelines.config.run_config import RunConfig
    from train_loops.config import ChosenTracesConfig

logger = logging.getLogger(__name__)

NO_IDS = ("truncation", "padding", "version")
"""Entries of a tokenizer.json that change no token id."""


def chosen(
    run: Run, choice: ChosenTracesConfig, team: ActingTeam, *, count: int, folders: Mapping[str, Path]
) -> list[Trace]:
    """What a warm start on traces learns: see `choose_traces` and `under_orchestrator`."""
    good = choose_traces(run, choice, count=count, folders=folders)
    learnt = under_orchestrator(good, team, choice, run_id=run.run_id, seed=run.config.seed)
    _check_agents(run.config, choice, learnt)
    return learnt


def choose_traces(run: Run, choice: ChosenTracesConfig, *, count: int, folders: Mapping[str, Path]) -> list[Trace]:
    """At most `count` traces that are good enough, drawn evenly from all that are and the same at every call.

    Args:
        folders: what each model group of this run starts from.

    Raises ValueError where there is none, where one lacks a model group, or where another tokenizer made the token ids.
    """
    good = TraceStore(choice.uri).rewarded_traces(
        run_id=choice.run, iteration=choice.iteration, purpose=Purpose.TRAIN, min_outcome=choice.min_outcome
    )
    held_out = HeldOut(run)
    free = (trace for trace in good if not held_out.has(trace))
    traces = heapq.nsmallest(count, free, key=_draw)
    left_out = f"{held_out.num_seen} are left out, their tasks are in tasks.{', tasks.'.join(HELD_OUT)} of this run"
    if held_out.num_seen:
        logger.warning("traces of run %s for the warm start: %s", choice.run, left_out)
    if not traces:
        raise ValueError(
            f"warmstart.traces: no training episode of run {choice.run!r} in {choice.uri} has an outcome of "
            f"{choice.min_outcome:g} or more{f' ({left_out})' if held_out.num_seen else ''}"
        )
    written = run.workflow.retraced_agent
    for group, folder in folders.items():
        if set(run.config.model_groups[group].agents) == {written} and not _acted(written, traces):
            continue  # it has made no turn yet: `under_orchestrator` writes them
        _check_group(group, traces)
        _check_tokenizer(choice, group, traces, folder)
    return traces


def under_orchestrator(
    traces: Sequence[Trace], team: ActingTeam, choice: ChosenTracesConfig, *, run_id: str, seed: int
) -> list[Trace]:
    """Returns the traces with the turns of the team's orchestrator, where it has one and they have none; else as they are.

    A share `choice.other_choices` of its choices is another option that was offered, drawn by `seed`; the episode goes on as it did.
    An episode that the orchestrator's steps cannot make is left out. ValueError with the first reason where they can make none.
    """
    agent = team.workflow.retraced_agent
    if not agent or _acted(agent, traces):
        return list(traces)
    played, reasons = [], []
    for trace in traces:
        try:
            played.append(team.workflow.retraced(trace, team=team, run_id=run_id, seed=seed))
        except AuthorError as reason:
            reasons.append(str(reason))
    if not played:
        raise ValueError(
            f"warmstart.traces: the steps of this run's orchestrator can make none of the {len(traces)} chosen episodes of run {choice.run!r}; "
            f"{reasons[0]}: change workflow.settings.steps"
        )
    if reasons:
        logger.warning(
            "%d of %d episodes cannot be played by the orchestrator's steps: %s", len(reasons), len(traces), reasons[0]
        )
    drawn = random.Random(f"{seed}/choices")
    return [_with_other_choices(agent, trace, choice.other_choices, drawn) for trace in played]


def _acted(agent: str, traces: Sequence[Trace]) -> bool:
    return any(turn.agent == agent for trace in traces for turn in trace.turns)


def _with_other_choices(agent: str, trace: Trace, share: float, drawn: random.Random) -> Trace:
    turns = []
    for turn in trace.turns:
        is_choice = turn.agent == agent
        options = allowed_tokens(turn.sampling.constraint) if is_choice else []
        others = [token for token in options if token not in turn.completion_token_ids]
        is_other = others and drawn.random() < share
        turns.append(replace(turn, completion_token_ids=(drawn.choice(others),)) if is_other else turn)
    return replace(trace, turns=tuple(turns))


def _draw(trace: Trace) -> str:
    """Orders traces evenly over iterations: an episode's id begins with its iteration, the hash of it does not."""
    return sha256(trace.episode_id.encode()).hexdigest()


def _check_group(group: str, traces: Sequence[Trace]) -> None:
    known = {turn.model_group for trace in traces for turn in trace.turns}
    if group not in known:
        raise ValueError(
            f"warmstart.traces: model group {group!r} has no turn in the chosen traces, they are of "
            f"{sorted(known)}: name the model groups as that run does"
        )


def _check_agents(config: RunConfig, choice: ChosenTracesConfig, traces: Sequence[Trace]) -> None:
    """Raises ValueError where weights would learn the turns of an agent that others play here: a model group learns those of its name."""
    for agent, group in sorted({(turn.agent, turn.model_group) for trace in traces for turn in trace.turns}):
        here = [name for name in config.model_groups if agent in config.agents_of(name)]
        there = config.weights_name(group) if group in config.model_groups else ""
        if here and there not in map(config.weights_name, here):
            raise ValueError(
                f"warmstart.traces: agent {agent!r} belongs to model group {group!r} in run {choice.run!r} and to {here[0]!r} here: map "
                "agents to model groups as that run does, or use a demonstrator"
            )


def _check_tokenizer(choice: ChosenTracesConfig, group: str, traces: Sequence[Trace], folder: Path) -> None:
    weights_uri = choice.weights or f"{choice.uri.rstrip('/').rpartition('/')[0] or '.'}/weights"
    ref = version_that_acted(WeightStore(weights_uri), group, traces)
    if ref is None:
        raise ValueError(
            f"warmstart.traces: {weights_uri} holds none of the versions of {group!r} that acted, so nothing tells whether "
            f"their tokenizer is that of {folder}: set warmstart.traces.weights to the model versions of {choice.run!r}"
        )
    if vocabulary_of(ref) != vocabulary(folder):
        raise ValueError(
            f"warmstart.traces: the traces hold token ids of the tokenizer in {ref.uri}, model group {group!r} starts "
            f"from {folder} with another one: start from a model with that tokenizer, or use a demonstrator"
        )


def version_that_acted(weights: WeightStore, group: str, traces: Iterable[Trace]) -> ModelVersionRef | None:
    """A version whose tokenizer made the traces' token ids of a model group; None where none is left.

    Every version of a model group has the tokenizer of version 0, so that any version will do.
    """
    acted = {trace.policy_versions[group] for trace in traces if group in trace.policy_versions}
    return next((ref for version in sorted({0, *acted}) if (ref := weights.ref(group, version))), None)


def vocabulary_of(ref: ModelVersionRef) -> dict[str, Any]:
    """`vocabulary` of a model version; an adapter has that of its base."""
    return vocabulary(fetch(whole_model(ref), with_tensors=False))


def vocabulary(folder: Path) -> dict[str, Any]:
    """The entries of a model folder's tokenizer.json that decide which text has which token ids."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no tokenizer.json, by which the tokenizers of stored traces are compared")
    return {name: entry for name, entry in json.loads(file.read_text()).items() if name not in NO_IDS}

"""compare: a finished run with a `compare` section -> one agent trained on the same tasks, and whether the team is worth it.

    run ── alone_config ──> run of the single agent ── train_team ──> untrained and trained agent ── answers ──> <run>/compare.json

Both begin from the same weights, play as many episodes in training and spend as many completion tokens per test task.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipelines.config.run_config import RunConfig, parse_config, with_keys
from pipelines.episodes.collector import end_collectors
from pipelines.evaluation.control import mean_tokens
from pipelines.evaluation.played import play_team
from pipelines.evaluation.statistics import Resampling
from pipelines.evaluation.teams import Models
from pipelines.extensions.compare.against_one import (
    BOUND,
    AloneScore,
    Answer,
    Way,
    alone_score,
    answers_by_task,
    in_words,
    to_json,
    winner_of,
    within_budget,
)
from pipelines.extensions.compare.config import CompareConfig
from pipelines.extensions.compare.report import comparison_place
from pipelines.report.progress import Screen
from pipelines.report.record import write_reports
from pipelines.run.run import Run
from pipelines.run.watchdog import Watchdog
from pipelines.runners.local_runner import train_team
from pipelines.runners.validate import check
from serve_apps.authoring.workflow import load_workflow
from serve_apps.workflows.alone import PATH as ALONE
from stores.files import write_file
from stores.journal.stage_results import Measured
from stores.types import Purpose

WAYS_OF_MANY: tuple[Way, ...] = ("majority", "likeliest", "any")
MAX_ANSWERS = 64
"""How often the single agent answers a task at most, however many tokens are left."""
NOT_OF_ONE = ("compare", "cost", "swap", "schedule", "traffic", "watch")
"""Sections of the team's config that the run of the single agent does without."""


def compare_with_one(run: Run, *, address: str = "", screen: Screen) -> dict[str, Any]:
    """Trains the single agent, or goes on where that stopped, has it answer the test tasks, and writes the result into both reports.

    Returns the content of compare.json. Raises ValueError where the run has no `compare` section, or is not finished.
    """
    before, after = _measured(run, 0), _measured(run, run.config.iterations)
    config = alone_config(run)
    check(config)
    train_team(config, address=address, screen=screen)
    alone = Run(config)
    watchdog = Watchdog.of_section(alone, "compare", "evaluate", times=2, recover=end_collectors)
    with alone.hold_engines():
        found = watchdog.watch(partial(_compare, run, alone, before, after))
    write_file(comparison_place(run), json.dumps(found, indent=2).encode())
    write_reports(run)
    screen.say(found["sentence"])
    return found


def alone_config(run: Run) -> RunConfig:
    """Returns the run config of the single agent: the team's tasks, training and number of episodes, and its version 0."""
    settings = _settings(run.config)
    if settings is None:
        raise ValueError(
            f"run {run.run_id!r} has no `compare` section: add one to its RUN.yaml, for example compare: {{agent: solver}}, and give "
            "that file"
        )
    agent, workflow = _single_agent(run.config)
    group = settings.model_group or run.config.group_of.get(agent) or next(iter(run.config.model_groups))
    if group not in run.config.model_groups:
        raise ValueError(
            f"compare.model_group: {group!r} is none of the model groups {', '.join(sorted(run.config.model_groups))}"
        )
    start = run.weights.ref(run.config.weights_name(group), 0)
    if start is None:
        raise ValueError(f"version 0 of model group {group!r} is not stored any more: nothing can begin from it")
    team = run.config.model_dump(mode="json", exclude_unset=True)
    own = {key: value for key, value in team.items() if key not in (*NOT_OF_ONE, "warmstart")}
    about = {key: value for key, value in team["model_groups"][group].items() if key != "tiny_model"}
    own |= {
        "run": f"{run.run_id[:94]}-alone",
        "evaluate": {key: value for key, value in team.get("evaluate", {}).items() if key != "control"},
        "workflow": workflow,
        "credit": (settings.credit or run.config.credit).model_dump(mode="json"),
        "model_groups": {group: {**about, "agents": [agent], "model": start.uri}},
        "agents": {name: value for name, value in team.get("agents", {}).items() if name == agent},
    }
    if weights := run.config.storage.weights:  # versions there are told apart by their model group alone
        own["storage"] = {**own["storage"], "weights": f"{weights}/{own['run']}"}
    return parse_config(with_keys(own, settings.set), f"compare of run {run.run_id!r}")


@dataclass(frozen=True, slots=True)
class _Side:
    """The team before or after training, and the single agent at the same stage."""

    team: Measured
    models: Models
    is_trained: bool


def _compare(run: Run, alone: Run, before: Measured, after: Measured) -> dict[str, Any]:
    (agent,) = alone.config.group_of
    sides = [_Side(before, alone.trained(0), False), _Side(after, alone.champion(), True)]
    tables = {side.is_trained: _scores(run, alone, side) for side in sides}
    scores, team_tokens = tables[True]
    return {
        "run": alone.run_id,
        "agent": agent,
        "winner": winner_of(scores),
        "sentence": in_words(scores, agent=agent, team_accuracy=after.score.accuracy, team_tokens=team_tokens),
        "sides": [
            {
                "is_trained": side.is_trained,
                "team": {
                    "accuracy": side.team.score.accuracy,
                    "ci95": list(side.team.score.ci95),
                    "num_tokens": tables[side.is_trained][1],
                },
                "alone": [to_json(score) for score in tables[side.is_trained][0]],
            }
            for side in sides
        ],
    }


def _scores(run: Run, alone: Run, side: _Side) -> tuple[list[AloneScore], float]:
    """Returns the scores of the single agent in every way, and the team's completion tokens per episode, which are the budget."""
    budget = mean_tokens(list(run.traces.read_traces(side.team.score.traces)))
    single = _answers(alone, side.models, 1)
    per_answer = sum(a.num_tokens for answers in single.values() for a in answers) / max(1, len(single))
    # Answers differ in length: twice as many as are needed on average are enough for nearly every task.
    count = min(MAX_ANSWERS, 1 + 2 * math.ceil(budget / max(1.0, per_answer)))
    many = within_budget(_answers(alone, side.models, count), budget)
    played: dict[Way, Mapping[str, Sequence[Answer]]] = dict.fromkeys(WAYS_OF_MANY, many)
    if (longer := _with_longer_answers(alone, budget)) is not None:
        played["longer"] = _answers(longer, side.models, 1)
    confidence = 1 - 0.05 / sum(way != BOUND for way in played)
    how = Resampling.of(run.config, side.team.families, confidence=confidence)
    return [
        alone_score(way, answers, side.team.outcomes, how, is_trained=side.is_trained)
        for way, answers in played.items()
    ], budget


def _answers(alone: Run, models: Models, count: int) -> dict[str, list[Answer]]:
    """Returns `count` answers to every test task."""
    changes: dict[str, Any] = {"episodes_per_task": count}
    if count > 1 and alone.config.evaluate.temperature == 0:
        changes["temperature"] = None  # as in training: the same answer again and again is no second opinion
    config = alone.config.model_copy(update={"evaluate": alone.config.evaluate.model_copy(update=changes)})
    limits = {name: alone.sampling(name, agent).max_tokens for name, agent in alone.workflow.agents.items()}
    run = Run(config)
    played = play_team(
        run,
        models,
        run.tasks("test"),
        iteration=0,
        purpose=Purpose.AD_HOC,
        occasion=f"compare, {count} answers of {limits} tokens",
    )
    return answers_by_task(played.traces, played.rewards)


def _with_longer_answers(alone: Run, budget: float) -> Run | None:
    """Returns the run with an agent that may write as much as the team; None where it may already, or its context has no room."""
    ((name, agent),) = alone.workflow.agents.items()
    group = alone.config.group_of[name]
    limit = min(math.ceil(budget), alone.config.serve_config(group).max_model_len // 2)
    if limit <= alone.sampling(name, agent).max_tokens:
        return None
    data = alone.config.model_dump(mode="json", exclude_unset=True)
    data.setdefault("agents", {}).setdefault(name, {})["max_tokens"] = limit
    return Run(parse_config(data, f"longer answers of run {alone.run_id!r}"))


def _single_agent(config: RunConfig) -> tuple[str, dict[str, Any]]:
    """Returns the name of the single agent, and its workflow as a run config names it."""
    settings = _settings(config)
    assert settings is not None, "checked by alone_config"
    if settings.workflow is not None:
        agents = load_workflow(settings.workflow.path, settings.workflow.settings).agents
        if len(agents) != 1:
            raise ValueError(
                f"compare.workflow: {settings.workflow.path} has the agents {', '.join(sorted(agents))}: name a workflow of one agent"
            )
        return next(iter(agents)), settings.workflow.model_dump(mode="json")
    if settings.agent not in config.group_of:
        raise ValueError(
            f"compare.agent: {settings.agent!r} is no agent of the workflow: {', '.join(sorted(config.group_of))}"
        )
    of_team = config.workflow.model_dump(mode="json")
    alone = {
        "workflow": of_team["path"],
        "settings": of_team.get("settings", {}),
        "agent": settings.agent,
        "answer": settings.answer,
        "budget_tokens": 1,
    }
    return settings.agent, {"path": ALONE, "settings": alone}


def _measured(run: Run, iteration: int) -> Measured:
    measured = run.iteration(iteration).find(Measured)
    if measured is None:
        when = "before training" if iteration == 0 else f"after iteration {iteration}"
        raise ValueError(
            f"run {run.run_id!r} has not played its test tasks {when}: finish it first (troupe train), with tasks.test in its config"
        )
    return measured


def _settings(config: RunConfig) -> CompareConfig | None:
    return config.section_of("compare", CompareConfig)

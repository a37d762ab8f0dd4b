"""control: one agent alone on the test tasks, with the same model and as many completion tokens as the team.

What a team gains may be what more tokens gain. The agent answers each task again until it has spent the mean of the tokens that
the team's episodes took, and the majority counts (self-consistency, arXiv 2203.11171; why budgets must be equal: "Reasoning in
Token Economies", arXiv 2406.06461).
"""

from __future__ import annotations

from typing import Any

from pipelines.episodes.sampling import Pass, Progress, sample_episodes
from pipelines.evaluation.played import Played
from pipelines.run.run import Run
from serve_apps.authoring.workflow import load_workflow
from serve_apps.episode.team import TeamSpec
from serve_apps.workflows.alone import PATH as ALONE
from stores.journal.stage_results import Control
from stores.types import Purpose, Trace, team_key


def play_control(run: Run, team: Played, *, progress: Progress | None = None) -> Control | None:
    """Plays the control on the test tasks, on the engines that serve the team; None where the config asks for none.

    Args:
        team: what the team played on the same tasks, which sets the budget.
    """
    settings = run.config.evaluate.control
    if settings is None or not team.traces:
        return None
    budget = mean_tokens(team.traces)
    spec = control_spec(run, team, budget)
    by = Pass.of(run, spec, iteration=0, purpose=Purpose.TEST)
    episodes_per_task = run.config.evaluate.episodes_per_task
    sampled = sample_episodes(run.tasks("test"), by, episodes_per_task=episodes_per_task, progress=progress)
    group = run.config.group_of[settings.agent]
    played = Played(run, sampled, {group: team.models[group]})
    run.traces.write_rewards(played.rewards)
    return Control(
        agent=settings.agent,
        budget_tokens=budget,
        num_tokens=mean_tokens(played.traces),
        num_answers=sum(len(trace.turns) for trace in played.traces) / max(1, len(played.traces)),
        score=played.score(run),
        outcomes={task: tuple(outcomes) for task, outcomes in played.outcomes.items()},
    )


def control_spec(run: Run, team: Played, budget: float) -> TeamSpec:
    """What acts in the control's episodes."""
    settings = run.config.evaluate.control
    assert settings is not None, "asked for by the config"
    agent, group = settings.agent, run.config.group_of[settings.agent]
    of_workflow: dict[str, Any] = {
        "workflow": run.config.workflow.path,
        "settings": dict(run.config.workflow.settings),
        "agent": agent,
        "answer": settings.answer,
        "budget_tokens": budget,
    }
    workflow = load_workflow(ALONE, of_workflow)
    temperature = run.config.evaluate.temperature or None  # not 0: the same answer again and again is no second opinion
    versions = {group: team.models[group].version}
    return TeamSpec(
        workflow=ALONE,
        settings=of_workflow,
        group_of={agent: group},
        tokenizers={group: team.models[group]},
        max_model_len={group: run.config.serve_config(group).max_model_len},
        sampling={agent: run.sampling(agent, workflow.agents[agent], temperature)},
        policy_versions=versions,
        team_key=team_key(
            workflow=ALONE,
            policy_versions=versions,
            prompts_sha256=workflow.prompts_sha256,
            occasion=f"{agent} of {run.config.workflow.path}, {settings.answer}, {budget} tokens",
        ),
        limits=run.config.collect.episode,
        chat_template_kwargs=run.config.template_kwargs({agent: group}),
    )


def mean_tokens(traces: list[Trace]) -> float:
    """Mean completion tokens per episode; 0 of none."""
    return sum(len(turn.completion_token_ids) for t in traces for turn in t.turns) / max(1, len(traces))

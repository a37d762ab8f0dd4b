"""summary: the stage results of an iteration -> its figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from pipelines.run.iteration import Iteration
from pipelines.run.run import Run
from pipelines.stages.table import STAGES
from stores.journal.journal import StageRow
from stores.journal.run_values import RunValue
from stores.journal.stage_results import (
    CALLED,
    CHOSEN,
    PART,
    PROBABILITY,
    STOP,
    AgentFigures,
    Collected,
    Decided,
    Evaluated,
    Scored,
    Synced,
    TeamScore,
    Trained,
    TrainedTeam,
)
from train_loops.config import TEAM

FUNNEL = ("attempts", "calls", "with_ids", "episodes_ok", "scored", "non_zero_advantage", "trained")
"""Steps from an agent's calls to the rows that were trained on."""
LEARNING_PARTS = ("old_logprobs", "advantages", "update")
"""Parts of training that are forward and backward passes; reading rows, checkpoints and commits count as overhead."""
IF_MEASURED = ("reward", "turns", "broken_share", "cut_share", "cached_prompt_share", "tool_error_share")
"""Figures of scoring that not every agent has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Results:
    """The results of all stages of one finished iteration."""

    collected: Collected
    scored: Scored
    trained: Mapping[str, Trained]
    """By model group."""
    team: TrainedTeam | None
    """Where one stage trained all model groups."""
    trains_in_turn: bool
    """Model groups trained one after another: in one stage, or on the GPUs of a shared pool."""
    synced: Synced
    evaluated: Evaluated
    decided: Decided

    @property
    def sampling_seconds(self) -> float:
        return self.collected.sampling_seconds + self.evaluated.sampling_seconds

    @property
    def num_tokens(self) -> int:
        return self.collected.num_tokens + self.evaluated.num_tokens

    @property
    def learning_seconds(self) -> float:
        """Forward and backward passes of the slowest model group; of all, where they are trained one after another."""
        each = [_learning_seconds(trained.metrics) for trained in self.trained.values()]
        return sum(each) if self.trains_in_turn else max(each)


def figures_of_iteration(run: Run, number: int) -> dict[str, Any] | None:
    """Computes the figures of an iteration from the results of its stages; None before all are done.

    They have the form of `report.ReportData.iterations`, without the warnings, and `source`: the other run's iteration whose
    traces it was trained on, or None.
    """
    results = _results(run, run.iteration(number))
    if results is None:
        return None
    seconds = _seconds(run, number)
    learning_seconds = min(seconds["train"], results.learning_seconds)
    team = {} if results.team is None else {TEAM: dict(results.team.team.metrics)}
    return {
        "iteration": number,
        "metrics": _metrics(results, seconds, learning_seconds, is_overlapping=run.config.loop.max_lag > 0),
        "agents": _agents(results),
        "groups": {group: dict(trained.metrics) for group, trained in results.trained.items()} | team,
        "funnel": _funnel(results.trained),
        "proofs": _proofs(results.synced),
        "failed_groups": dict(run.iteration(number).failed_groups),
        "seconds": seconds,
        "causes": dict(results.scored.causes or {}),
        "repeated": _repeated(results),
        "evaluation": _evaluation(results.evaluated, results.decided),
        "versions": {group: trained.model.version for group, trained in results.trained.items()},
        "source": None if (source := run.source(number)) is None else str(source),
    }


def trained_agents(run: Run, number: int) -> dict[str, dict[str, dict[str, float]]]:
    """Returns what training says of agents, by model group; scoring names some of it otherwise in `agents`."""
    return {group: _learned(trained) for group, trained in run.iteration(number).trained.items() if trained.agents}


def _results(run: Run, iteration: Iteration) -> _Results | None:
    """None while any stage of the iteration is not done."""
    decided, evaluated = iteration.find(Decided), iteration.find(Evaluated)
    collected, scored, synced = iteration.find(Collected), iteration.find(Scored), iteration.find(Synced)
    if decided is None or evaluated is None or collected is None or scored is None or synced is None:
        return None
    return _Results(
        collected=collected,
        scored=scored,
        trained=iteration.trained,
        team=iteration.find_team(),
        trains_in_turn=iteration.is_team_trained or run.config.pool == "shared",
        synced=synced,
        evaluated=evaluated,
        decided=decided,
    )


def _metrics(
    results: _Results, seconds: Mapping[str, float], learning_seconds: float, *, is_overlapping: bool
) -> dict[str, float]:
    sampling_seconds = results.sampling_seconds
    # Side by side, the shorter of the two lies within the longer one.
    both = (sampling_seconds, learning_seconds)
    work = max(both) if is_overlapping else sum(both)
    rewards = [figures["reward"] for figures in results.scored.agents.values() if "reward" in figures]
    measured = {
        "outcome": results.scored.outcome,
        "reward": fmean(rewards) if rewards else None,
        "tokens_per_s": results.num_tokens / sampling_seconds if sampling_seconds else None,
        "sync_seconds": results.synced.seconds,
        "overhead_share": max(0.0, 1 - work / seconds["total"]) if seconds["total"] else None,
        "sampling_seconds": sampling_seconds,
        "training_seconds": learning_seconds,
        **({"cost": cost.get("mean"), "cost_multiplier": cost["multiplier"]} if (cost := results.scored.cost) else {}),
        **_inferred(results.scored),
        **(results.scored.figures or {}),
        "solved": results.scored.solved,
        **{f"{STOP}{reason}": share for reason, share in (results.scored.stop_reasons or {}).items()},
    }
    return {name: value for name, value in measured.items() if value is not None}


def _inferred(scored: Scored) -> dict[str, float | None]:
    if scored.is_credit_inferred is None:
        return {}
    return {"credit_fidelity": scored.credit_fidelity, "credit_inferred": float(scored.is_credit_inferred)}


def _agents(results: _Results) -> dict[str, dict[str, float]]:
    """By agent, what training and scoring say of it; what both name, as `completion_tokens`, is scoring's."""
    agents: dict[str, dict[str, float]] = {
        agent: {
            "format": figures["format_share"],
            "completion_tokens": figures["completion_tokens"],
            **{name: figures[name] for name in IF_MEASURED if name in figures},
            **{name: value for name, value in figures.items() if name.startswith((CHOSEN, PROBABILITY, PART, CALLED))},
        }
        for agent, figures in results.scored.agents.items()
    }
    for trained in results.trained.values():
        for agent, figures in _learned(trained).items():
            agents[agent] = {**figures, **agents.get(agent, {})}
    return agents


def _learned(trained: Trained) -> dict[str, dict[str, float]]:
    """By agent, the figures of training without those of the funnel."""
    return {
        agent: {name: value for name, value in figures.items() if not name.startswith("funnel/")}
        for agent, figures in trained.agents.items()
    }


def _funnel(trained: Mapping[str, Trained]) -> dict[str, dict[str, int]]:
    """By agent, how many calls are left at each step."""
    return {
        agent: {step: int(figures[f"funnel/{step}"]) for step in FUNNEL if f"funnel/{step}" in figures}
        for result in trained.values()
        for agent, figures in result.agents.items()
    }


def _repeated(results: _Results) -> dict[str, dict[str, int]]:
    """By kind of episodes and agent, how many attempts at model calls were repeated; those without any are left out."""
    scores = {"candidate": results.evaluated.candidate, "champion": results.evaluated.champion}
    played = {"training": results.scored.agents}
    played |= {f"gate, {team}": score.agents for team, score in scores.items() if score is not None}
    repeated = {where: repeated_calls(agents) for where, agents in played.items()}
    return {where: counts for where, counts in repeated.items() if counts}


def repeated_calls(agents: AgentFigures) -> dict[str, int]:
    """By agent, how many attempts at its model calls were repeated; agents without any are left out."""
    counts = {
        agent: int(of.get("attempts", of["calls"]) - of["calls"]) for agent, of in agents.items() if "calls" in of
    }
    return {agent: count for agent, count in counts.items() if count}


def _proofs(synced: Synced) -> dict[str, dict[str, float]]:
    """By model group, what its replicas' proofs found: the largest differences, and whether all rest on the hashes alone."""
    found: dict[str, dict[str, float]] = {}
    for group in synced.policy_versions:
        proofs = [proof for proof in synced.proofs if proof["model_group"] == group]
        old = [proof["max_difference_old"] for proof in proofs if proof["max_difference_old"] is not None]
        if proofs:
            found[group] = {
                "difference_new": max(proof["max_difference_new"] for proof in proofs),
                **({"difference_old": max(old)} if old else {}),
                "noise": max(proof.get("noise", 0.0) for proof in proofs),
                "is_indistinguishable": float(all(proof["verdict"] == "indistinguishable" for proof in proofs)),
            }
    return found


def _evaluation(evaluated: Evaluated, decided: Decided) -> dict[str, Any] | None:
    """The comparison with the champion; None where nothing was played."""
    candidate, champion = evaluated.candidate, evaluated.champion
    if candidate is None:
        return None
    return {
        "candidate": _interval(candidate),
        "champion": None if champion is None else _interval(champion),
        "gain": None if evaluated.gain is None else asdict(evaluated.gain),
        "bound": None if evaluated.bound is None else asdict(evaluated.bound),
        "causes": {
            "candidate": dict(candidate.causes or {}),
            "champion": {} if champion is None else dict(champion.causes or {}),
        },
        "num_tasks": candidate.num_tasks,
        "solved": {
            "candidate": candidate.solved,
            "champion": None if champion is None else champion.solved,
        },
        "pass_at_k": candidate.pass_at_k,
        "verdict": decided.verdict,
        "condition": decided.condition,
        "team_version": decided.team_version,
    }


def _interval(score: TeamScore) -> dict[str, float]:
    return {"mean": score.accuracy, "low": score.ci95[0], "high": score.ci95[1]}


def _seconds(run: Run, iteration: int) -> dict[str, float]:
    """Seconds of every stage; `train` is the time in which any of its model groups was trained, `total` the iteration's."""
    rows = run.journal.stages(run.run_id, iteration)
    seconds: dict[str, float] = {}
    for stage in STAGES.values():
        own_rows = [row for row in rows if row.stage == stage.name]
        if own_rows:
            seconds[stage.name] = _span(own_rows) if stage.is_per_model_group else own_rows[0].seconds or 0.0
    # What is done by `troupe stage` or a schedule notes no wall time: that of a sitting before it is not that of the iteration.
    least = 0.0 if run.config.loop.max_lag else sum(seconds.values())
    total = _seconds_since_last(run, iteration, rows) if run.config.loop.max_lag else least
    seconds["total"] = max(wall_seconds(run, RunValue.WALL.of(iteration), total), least)
    return seconds


def _seconds_since_last(run: Run, iteration: int, rows: Sequence[StageRow]) -> float:
    """Seconds from the end of the iteration before, or the begin of the first stage if that is later, to the end of this one."""
    before = run.journal.stages(run.run_id, iteration - 1)
    begins = [row.ended_at for row in before if row.stage == Decided.STAGE and row.ended_at]
    begins.append(min(row.started_at for row in rows if row.stage in STAGES))
    return max(row.ended_at for row in rows if row.stage in STAGES and row.ended_at) - max(begins)


def _span(rows: Sequence[StageRow]) -> float:
    """Seconds in which any of them was done: between the sittings of a run that is continued may lie a night."""
    seconds, last = 0.0, -math.inf
    for row in sorted(rows, key=lambda row: row.started_at):
        if row.ended_at:
            seconds += max(row.ended_at - max(row.started_at, last), 0.0)
            last = max(row.ended_at, last)
    return seconds


def wall_seconds(run: Run, name: str, default: float) -> float:
    """Returns the seconds that the journal notes under a name, or else `default`."""
    wall = run.journal.value(run.run_id, name)
    return float(wall["seconds"]) if wall else default


def _learning_seconds(metrics: Mapping[str, float]) -> float:
    return sum(metrics.get(f"train/{part}_s", 0.0) for part in LEARNING_PARTS)

"""summary: what the journal holds of a run -> figures per iteration and the run's report.json."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.evaluation.statistics import paired_interval
from pipelines.monitoring.training_warnings import all_symptoms, find_symptoms
from pipelines.run.champions import champion_version
from pipelines.run.provenance import git_commit
from pipelines.run.run import Run
from train_loops.config import TEAM

FUNNEL = ("calls", "with_ids", "episodes_ok", "scored", "non_zero_advantage", "trained")


def iteration_summary(run: Run, iteration: int) -> dict[str, Any] | None:
    """Figures of one finished iteration, in the form of `report.ReportData.iterations`; None before it is done."""
    rows = summaries(run, last=iteration)
    return rows[-1] if rows and rows[-1]["iteration"] == iteration else None


def summaries(run: Run, *, last: int | None = None) -> list[dict[str, Any]]:
    """Figures of every finished iteration, up to `last` where it is given, each with the symptoms seen then."""
    end = run.config.iterations if last is None else last
    rows = [row for k in range(1, end + 1) if (row := _figures(run, k))]
    return [row | {"symptoms": find_symptoms(rows[: i + 1])} for i, row in enumerate(rows)]


def _figures(run: Run, iteration: int) -> dict[str, Any] | None:
    refs = {stage: run.journal.ref(run.key(iteration, stage)) for stage in ("collect", "score", "sync", "evaluate")}
    promoted = run.journal.ref(run.key(iteration, "promote"))
    if promoted is None or any(ref is None for ref in refs.values()):
        return None
    collect, score, sync, evaluation = (refs[s] for s in ("collect", "score", "sync", "evaluate"))
    assert collect and score and sync and evaluation, "checked above"
    trained = {group: ref or {} for group, ref in run.train_refs(iteration).items()}
    of_all = run.journal.ref(run.key(iteration, "train", TEAM)) if run.config.team_config is not None else None
    team = {} if of_all is None else {TEAM: of_all["team"]}
    seconds = _seconds(run, iteration)
    sampling = collect["sampling_seconds"] + evaluation.get("sampling_seconds", 0.0)
    each = [_training_seconds(ref.get("metrics", {})) for ref in trained.values()]
    training = min(seconds["train"], sum(each) if team else max(each))  # with a whole-team learner one after another
    tokens = collect["num_tokens"] + evaluation.get("num_tokens", 0)
    agents = {
        agent: {
            "reward": figures["reward"],
            "format": figures["format_share"],
            "completion_tokens": figures["completion_tokens"],
            **{name: figures[name] for name in ("broken_share",) if name in figures},
        }
        for agent, figures in score["agents"].items()
    }
    funnel: dict[str, dict[str, int]] = {}
    trained_agents: dict[str, dict[str, dict[str, float]]] = {}
    for group, ref in trained.items():
        for agent, figures in ref.get("agents", {}).items():
            learned = {k: v for k, v in figures.items() if not k.startswith("funnel/")}
            trained_agents.setdefault(group, {})[agent] = learned
            agents[agent] = {**learned, **agents.get(agent, {})}  # what both name, as completion_tokens, is score's
            funnel[agent] = {step: int(figures[f"funnel/{step}"]) for step in FUNNEL if f"funnel/{step}" in figures}
    return {
        "iteration": iteration,
        "metrics": {
            "outcome": score["outcome"],
            "reward": _mean([f["reward"] for f in score["agents"].values()]),
            "tokens_per_s": tokens / sampling if sampling else 0.0,
            "sync_seconds": sync["seconds"],
            "overhead_share": max(0.0, 1 - (sampling + training) / seconds["total"]),
            "sampling_seconds": sampling,
            "training_seconds": training,
        },
        "agents": agents,
        "groups": {group: ref.get("metrics", {}) for group, ref in (trained | team).items()},
        "trained_agents": trained_agents,
        "funnel": funnel,
        "failed_groups": run.failed_groups(iteration),
        "seconds": seconds,
        "evaluation": _evaluation(evaluation, promoted),
        "versions": {group: ref["model"]["version"] for group, ref in trained.items() if ref},
    }


def _evaluation(report: Mapping[str, Any], promoted: Mapping[str, Any]) -> dict[str, Any] | None:
    if "skipped" in report:
        return None
    champion = report["champion"]
    return {
        "candidate": _interval(report),
        "champion": _interval(champion) if champion else None,
        "gain": report["gain"],
        "num_tasks": report["num_tasks"],
        "pass_at_k": report["pass_at_k"],
        "verdict": promoted["verdict"],
        "condition": promoted["condition"],
        "team_version": promoted["team_version"],
    }


def _interval(report: Mapping[str, Any]) -> dict[str, float]:
    return {"mean": report["accuracy"], "low": report["ci95"][0], "high": report["ci95"][1]}


def _seconds(run: Run, iteration: int) -> dict[str, float]:
    """Seconds of every stage; `train` is the wall time over its model groups, `total` the iteration's."""
    rows = run.journal.stages(run.run_id, iteration)
    seconds: dict[str, float] = {}
    for stage in ("collect", "score", "train", "sync", "evaluate", "promote"):
        mine = [row for row in rows if row.stage == stage]
        if stage == "train" and mine:
            ends = [row.ended_at for row in mine if row.ended_at]
            seconds[stage] = max(max(ends) - min(row.started_at for row in mine), 0.0)
        elif mine:
            seconds[stage] = mine[0].seconds or 0.0
    wall = run.journal.value(run.run_id, f"wall/{iteration}")
    seconds["total"] = wall["seconds"] if wall else sum(seconds.values())
    return seconds


def _training_seconds(metrics: Mapping[str, float]) -> float:
    """Forward and backward passes only: reading rows, checkpoints and commits count as overhead."""
    return sum(metrics.get(f"train/{part}_s", 0.0) for part in ("old_logprobs", "advantages", "update"))


def run_report(run: Run, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """report.json: the run's result with the figures it rests on. Args: rows: see `summaries`."""
    begun = [row for row in run.journal.stages(run.run_id, 0) if row.stage == "warmstart"]
    before, after = (run.journal.ref(run.key(k, "measure")) for k in (0, run.config.iterations))
    delta = None
    if before and after:
        both = before["outcomes"].keys() & after["outcomes"].keys()
        delta = paired_interval(
            {task: after["outcomes"][task] for task in both},
            {task: before["outcomes"][task] for task in both},
            seed=run.config.seed,
            num_samples=run.config.evaluate.bootstrap_samples,
        )
    gaps = [g for row in rows for g in row["groups"].values() if "train/logprob_gap_mean" in g]
    totals: dict[str, float] = {}
    for row in rows:
        for stage, value in row["seconds"].items():
            totals[stage] = totals.get(stage, 0.0) + value
    wall = run.journal.value(run.run_id, "wall")
    return {
        "run": run.run_id,
        "workflow": run.config.workflow.path,
        "algorithm": {g: run.config.train_config(g).algorithm for g in run.config.model_groups},
        "model_groups": {g: list(m.agents) for g, m in run.config.model_groups.items()},
        "seed": run.config.seed,
        "before": _measured(before),
        "after": _measured(after),
        "delta": delta.mean if delta else None,
        "delta_ci95": delta.ci95 if delta else None,
        "iterations": len(rows),
        "seconds": {
            **{stage: value for stage, value in totals.items() if stage != "total"},
            "warmstart": (begun[0].seconds or 0.0) if begun else 0.0,
            "iterations": totals.get("total", 0.0),
            "total": wall["seconds"] if wall else totals.get("total", 0.0),
        },
        "overhead_share": [row["metrics"]["overhead_share"] for row in rows],
        "logprob_gap": {
            "mean": _mean([g["train/logprob_gap_mean"] for g in gaps]),
            "max": max((g["train/logprob_gap_max"] for g in gaps), default=0.0),
        },
        "sync_seconds": max((row["metrics"]["sync_seconds"] for row in rows), default=0.0),
        "failed_groups": {str(row["iteration"]): row["failed_groups"] for row in rows if row["failed_groups"]},
        "symptoms": [str(symptom) for symptom in all_symptoms(rows)],
        "agents": rows[-1]["agents"] if rows else {},
        "funnel": rows[-1]["funnel"] if rows else {},
        "versions": rows[-1]["versions"] if rows else {},
        "team_version": champion_version(run),
        "commit": git_commit(),
        "cores": os.cpu_count(),
        "written_at": time.time(),
    }


def _measured(report: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if report is None:
        return None
    kept = ("accuracy", "num_tasks", "ci95", "policy_versions", "k", "pass_at_k", "num_failed", "ok_share", "sources")
    shares = {agent: figures["format_share"] for agent, figures in report["agents"].items()}
    return {key: report[key] for key in kept} | {"format_share": shares}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0

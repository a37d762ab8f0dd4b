"""answer_lineage: an answer of the gateway that was kept -> the team that gave it, that team's lineage, and what was trained on it.

    answer ── team version ──> lineage of the team                                           down
    answer ── collect.from_service ──> an iteration ──> model versions ──> teams             up

Shows no prompt and no answer. An answer that was not kept names its team version in `system_fingerprint` and `x-troupe-team`.
"""

from __future__ import annotations

from typing import Any

from pipelines.episodes.from_service import copy_id, has_store, taken_ids
from pipelines.report.lineage import lineage_of_episode, lineage_of_team, shaped_by_episode
from pipelines.run.run import Run
from stores.journal.stage_results import Collected
from stores.traces.served import ServedStore
from stores.types import SERVED, Trace


def lineage_of_id(run: Run, some_id: str) -> dict[str, Any]:
    """The lineage of an answer by its id, or of an episode by its id or a unique beginning of it; ValueError for neither."""
    trace = ServedStore(run.served_uri).served(some_id) if has_store(run) else None
    if trace is not None:
        return lineage_of_answer(run, trace)
    try:
        return lineage_of_episode(run, some_id)
    except ValueError as error:
        raise ValueError(
            f"{error}. Nor is an answer of this id kept in {run.served_uri}: only those whose request says store: true are "
            "(gateway.capture), and for a time. Any answer names its team version, in `system_fingerprint` and the header "
            f"`x-troupe-team`: `troupe lineage {run.team_name}@7` for {run.team_name}@7"
        ) from None


def lineage_of_answer(run: Run, trace: Trace) -> dict[str, Any]:
    """{"answer", "shaped", "shaped_by"}: what it is, what has learnt from it, and the lineage of the team that gave it.

    ValueError where a team gave it that is not this run's.
    """
    about = trace.outcome_metadata[SERVED]
    if about["team"] != run.team_name:
        raise ValueError(
            f"answer {trace.episode_id!r} was given by team {about['team']!r}, run {run.run_id!r} trains {run.team_name!r}: "
            "name that team's run with --run"
        )
    version, team = run.registry.load(run.team_name, about["team_version"])
    return {
        "answer": {
            "id": trace.episode_id,
            "at": trace.started_at,
            "status": trace.status.value,
            "team_version": version,
            "alias": about["alias"],
            "key": about["key"],
            "policy_versions": dict(trace.policy_versions),
            "sampled_by": _sampled_by(trace),
            "is_trainable": about["is_trainable"],
            "feedback": [
                {"key": feedback.key, "at": feedback.at, "score": feedback.score, "label": feedback.label}
                for feedback in ServedStore(run.served_uri).feedback_on([trace.episode_id])
            ],
        },
        "shaped": _shaped(run, trace.episode_id),
        "shaped_by": lineage_of_team(run, version, team),
    }


def _sampled_by(trace: Trace) -> dict[str, dict[str, Any]]:
    """By agent, the model group and versions that sampled its turns; "" where a caller asked the model group itself."""
    sampled_by: dict[str, dict[str, Any]] = {}
    for turn in trace.turns:
        entry = sampled_by.setdefault(turn.agent, {"model_group": turn.model_group, "versions": [], "num_turns": 0})
        entry["versions"] = sorted({*entry["versions"], turn.policy_version})
        entry["num_turns"] += 1
    return sampled_by


def _shaped(run: Run, trace_id: str) -> dict[str, Any] | None:
    """What the one iteration that took the answer in made of it; None where none did."""
    for iteration in range(1, run.config.iterations + 1):
        if trace_id in taken_ids(run, iteration):
            collected = run.iteration(iteration).find(Collected)
            if collected is None:
                return {"iteration": iteration, "episode_id": None, "trained": {}, "teams": []}
            copy = copy_id(run, iteration, trace_id, team_key=collected.traces.team_key)
            shaped = shaped_by_episode(run, run.traces.get_trace(copy, run_id=run.run_id))
            return {"iteration": iteration, "episode_id": copy, **shaped}
    return None

"""from_service: served episodes that callers gave feedback on -> episodes of an iteration, beside those that it samples.

    stores/traces/served.py ── scored, trainable, recent enough ──> copies in the run's store, one group ── score ──> caller's score

Each is taken once in a run. Other versions than the parent sampled them: the trainer weighs their tokens by importance and
leaves those of an agent out whose effective sample size is too small (train_loops/signal/mismatch.py). All of an iteration are one
group, so that group-relative estimators compare answers with a good score with those with a bad one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipelines.config.sections import FromServiceConfig
from pipelines.run.held_out import HeldOut
from pipelines.run.run import Run
from serve_apps.episode.team import TeamSpec
from stores.files import is_uri, local_path
from stores.journal.run_values import RunValue
from stores.traces.served import Feedback, ServedStore
from stores.types import SERVED, ModelVersionRef, Purpose, Trace, episode_id


def take_served(
    run: Run, iteration: int, *, team_spec: TeamSpec, models: Mapping[str, ModelVersionRef]
) -> dict[str, int]:
    """Stores the iteration's share of judged episodes; the same ones however often it is repeated.

    Returns {"taken", "held_out", "left": judged ones that cannot be trained on}.
    """
    config = run.config.collect.from_service
    assert config is not None, "collect: only where it is asked for"
    name = RunValue.FROM_SERVICE.of(iteration)
    selection = run.journal.value(run.run_id, name)
    if selection is None:  # pinned before anything is copied, so that a repetition takes the same ones
        fresh = _select(run, iteration, config, team_spec=team_spec, models=models)
        selection = run.journal.pin_value(run.run_id, name, fresh)
    trace_ids = set(selection["trace_ids"])
    store = ServedStore(run.served_uri)
    taken = [(t, f) for t, f in store.judged(since=0) if t.episode_id in trace_ids] if trace_ids else []
    run.traces.write_episodes(
        [_copy(run, iteration, trace, feedback, team_spec=team_spec) for trace, feedback in taken]
    )
    return {"taken": len(taken), "held_out": selection["held_out"], "left": selection["left"]}


def served_group(run: Run, iteration: int) -> str:
    """Group of an iteration's served episodes."""
    return f"served-{run.run_id}-{iteration}"


def taken_ids(run: Run, iteration: int) -> list[str]:
    """Ids of the served episodes that an iteration took in; empty where it took none."""
    selection = run.journal.value(run.run_id, RunValue.FROM_SERVICE.of(iteration)) or {}
    return list(selection.get("trace_ids", []))


def copy_id(run: Run, iteration: int, trace_id: str, *, team_key: str) -> str:
    """Id of the copy that an iteration trains on."""
    return episode_id(**_key(run, iteration, team_key), task_id=f"served/{trace_id}", episode_index=0)


def _key(run: Run, iteration: int, team_key: str) -> dict[str, Any]:
    return {"run_id": run.run_id, "iteration": iteration, "purpose": Purpose.TRAIN, "team_key": team_key}


def has_store(run: Run) -> bool:
    """Whether the run has a store of served episodes; a local one is not made by looking for it."""
    may_exist = is_uri(run.served_uri) or local_path(run.served_uri).exists()
    return may_exist and ServedStore(run.served_uri).is_there()


def _select(
    run: Run, iteration: int, config: FromServiceConfig, *, team_spec: TeamSpec, models: Mapping[str, ModelVersionRef]
) -> dict[str, Any]:
    """Ids of the episodes that the iteration takes, and how many it cannot."""
    if not has_store(run):
        return {"trace_ids": [], "held_out": 0, "left": 0}
    names = [RunValue.FROM_SERVICE.of(k) for k in range(1, iteration)]
    used = {trace_id for taken in run.journal.values(run.run_id, names).values() for trace_id in taken["trace_ids"]}
    judged = ServedStore(run.served_uri).judged(since=time.time() - config.max_age_days * 86_400)
    fresh = [(trace, feedback) for trace, feedback in judged if trace.episode_id not in used]
    held_out = HeldOut(run)
    allowed = [(trace, feedback) for trace, feedback in fresh if not held_out.has(trace)]
    # With `loop.max_lag` the versions that sample are older than those that answer and those that are trained from.
    newest = {group: ref.version if not run.config.loop.max_lag else iteration - 1 for group, ref in models.items()}
    trainable = [t for t, f in allowed if _can_train(t, f, config, team_spec=team_spec, newest=newest)]
    return {
        "trace_ids": [trace.episode_id for trace in trainable[-config.max_episodes :]],
        "held_out": held_out.num_seen,
        "left": len(allowed) - len(trainable),
    }


def _can_train(
    trace: Trace,
    feedback: Feedback,
    config: FromServiceConfig,
    *,
    team_spec: TeamSpec,
    newest: Mapping[str, int],
) -> bool:
    """Whether recent versions of the agents' own policies sampled its tokens, the caller's feedback is a number, and the
    episode is an outcome of the policy."""
    return (
        feedback.score is not None
        and trace.outcome_metadata.get(SERVED, {}).get("is_trainable", False)
        and trace.is_outcome
        and not trace.is_version_mixed
        and all(
            team_spec.group_of.get(turn.agent) == turn.model_group
            and turn.sampling.is_unfiltered
            and 0 <= newest[turn.model_group] - turn.policy_version <= config.max_policy_lag
            for turn in trace.turns
        )
    )


def _copy(run: Run, iteration: int, trace: Trace, feedback: Feedback, *, team_spec: TeamSpec) -> Trace:
    """The episode as one of the iteration, under an id of its own."""
    about = {**trace.outcome_metadata[SERVED], "trace_id": trace.episode_id, "score": feedback.score}
    return replace(
        trace,
        **_key(run, iteration, team_spec.team_key),
        episode_id=copy_id(run, iteration, trace.episode_id, team_key=team_spec.team_key),
        group_id=served_group(run, iteration),
        outcome_metadata={**trace.outcome_metadata, SERVED: about},
    )

"""lineage: a team version -> the models, iterations, episodes and rewards that shaped it; an episode -> what it shaped.

    team ── models ── parents ──> iterations ──> traces@v, rewards@v, evaluation, DAG runs and Ray jobs      down
    episode ──> the iteration whose trainers had rows of it ──> model versions ── children ──> teams                     up

Read from manifests, journal and registry; nothing is recorded for it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipelines.cluster.owner_links import owner_links
from pipelines.episodes.from_service import copy_id, has_store, taken_ids
from pipelines.run.run import Run, plain
from stores.journal.run_values import RunValue
from stores.journal.stage_results import Collected, Evaluated, Scored
from stores.registry.team import Team, TeamVersion
from stores.traces.served import ServedStore
from stores.types import SERVED, EpisodeRewards, ModelVersionRef, Trace
from stores.weights.manifest import REMOVED, Manifest
from train_loops.rows.samples import Funnel
from train_loops.signal.baselines import sibling_turns


def lineage_of_team(run: Run, version: int, team: Team) -> dict[str, Any]:
    """Collects what led to a team version: {"team", "models", "iterations", "episodes"}, the oldest iteration first.

    `episodes` counts those that were scored for the training of its models (`scored`: variants that others were compared with
    are among them), those that callers gave feedback on, and its own answers of the gateway that are kept.
    """
    models, iterations = {}, set[int]()
    for group, ref in sorted(team.models.items()):
        ancestors = _ancestors(run, ref)
        models[group] = [
            {"version": a.version, "uri": a.uri, "sha256": a.manifest_sha256, **_manifest(run, a)} for a in ancestors
        ]
        iterations |= {ancestor.version for ancestor in ancestors}
    data = [_iteration(run, number) for number in sorted(iterations)]
    return {
        "team": {
            "name": run.team_name,
            "version": version,
            "aliases": _team_version(run, version).aliases,
            "workflow": team.workflow,
            "credit": dict(team.credit),
            "prompts_sha256": team.prompts_sha256,
            "git_commit": team.git_commit,
            "workflow_commit": team.provenance.get("workflow_commit"),
            "code": sorted(team.code),
            "made_by": team.provenance.get("made_by"),
            "verdict": team.evaluation.get("verdict"),
            "condition": team.evaluation.get("condition"),
            "accuracy": team.evaluation.get("accuracy"),
        },
        "models": models,
        "iterations": data,
        "episodes": {
            "scored": sum(entry["rewards"]["num_episodes"] for entry in data if entry["rewards"]),
            "from_service": sum(entry["from_service"] for entry in data),
            "answers_kept": ServedStore(run.served_uri).kept_of(run.team_name, version) if has_store(run) else 0,
        },
    }


def lineage_of_episode(run: Run, episode_id: str) -> dict[str, Any]:
    """Collects what was trained on an episode: {"episode", "trained", "teams"}; `trained` is empty where nothing was.

    Raises ValueError for an unknown episode.
    """
    trace = run.traces.get_trace(episode_id, run_id=run.run_id)
    return {
        "episode": {
            "episode_id": trace.episode_id,
            "task_id": trace.task.task_id,
            "iteration": trace.iteration,
            "purpose": trace.purpose.value,
            "status": trace.status.value,
            "policy_versions": dict(trace.policy_versions),
            "answer": trace.outcome_metadata.get(SERVED, {}).get("trace_id"),
        },
        **shaped_by_episode(run, trace),
    }


def shaped_by_episode(run: Run, trace: Trace) -> dict[str, Any]:
    """What the run made of an episode, its own or another run's: {"trained", "teams"}; both empty where no trainer had a row of it."""
    shaped: dict[str, set[int]] = {}
    for iteration in _trained_on(run, trace):
        rewards = _rewards(run, trace, iteration)
        for group, result in run.iteration(iteration).find_trained().items():
            if result.model.version == iteration and _has_rows(run, trace, rewards, group, iteration):
                shaped.setdefault(group, set()).update([iteration, *_descendants(run, group, iteration)])
    trained = {group: sorted(versions) for group, versions in shaped.items()}
    teams = [
        {"version": team.version, "aliases": team.aliases, "policy_versions": dict(team.policy_versions)}
        for team in run.registry.versions(run.team_name)
        if any(team.policy_versions.get(group) in versions for group, versions in trained.items())
    ]
    return {"trained": trained, "teams": teams}


def _ancestors(run: Run, ref: ModelVersionRef) -> list[ModelVersionRef]:
    """The versions that led to this one, itself first; removed ones too; they end where one is unknown."""
    ancestors = [ref]
    while (parent := _parent(run, ancestors[-1])) is not None:
        ancestors.append(parent)
    return ancestors


def _parent(run: Run, ref: ModelVersionRef) -> ModelVersionRef | None:
    manifest = _known_manifest(run, ref)
    return None if manifest is None or manifest.parent is None else _known_ref(run, ref.model_group, manifest.parent)


def _manifest(run: Run, ref: ModelVersionRef) -> dict[str, Any]:
    manifest = _known_manifest(run, ref)
    if manifest is None:
        return {"note": "its files are gone"}
    is_removed = run.weights.ref(ref.model_group, ref.version) is None
    return {"parent": manifest.parent, "note": "; ".join(filter(None, [manifest.note, REMOVED * is_removed]))}


def _known_ref(run: Run, group: str, version: int) -> ModelVersionRef | None:
    """Returns the pointer to a version, also to one that was removed."""
    removed = run.weights.removed(group, version)
    return run.weights.ref(group, version) if removed is None else removed[0]


def _known_manifest(run: Run, ref: ModelVersionRef) -> Manifest | None:
    """Returns the manifest of a version, also of one that was removed; None where there is none."""
    try:
        return run.weights.manifest(ref)
    except ValueError:
        removed = run.weights.removed(ref.model_group, ref.version)
        return removed[1] if removed is not None and removed[0] == ref else None


def _descendants(run: Run, group: str, version: int) -> list[int]:
    """Later versions that were trained from this one, or from one that was."""
    lines = {version}
    for number in range(version + 1, run.config.iterations + 1):
        ref = _known_ref(run, group, number)
        if ref is not None and (manifest := _known_manifest(run, ref)) is not None and manifest.parent in lines:
            lines.add(number)
    return sorted(lines - {version})


def _iteration(run: Run, number: int) -> dict[str, Any]:
    """What an iteration read and wrote, with links to who did it."""
    iteration = run.iteration(number)
    collected, scored, evaluated = iteration.find(Collected), iteration.find(Scored), iteration.find(Evaluated)
    source = run.source(number)
    return {
        "iteration": number,
        "traces": None if collected is None else plain(collected.traces),
        "traces_from": None if source is None else str(source),
        "from_service": len(taken_ids(run, number)),
        "rewards": None if scored is None else plain(scored.rewards),
        "credit_version": None if scored is None else scored.credit_version,
        "sampled_by": None if collected is None else dict(collected.policy_versions),
        "verdict": None if evaluated is None else evaluated.verdict,
        "links": owner_links(run.journal.stages(run.run_id, number)),
    }


def _trained_on(run: Run, trace: Trace) -> list[int]:
    """Returns the iterations whose trainers were given the episode's group: its own, and those that have their traces from elsewhere."""
    name_of = {number: RunValue.SOURCE.of(number) for number in range(1, run.config.iterations + 1)}
    elsewhere = run.journal.values(run.run_id, name_of.values())
    numbers = []
    for number in sorted({trace.iteration, *(k for k, name in name_of.items() if name in elsewhere)}):
        collected = run.iteration(number).find(Collected)
        pinned = None if collected is None else collected.traces
        if (
            pinned is not None
            and (trace.run_id, trace.iteration, trace.purpose, trace.team_key)
            == (pinned.run_id, pinned.iteration, pinned.purpose, pinned.team_key)
            and trace.group_id not in pinned.excluded_groups
        ):
            numbers.append(number)
    return numbers


def _rewards(run: Run, trace: Trace, iteration: int) -> EpisodeRewards | None:
    """Returns the rewards that an iteration trained with."""
    scored = run.iteration(iteration).find(Scored)
    if scored is None:
        return None
    every = run.traces.rewards_of(trace.episode_id, run_id=trace.run_id, iteration=trace.iteration)
    return next((rewards for rewards in every if rewards.credit_version == scored.rewards.credit_version), None)


def _has_rows(run: Run, trace: Trace, rewards: EpisodeRewards | None, group: str, iteration: int) -> bool:
    """Whether the trainer of a model group had a row of the episode, by the rules of `train_loops.rows.samples`."""
    settings = run.config.train_config(group)
    turns = _sibling_turns(run, trace, iteration) if settings.estimator.variants else ()
    funnel = Funnel(model_group=group, train_mixed_versions=settings.train_mixed_versions)
    funnel.see(trace, rewards, sibling_turns=turns)
    return any(counts["scored"] for counts in funnel.counts.values())


def _sibling_turns(run: Run, trace: Trace, iteration: int) -> Collection[int]:
    """Returns the turns of a variant that train; none of an episode that is no variant, whose turns all do."""
    if not trace.variant:
        return ()
    pinned = run.traces.read_traces(run.iteration(iteration).collected.traces)
    return sibling_turns([other for other in pinned if other.group_id == trace.group_id]).get(trace.episode_id, ())


def _team_version(run: Run, version: int) -> TeamVersion:
    return next(team for team in run.registry.versions(run.team_name) if team.version == version)


# ---- answers of the gateway


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

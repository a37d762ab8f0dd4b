"""promote: the evaluation report and its verdict -> a team version in the registry, and which alias it gets.

Reads: the report of `evaluate`. Writes: a team version (alias `candidate`; `champion` where the gate says promote); and
which team serves production traffic, where `promote.deploy` says so.
"""

from __future__ import annotations

import inspect
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.cluster.owner_links import owner_links, stage_owner
from pipelines.run.champions import champion_version, history, hold_mlflow, hold_promotion, set_champion
from pipelines.run.iteration import Iteration
from pipelines.run.kept_weights import drop_unneeded
from pipelines.run.run import Run, plain
from pipelines.stages.table import StageCall
from stores.journal.journal import Lease
from stores.journal.stage_results import Collected, Decided, Evaluated, Scored
from stores.registry.registry import CANDIDATE
from stores.registry.team import Team
from stores.team_code import is_installed
from stores.types import ModelVersionRef

VERDICTS = {"promoted": "promote", "sent_back": "reject", "undecided": "inconclusive"}
"""What the end of a canary makes of the gate's `promote`."""


def promote(call: StageCall) -> Decided:
    """Registers the iteration's team, acts on the gate's verdict, and removes weights that nothing needs from then on."""
    decided = _decide(call.run, call.iteration, call.lease)
    if decided.verdict == "skipped":
        call.skip(decided.condition)
    call.lease.check()  # another process that took this stage over may need other versions
    drop_unneeded(call.run)
    return decided


def _decide(run: Run, iteration: Iteration, lease: Lease) -> Decided:
    evaluated, models = iteration.evaluated, iteration.models
    if evaluated.verdict == "skipped":
        version = None if evaluated.skipped is not None else champion_version(run)
        return Decided(verdict="skipped", condition=evaluated.condition, team_version=version)
    if evaluated.verdict == "promote":
        assert evaluated.champion is not None, "only a team that was compared with a champion may be promoted"
        compared = evaluated.champion.policy_versions
        models = {g: ref if g in evaluated.promotes else _of_champion(run, g, compared[g]) for g, ref in models.items()}
    own = replace(evaluated, candidate=evaluated.registered, promoted=None)  # with the figures of this very team
    version = register_team(run, models, iteration=iteration.number, evaluation=own.to_json())
    if evaluated.verdict == "promote":
        return _promote_version(run, models, version, evaluated=evaluated, lease=lease)
    return Decided(verdict=evaluated.verdict, condition=evaluated.condition, team_version=version)


def _of_champion(run: Run, group: str, version: int) -> ModelVersionRef:
    """Returns the version of a model group that was the champion's in the evaluation; the champion may be another one by now."""
    now = run.champion()[group]
    return now if now.version == version else run.model_ref(group, version)


def _promote_version(
    run: Run, models: Mapping[str, ModelVersionRef], version: int, *, evaluated: Evaluated, lease: Lease
) -> Decided:
    """Moves the champion, with the gateway as `promote.deploy` says; a canary may change the decision.

    Where somebody has moved the champion since the evaluation, the verdict says nothing about the present one, and nothing is moved.
    """
    reason, how = evaluated.condition, run.config.promote.deploy
    promoted = Decided(verdict="promote", condition=reason, team_version=version)
    with hold_promotion(run):
        lease.check()  # before the champion moves: another process may have taken this stage over
        if (outdated := _outdated(run, models, version, evaluated)) is not None:
            return outdated
        if how == "never":
            set_champion(run, models, version, reason=reason)
            return promoted
        from pipelines.release import production, traffic  # they need Ray Serve

        _, team = run.registry.load(run.team_name, version)
        deployed = production.deployed_route(run)
        # In a repeated stage the version may be deployed already; without a deployed team there is nothing to compare with.
        if how == "direct" or deployed is None or deployed.champion.team_version == version:
            production.move_champion_alone(run, version, team, reason=reason)
            return promoted
    canary = traffic.roll_out(run, version, team)
    condition = f"{reason}; canary {canary['verdict']}: {canary['reason']}"
    return Decided(verdict=VERDICTS[canary["verdict"]], condition=condition, team_version=version)


def _outdated(run: Run, models: Mapping[str, ModelVersionRef], version: int, evaluated: Evaluated) -> Decided | None:
    """Returns the decision on a team that may not become the champion any more though the gate promotes it; None where it may."""
    assert evaluated.champion is not None, "see _decide"
    compared, champion, own = dict(evaluated.champion.policy_versions), _versions(run.champion()), _versions(models)
    if champion == own:
        return None  # this stage moved it, was killed, and is repeated
    if champion != compared:
        why = f"the champion is no longer the one that it was compared with: {compared} then, {champion} now"
        return Decided(verdict="inconclusive", condition=f"{evaluated.condition}; {why}", team_version=version)
    # Numbers begin again where the registry was lost: the same number is the same team by its weights only.
    # The last champion of all was not sent back: where the journal's other line names one before it, this stage was killed between them.
    past = history(run)[:-1]
    if any(entry["team_version"] == version and entry.get("policy_versions", own) == own for entry in past):
        why = f"team version {version} has been the champion already, and was sent back"
        return Decided(verdict="reject", condition=f"{evaluated.condition}; {why}", team_version=version)
    return None


def _versions(models: Mapping[str, ModelVersionRef]) -> dict[str, int]:
    return {group: ref.version for group, ref in models.items()}


def register_team(
    run: Run, models: Mapping[str, ModelVersionRef], *, iteration: int, evaluation: Mapping[str, Any]
) -> int:
    """Registers a team version with everything needed to serve it again or to explain it; it becomes the candidate.

    Args: evaluation: what the gate saw, JSON values; empty for the first team.
    """
    team = Team(
        workflow=run.config.workflow.path,
        prompts=run.workflow.prompts,
        credit={**run.config.credit.model_dump(mode="json"), "version": run.credit_version},
        models=models,
        git_commit=git_commit(),
        run_id=run.run_id,
        iteration=iteration,
        evaluation=evaluation,
        config=run.config.model_dump(mode="json"),
        code=run.code,
        provenance=provenance_of(run, models, iteration),
    )
    with hold_mlflow(run):
        version = run.registry.register(run.team_name, team, code=Path(__file__).with_name("team_model.py"))
    run.registry.set_alias(run.team_name, CANDIDATE, version)
    return version


def provenance_of(run: Run, models: Mapping[str, ModelVersionRef], iteration: int) -> dict[str, Any]:
    """How a team came to be, as its manifest records it; JSON values.

    `data` holds by model group what its version was trained on, `links` the DAG run and the Ray jobs of the iteration.
    """
    return {
        "made_by": stage_owner(),
        "links": owner_links(run.journal.stages(run.run_id, iteration)),
        "workflow_commit": commit_of(Path(inspect.getfile(type(run.workflow))).parent),
        "data": {group: data for group, ref in models.items() if (data := _trained_on(run, ref)) is not None},
    }


def git_commit() -> str:
    """Commit of the code that runs, from TROUPE_COMMIT (images set it) or git; empty where neither knows it.

    Where Troupe is installed a checkout around it is the user's.
    """
    folder = Path(__file__).parent
    return os.environ.get("TROUPE_COMMIT", "") or ("" if is_installed(folder) else _git(folder, "rev-parse", "HEAD"))


def commit_of(folder: Path) -> str:
    """Commit of the checkout that a folder is in, `-dirty` where files differ from it; empty where there is none."""
    return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(folder: Path, *arguments: str) -> str:
    try:
        answer = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return answer.stdout.strip()


def _trained_on(run: Run, ref: ModelVersionRef) -> dict[str, Any] | None:
    """The pinned data that a version was trained on, possibly another run's traces.

    A version bears the number of its iteration. None for version 0, and where the iteration's stages are not known.
    """
    iteration = run.iteration(ref.version)
    collected, scored = iteration.find(Collected), iteration.find(Scored)
    if not ref.version or collected is None or scored is None:
        return None
    return {
        "iteration": ref.version,
        "traces": plain(collected.traces),
        "rewards": plain(scored.rewards),
        "credit_version": scored.credit_version,
    }

"""promote: the evaluation report and its verdict -> a team version in the registry, and which alias it gets.

Reads: the report of `evaluate`. Writes: a team version (alias `candidate`; `champion` where the gate says promote); and
which team serves production traffic, where `promote.deploy` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.run.champions import champion_version, history, hold_promotion, set_champion
from pipelines.run.kept_weights import drop_unneeded
from pipelines.run.provenance import git_commit, provenance_of
from pipelines.run.run import Run
from stores.journal.journal import Lease
from stores.journal.stage_results import Decided, Evaluated
from stores.registry.registry import CANDIDATE
from stores.registry.team import Team
from stores.types import ModelVersionRef

VERDICTS = {"promoted": "promote", "sent_back": "reject", "undecided": "inconclusive"}
"""What the end of a canary makes of the gate's `promote`."""


def promote(run: Run, iteration: int, lease: Lease) -> Decided:
    """Registers the iteration's team, acts on the gate's verdict, and removes weights that nothing needs from then on."""
    decided = _decide(run, iteration, lease)
    lease.check()  # another process that took this stage over may need other versions
    drop_unneeded(run)
    return decided


def _decide(run: Run, iteration: int, lease: Lease) -> Decided:
    evaluated = run.iteration(iteration, needed_by="promote").evaluated
    if evaluated.verdict == "skipped":
        version = None if evaluated.skipped is not None else champion_version(run)
        return Decided(verdict="skipped", condition=evaluated.condition, team_version=version)
    models = run.trained(iteration)
    if evaluated.verdict == "promote":
        assert evaluated.champion is not None, "only a team that was compared with a champion may be promoted"
        compared = evaluated.champion.policy_versions
        models = {g: ref if g in evaluated.promotes else _of_champion(run, g, compared[g]) for g, ref in models.items()}
    own = replace(evaluated, candidate=evaluated.registered, promoted=None)  # with the figures of this very team
    version = register_team(run, models, iteration=iteration, evaluation=own.to_json())
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
    compared, champion = dict(evaluated.champion.policy_versions), _versions(run.champion())
    if champion == _versions(models):
        return None  # this stage moved it, was killed, and is repeated
    if champion != compared:
        why = f"the champion is no longer the one that it was compared with: {compared} then, {champion} now"
        return Decided(verdict="inconclusive", condition=f"{evaluated.condition}; {why}", team_version=version)
    if any(entry["team_version"] == version for entry in history(run)):
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
        credit={**run.config.credit.model_dump(), "version": run.credit_version},
        models=models,
        git_commit=git_commit(),
        run_id=run.run_id,
        iteration=iteration,
        evaluation=evaluation,
        config=run.config.model_dump(mode="json"),
        code=run.code,
        provenance=provenance_of(run, models, iteration),
    )
    version = run.registry.register(run.team_name, team, code=Path(__file__).with_name("team_model.py"))
    run.registry.set_alias(run.team_name, CANDIDATE, version)
    return version

"""promote: the evaluation report and its verdict -> a team version in the registry, and which alias it gets.

Reads: the report of `evaluate`. Writes: a team version (alias `candidate`; `champion` where the gate says promote); and
which team serves production traffic, where `promote.deploy` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.run.champions import champion_version, set_champion
from pipelines.run.kept_weights import drop_unneeded
from pipelines.run.provenance import git_commit, provenance_of
from pipelines.run.run import Run
from stores.journal import Lease
from stores.registry import CANDIDATE
from stores.stage_results import Decided
from stores.team import Team
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
        champion = run.champion()
        models = {g: ref if g in evaluated.promotes else champion[g] for g, ref in models.items()}
    version = register_team(run, models, iteration=iteration, evaluation=evaluated.to_json())
    lease.check()  # before the champion moves: another process may have taken this stage over
    if evaluated.verdict == "promote":
        return _promote_version(run, models, version, reason=evaluated.condition)
    return Decided(verdict=evaluated.verdict, condition=evaluated.condition, team_version=version)


def _promote_version(run: Run, models: Mapping[str, ModelVersionRef], version: int, *, reason: str) -> Decided:
    """Moves the champion, with the gateway as `promote.deploy` says; a canary may change the decision."""
    promoted = Decided(verdict="promote", condition=reason, team_version=version)
    how = run.config.promote.deploy
    if how == "never":
        set_champion(run, models, version, reason=reason)
        return promoted
    from pipelines.release import production, traffic  # they need Ray Serve

    _, team = run.registry.load(run.team_name, version)
    deployed = production.deployed_route(run)
    # In a repeated stage the version may be deployed already; without a deployed team there is nothing to compare with.
    if how == "direct" or deployed is None or deployed.champion.team_version == version:
        production.move_champion(run, version, team, reason=reason)
        return promoted
    canary = traffic.roll_out(run, version, team)
    condition = f"{reason}; canary {canary['verdict']}: {canary['reason']}"
    return Decided(verdict=VERDICTS[canary["verdict"]], condition=condition, team_version=version)


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
        provenance=provenance_of(run, models, iteration),
    )
    version = run.registry.register(run.team_name, team, code=Path(__file__).with_name("team_model.py"))
    run.registry.set_alias(run.team_name, CANDIDATE, version)
    return version

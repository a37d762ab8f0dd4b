"""promote: the evaluation report and its verdict -> a team version in the registry, and which alias it gets.

Reads: the report of `evaluate`. Writes: a team version (alias `candidate`; `champion` where the gate says promote); and who
answers behind the gateway, where `promote.into_service` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.run.champions import champion_version, set_champion
from pipelines.run.provenance import git_commit, provenance_of
from pipelines.run.run import Run
from stores.journal import Lease
from stores.registry import CANDIDATE
from stores.team import Team
from stores.types import ModelVersionRef


def promote(run: Run, iteration: int, lease: Lease) -> dict[str, Any]:
    """Registers the iteration's team and acts on the gate's verdict; returns {"verdict", "condition", "team_version"}."""
    report = run.journal.ref(run.key(iteration, "evaluate"))
    if report is None:
        raise ValueError(f"promote of iteration {iteration} needs evaluate, which is not done")
    decision = {"verdict": report["verdict"], "condition": report["condition"]}
    if decision["verdict"] == "skipped":
        return {**decision, "team_version": None if "skipped" in report else champion_version(run)}
    models = run.trained(iteration)
    if decision["verdict"] == "promote":
        models = {group: ref if group in report["promotes"] else run.champion()[group] for group, ref in models.items()}
    version = register(run, models, iteration=iteration, report=report)
    lease.check()
    if decision["verdict"] == "promote":
        decision = _promoted(run, models, version, reason=decision["condition"])
    return {**decision, "team_version": version}


def _promoted(run: Run, models: Mapping[str, ModelVersionRef], version: int, *, reason: str) -> dict[str, Any]:
    """Moves the champion, with the gateway as `promote.into_service` says; what is the decision then."""
    how, promoted = run.config.promote.into_service, {"verdict": "promote", "condition": reason}
    if how == "never":
        set_champion(run, models, version, reason=reason)
        return promoted
    from pipelines.release import production, traffic  # they need Ray Serve

    _, team = run.registry.load(run.team_name, version)
    found = production.in_service(run)
    if how == "direct" or found is None or found.champion.team_version == version:  # of a stage that is repeated
        production.move_champion(run, version, team, reason=reason)
        return promoted
    told = traffic.roll_out(run, version, team)
    verdict = {"promoted": "promote", "sent_back": "reject", "undecided": "inconclusive"}[told["verdict"]]
    return {"verdict": verdict, "condition": f"{reason}; canary {told['verdict']}: {told['reason']}"}


def register(run: Run, models: dict[str, ModelVersionRef], *, iteration: int, report: dict[str, Any]) -> int:
    """A team version with everything needed to serve it again or to explain it; it becomes the candidate."""
    team = Team(
        workflow=run.config.workflow.path,
        prompts=run.workflow.prompts,
        credit={**run.config.credit.model_dump(), "version": run.credit_version},
        models=models,
        git_commit=git_commit(),
        run_id=run.run_id,
        iteration=iteration,
        evaluation=report,
        config=run.config.model_dump(mode="json"),
        provenance=provenance_of(run, models, iteration),
    )
    version = run.registry.register(run.team_name, team, code=Path(__file__).with_name("team_model.py"))
    run.registry.set_alias(run.team_name, CANDIDATE, version)
    return version

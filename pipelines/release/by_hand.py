"""by_hand: the champion, moved by hand: promote a registered team version, or roll back.

Moving the champion proves first that the engines serve the version's weights, so that an alias never names what cannot
be served. It waits while a stage uses the engines, and the next stage puts back what it needs.
"""

from __future__ import annotations

from typing import Any

from pipelines.release.production import move_champion
from pipelines.run.champions import champion_version, followed, history
from pipelines.run.run import Run, plain
from pipelines.run.serving import serve
from pipelines.run.watchdog import Watchdog
from serve_apps.policy.proof import Proof
from stores.registry.team import Team


def promote_version(run: Run, version: int, *, reason: str, is_rollback: bool = False) -> dict[str, Any]:
    """Makes a registered team version the champion; returns {"team_version", "before", "proofs", "deployed"}.

    Where the team is behind a gateway, the gateway's requests are answered by this version from then on, too.

    Raises ValueError for a version that is not registered, belongs to other model groups, or whose weights are gone or not
    what they were, before an engine is touched; SyncError where the engines do not serve them. The champion stays then.
    """
    _, team = run.registry.load(run.team_name, version)
    check_groups(run, team, version)
    _check_weights(run, team, version, whole=not is_rollback)
    before = champion_version(run)
    watchdog = Watchdog.of_section(run, "promote-version", "sync")

    def serve_and_set_champion() -> tuple[list[Proof], dict[str, Any] | None]:
        proofs, _ = serve(run, dict(team.models), always_prove=True)
        return proofs, move_champion(run, version, team, reason=reason, is_rollback=is_rollback)

    proofs, switched = watchdog.watch(serve_and_set_champion, alone=run.hold_engines())
    return {
        "team_version": version,
        "before": before,
        "proofs": [plain(proof) for proof in proofs],
        "deployed": switched,
    }


def rollback(run: Run, *, to: int | None, reason: str) -> dict[str, Any]:
    """Makes an earlier champion the champion again: `to`, or the one that the present one followed (alias `previous`)."""
    past = history(run)
    champions = [entry["team_version"] for entry in past]
    if to is None:
        to = followed(past)
        if to is None:
            present = champion_version(run)
            raise ValueError(f"team {run.team_name!r} had no champion before {present}: nothing to roll back to")
    elif to not in champions:
        known = ", ".join(map(str, sorted(set(champions)))) or "none"
        raise ValueError(f"team version {to} of {run.team_name!r} never was champion (these were: {known}): promote it")
    return promote_version(run, to, reason=reason, is_rollback=True)


def check_groups(run: Run, team: Team, version: int) -> None:
    """Raises ValueError where a team version has other model groups than the run config."""
    if set(team.models) != set(run.config.model_groups):
        raise ValueError(
            f"team version {version} has the model groups {sorted(team.models)}, the run config has "
            f"{sorted(run.config.model_groups)}: use the run config that it was trained with"
        )


def _check_weights(run: Run, team: Team, version: int, *, whole: bool) -> None:
    """Args: whole: read every file, too; without it a version that is loaded still comes back within seconds."""
    for group, ref in sorted(team.models.items()):
        try:
            base = run.weights.manifest(ref).base
            for part in (ref, base) if whole else ():
                if part is not None:
                    run.weights.verify(part)
        except ValueError as error:
            raise ValueError(
                f"team version {version} of {run.team_name!r} cannot be deployed, model group {group!r}: {error}; "
                "nothing was changed"
            ) from None

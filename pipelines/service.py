"""service: which team is in service, moved by hand: promote a registered version, roll back, watch the champion.

Moving the champion proves first that the engines serve the version's weights, so that an alias never names what cannot
be served. It waits while a stage uses the engines, and the next stage puts back what it needs.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from pipelines.collector import end_collectors
from pipelines.evaluate import play
from pipelines.production import in_service, put_into_service
from pipelines.promote import champion_version, crown, history
from pipelines.run import Run, plain
from pipelines.serving import serve
from pipelines.tasks import digest
from pipelines.watchdog import Watchdog
from serve_apps.proof import Proof
from stores.registry import CHAMPION, Team
from stores.types import Purpose

RESUMED_S = 86_400
"""A watching that was interrupted is gone on with if it began so recently; an older one is begun anew."""


def promote_version(run: Run, version: int, *, reason: str) -> dict[str, Any]:
    """Makes a registered team version the champion; returns {"team_version", "before", "proofs", "in_service"}.

    Where the team is behind a gateway, the gateway's requests are answered by this version from then on, too.

    Raises ValueError for a version that is not registered or belongs to other model groups, SyncError where the engines
    do not serve its weights; the champion stays then.
    """
    _, team = run.registry.load(run.team_name, version)
    _check(run, team, version)
    before = champion_version(run)
    watchdog = Watchdog(run, run.key(0, "promote-version"), timeout_s=run.config.sync.stage_timeout_s)

    def serve_and_crown() -> tuple[list[Proof], dict[str, Any] | None]:
        proofs, _ = serve(run, dict(team.models), always_prove=True)
        switched = None if in_service(run) is None else put_into_service(run, version, team)
        crown(run, dict(team.models), version, reason=reason)
        return proofs, switched

    proofs, switched = watchdog.watch(serve_and_crown, alone=run.hold_engines())
    return {
        "team_version": version,
        "before": before,
        "proofs": [plain(proof) for proof in proofs],
        "in_service": switched,
    }


def rollback(run: Run, *, to: int | None, reason: str) -> dict[str, Any]:
    """Makes an earlier champion the champion again: `to`, or the one that the present one once followed."""
    champions = [entry["team_version"] for entry in history(run)]
    present = champion_version(run)
    if to is None:
        first_reign = champions.index(present) if present in champions else 0
        if not first_reign:
            raise ValueError(f"team {run.team_name!r} had no champion before {present}: nothing to roll back to")
        to = champions[first_reign - 1]  # twice in a row goes two back, and never forward again
    elif to not in champions:
        known = ", ".join(map(str, sorted(set(champions)))) or "none"
        raise ValueError(f"team version {to} of {run.team_name!r} never was champion (these were: {known}): promote it")
    return promote_version(run, to, reason=reason)


def watch(run: Run, alias: str, sections: Sequence[str]) -> dict[str, Any]:
    """A registered team on the run's own sets of tasks, e.g. test and sentinel; the champion's result is kept.

    Each watching plays every task; one that was interrupted keeps its episodes when it is repeated.

    Returns {"team_version", "accuracy", "sections"}; `accuracy` is that on the test tasks.
    """
    version, team = run.registry.load(run.team_name, int(alias) if alias.isdigit() else alias)
    _check(run, team, version)
    given = [section for section in sections if getattr(run.config.tasks, section, None) is not None]
    if not given:
        raise ValueError(f"none of tasks.{', tasks.'.join(sections)} is in the run config: give a set of tasks to play")
    found: dict[str, Any] = {}
    watching = _watching(run, version)
    for section in given:
        watchdog = Watchdog(
            run,
            run.key(0, f"watch-{section}"),
            timeout_s=run.config.evaluate.stage_timeout_s,
            recover=end_collectors,
        )
        tasks = run.tasks(section)
        work = partial(play, run, dict(team.models), tasks, iteration=0, purpose=Purpose.AD_HOC)
        on_occasion = partial(work, occasion=f"watch/{watching}/{section}/{digest(tasks)}")
        report = watchdog.watch(on_occasion, alone=run.hold_engines()).report(run)
        found[section] = {key: report[key] for key in ("accuracy", "ci95", "num_tasks", "ok_share")}
    run.journal.put_value(run.run_id, "watching", {"team_version": None})
    ref = {"team_version": version, "accuracy": found.get("test", {}).get("accuracy"), "sections": found}
    if alias == CHAMPION:
        run.journal.put_value(run.run_id, "watched", ref)
    return ref


def _watching(run: Run, version: int) -> str:
    """Key of this watching: that of the team's last one where it was interrupted, else a new one."""
    last = run.journal.value(run.run_id, "watching")
    if last and last["team_version"] == version and last["began_at"] > time.time() - RESUMED_S:
        return str(last["key"])
    key = uuid.uuid4().hex[:12]
    run.journal.put_value(run.run_id, "watching", {"team_version": version, "key": key, "began_at": time.time()})
    return key


def _check(run: Run, team: Team, version: int) -> None:
    if set(team.models) != set(run.config.model_groups):
        raise ValueError(
            f"team version {version} has the model groups {sorted(team.models)}, the run config has "
            f"{sorted(run.config.model_groups)}: use the run config that it was trained with"
        )

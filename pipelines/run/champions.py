"""champions: which team version is the champion of a run, which one it followed, and how a new one is set."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from pipelines.cluster.observe import Observer, tell
from pipelines.cluster.owner_links import stage_owner
from pipelines.run.run import Run, plain
from stores.journal.journal import Lease
from stores.journal.run_values import RunValue
from stores.registry.registry import CHAMPION, PREVIOUS
from stores.types import ModelVersionRef


def set_champion(
    run: Run, models: Mapping[str, ModelVersionRef], version: int, *, reason: str, is_rollback: bool = False
) -> None:
    """Makes a team version the champion, and writes down when and why; `previous` names the one it followed."""
    with run.journal.hold(run.run_id, "champion", owner=stage_owner()):  # aliases, journal and history move together
        past, own = history(run), {group: ref.version for group, ref in models.items()}
        # Numbers begin again where the registry was lost: the same number is the same team by its weights only.
        if not past or (past[-1]["team_version"], past[-1].get("policy_versions", own)) != (version, own):
            entry = {"team_version": version, "at": time.time(), "reason": reason, "is_rollback": is_rollback}
            past = [*past, {**entry, "policy_versions": own}]
        run.registry.set_alias(run.team_name, CHAMPION, version)
        before = followed(past)
        try:
            if before is not None:
                run.registry.set_alias(run.team_name, PREVIOUS, before)
        except ValueError:  # somebody has deleted it in MLflow
            before = None
        if before is None:
            run.registry.remove_alias(run.team_name, PREVIOUS)
        champion = {"team_version": version, "models": {group: plain(ref) for group, ref in models.items()}}
        # The line first: a process that dies in between repeats this, or another champion follows the right one.
        run.journal.put_value(run.run_id, RunValue.CHAMPIONS, {"history": past})
        run.journal.put_value(run.run_id, RunValue.CHAMPION, champion)
    tell(Observer.champion, run.run_id, version)


def hold_promotion(run: Run) -> AbstractContextManager[Lease]:
    """Keeps others from moving the champion: between a look at it and the move, or between the gateway's switch and the registry's."""
    return run.journal.hold(run.run_id, "promotion", owner=stage_owner())


def hold_mlflow(run: Run) -> AbstractContextManager[Lease]:
    """Keeps others from making the MLflow run of this run, or registering its teams, at the same time."""
    return run.journal.hold(run.run_id, "mlflow", owner=stage_owner())


def followed(past: Sequence[Mapping[str, Any]]) -> int | None:
    """The champion that the last of these followed; None where there was none before it.

    A promotion follows the champion of its time. A rollback takes its team's first position in the line again, so that two
    rollbacks in a row go two champions back, and never forward.
    """
    line: list[int] = []
    for entry in past:
        version = int(entry["team_version"])
        if version in line and entry.get("is_rollback", True):  # without the key, in older runs, it was a rollback
            line = line[: len(line) - 1 - line[::-1].index(version)]  # up to its last place, without it
        line.append(version)
    return line[-2] if len(line) > 1 and line[-2] != line[-1] else None


def history(run: Run) -> list[dict[str, Any]]:
    """Every champion in order: {"team_version", "at", "reason", "is_rollback", "policy_versions"}."""
    value = run.journal.value(run.run_id, RunValue.CHAMPIONS)
    return [] if value is None else list(value["history"])


def champion_version(run: Run) -> int | None:
    """Team version of the champion, None before the first."""
    value = run.journal.value(run.run_id, RunValue.CHAMPION)
    return None if value is None else int(value["team_version"])

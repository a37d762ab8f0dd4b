"""begin: a run -> version 0 of every model group, the first champion, and what the test tasks say before and after training."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from pipelines.cluster.connect import connect
from pipelines.cluster.owner_links import stage_owner
from pipelines.config.run_config import RunConfig, parse_config, with_keys
from pipelines.episodes.collector import end_collectors
from pipelines.episodes.sampling import Progress
from pipelines.evaluation.control import play_control
from pipelines.evaluation.played import play_team
from pipelines.report.progress import Screen
from pipelines.run.champions import champion_version, history, set_champion
from pipelines.run.run import Run
from pipelines.run.watchdog import Watchdog
from pipelines.stages.promote import register_team
from pipelines.stages.warmstart import StepProgress, warmstart
from serve_apps.authoring.yaml_text import read_yaml
from stores.journal.journal import Lease
from stores.journal.stage_results import Decided, Measured, WarmStarted
from stores.registry.team import Team
from stores.types import ModelVersionRef, Purpose
from stores.weights.manifest import verify_files

MAX_CONTEXT = 4096
"""Tokens of prompt and completion of an untrained model, where it takes as many; `serve.max_model_len` changes it."""
PLAIN = files("pipelines.runners") / "plain_model.yaml"


def measure_last(run: Run, *, address: str, screen: Screen) -> None:
    """Measures the champion on the test tasks, after the last iteration."""
    if not is_measured(run, run.config.iterations):
        connect(address)
    with screen.stage("after: test tasks") as progress:
        after = measure_team(run, run.champion(), iteration=run.config.iterations, progress=progress)
    screen.measured("after", after)


def is_measured(run: Run, iteration: int) -> bool:
    """Whether no team has to play the test tasks any more after an iteration: one has, or there are none."""
    return run.config.tasks.test is None or run.iteration(iteration).find(Measured) is not None


def make_version_zero(run: Run, *, progress: StepProgress | None = None) -> WarmStarted:
    """Makes version 0 of every model group once: by a warm start, or from the models that the config names."""
    section = WarmStarted.STAGE if run.config.warmstart else "train"
    watchdog = Watchdog.of_section(run, WarmStarted.STAGE, section)
    ref = watchdog.once(lambda lease: warmstart(run, progress=watchdog.reporting(progress)).to_json())
    return WarmStarted.from_json(ref)


def measure_team(
    run: Run, models: dict[str, ModelVersionRef], *, iteration: int, progress: Progress | None = None
) -> Measured | None:
    """Measures a team on the test tasks, once per iteration asked for; None where the config has no test tasks."""
    if run.config.tasks.test is None:
        return None
    watchdog = Watchdog.of_section(run, Measured.STAGE, "evaluate", iteration=iteration, recover=end_collectors)

    def work(lease: Lease) -> dict[str, Any]:
        reporting = watchdog.reporting(progress)
        played = play_team(run, models, run.tasks("test"), iteration=0, purpose=Purpose.TEST, progress=reporting)
        return Measured(
            score=played.score(run),
            iteration=iteration,
            outcomes={task: tuple(outcomes) for task, outcomes in played.outcomes.items()},
            sampling_seconds=played.sampled.sampling_seconds,
            num_tokens=played.sampled.num_tokens,
            families=played.families,
            control=play_control(run, played, progress=reporting),
        ).to_json()

    return Measured.from_json(watchdog.once(work, alone=run.hold_engines()))


def register_first_team(run: Run) -> int:
    """Registers version 0 of every model group as the first team and champion; returns the champion's team version."""

    def work(lease: Lease) -> dict[str, Any]:
        models, past = run.trained(0), history(run)
        # A process that was killed may have made it the champion without a record.
        version = int(past[0]["team_version"]) if past else register_team(run, models, iteration=0, evaluation={})
        if champion_version(run) is None:
            set_champion(run, models, version, reason="the first team")
        return Decided(verdict="promote", condition="the first team", team_version=version).to_json()

    run.journal.once(run.key(0, Decided.STAGE), work, owner=stage_owner())
    champion = champion_version(run)
    assert champion is not None, "the first team is always registered"
    return champion


def plain_config(folder: Path, *, root: str, changes: Mapping[str, Any]) -> RunConfig:
    """Returns the run config that serves a model folder as it is. Its team has the name of the folder.

    Raises ValueError where the folder holds no model. Args: root: `storage.root`. changes: further keys, dotted.
    """
    try:
        limit = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder} is no model folder: config.json cannot be read ({error})") from None
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.resolve().name).rstrip("-").lstrip("-_") or "model"
    known = limit if isinstance(limit, int) and limit > 0 else MAX_CONTEXT
    context = changes.get("serve.max_model_len") or min(MAX_CONTEXT, known)
    keys = {
        "run": name,
        "model_groups.model.model": str(folder.resolve()),
        "serve.max_model_len": context,
        # What is no length is refused when the config is parsed.
        "agents.model.max_tokens": max(1, context // 2) if isinstance(context, int) else 1,
        "storage.root": root,
    }
    data = read_yaml(PLAIN.read_text(encoding="utf-8"), str(PLAIN))
    return parse_config(with_keys(data, keys | dict(changes)), str(folder))


def untrained_team(run: Run, *, folder: Path | None = None) -> tuple[int, Team]:
    """Makes version 0 of every model group, registers them as the run's first team, and returns its version and manifest.

    Raises ValueError where the run has a champion already, which is another team, or where `folder`, of which the team is made,
    has other files than when it was.
    """
    run.open()
    make_version_zero(run)
    version = register_first_team(run)
    _, team = run.registry.load(run.team_name, version)
    if team.iteration:
        raise ValueError(
            f"team {run.team_name!r} was trained already, its champion is version {version} of iteration {team.iteration}: "
            f"serve {run.team_name}@champion, or give the untrained models another name with --set run=NAME"
        )
    if folder is not None:
        for ref in team.models.values():
            try:
                verify_files(folder, run.weights.manifest(ref).files)
            except ValueError as error:
                raise ValueError(
                    f"team {run.team_name!r} was made of {folder} when it had other files ({error}): give the new ones "
                    "another name with --set run=NAME"
                ) from None
    return version, team

"""untrained: a model folder, or a run config, whose models nobody has trained -> a registered team, to compare others with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from pipelines.config.run_config import RunConfig, parse_config, with_keys
from pipelines.run.run import Run
from pipelines.runners.begin import make_version_zero, register_first_team
from serve_apps.authoring.yaml_text import read_yaml
from stores.registry.team import Team
from stores.weights.manifest import verify_files

MAX_CONTEXT = 4096
"""Tokens of prompt and completion, where the model takes as many; `serve.max_model_len` changes it."""
PLAIN = files("pipelines.runners") / "plain_model.yaml"


def plain_config(folder: Path, *, root: str, changes: Mapping[str, Any]) -> RunConfig:
    """Returns the run config that serves a model folder as it is. Its team has the name of the folder.

    Raises ValueError where the folder holds no model. Args: root: `storage.root`. changes: further keys, dotted.
    """
    try:
        limit = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder} is no model folder: config.json cannot be read ({error})") from None
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.resolve().name).strip("-") or "model"
    context = changes.get("serve.max_model_len") or min(MAX_CONTEXT, limit or MAX_CONTEXT)
    keys = {
        "run": name,
        "model_groups.model.model": str(folder.resolve()),
        "serve.max_model_len": context,
        "agents.model.max_tokens": context // 2,
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

"""tools: commands that make or tidy something beside the loop: `export`, `serve-config`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml

from pipelines.cli.options import (
    TOOLS,
    Root,
    RunName,
    TeamName,
    existing_run,
    reports_errors,
    split_team,
)


def add_to(app: typer.Typer) -> None:
    """Adds the commands of this file to `app`."""
    app.command("serve-config", rich_help_panel=TOOLS)(print_serve_config)
    app.command(rich_help_panel=TOOLS)(export)


@reports_errors
def print_serve_config(
    team: TeamName,
    root: Root = "runs",
) -> None:
    """Print the Ray Serve config of a registered team's policy apps, for `serve deploy` or a RayService."""
    from pipelines.report.inspect import serve_config

    name, alias = split_team(team)
    run = existing_run(name, root, is_read_only=True)
    print(yaml.safe_dump(serve_config(run, alias), sort_keys=False), end="")
    if any(s.gpus == 0 and s.threads == "auto" for s in map(run.config.serve_config, run.config.model_groups)):
        print(
            "troupe: serve.threads is auto: `threads` counts the cores of this machine; set it to those of the machines that serve",
            file=sys.stderr,
        )


@reports_errors
def export(
    model_group: Annotated[str, typer.Argument(help="The model group.")],
    version: Annotated[int, typer.Argument(help="The version of its model.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    config: RunName,
    is_merged: Annotated[
        bool, typer.Option("--merged", help="Merges an adapter with its base into one model.")
    ] = False,
    root: Root = "runs",
) -> None:
    """Write a model version as a Hugging Face folder (an adapter as a peft folder) after checking its hashes."""
    from pipelines.report.inspect import export_version

    run = existing_run(config, root, is_read_only=True)
    print(export_version(run, model_group, version, out, is_merged=is_merged))

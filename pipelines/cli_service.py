"""cli_service: the commands that say which team is in service: `promote`, `rollback`, `watch`."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli_jobs import hand_back
from pipelines.cli_options import Address, Debug, Root, RunName, errors, existing_run

Reason = Annotated[str, typer.Option(help="Why, for those who look at the history of champions.")]


def add_to(app: typer.Typer) -> None:
    """Makes the commands of this file commands of `app`."""
    for command in (promote, rollback, watch):
        app.command()(command)


def promote(
    config: RunName,
    team_version: Annotated[int, typer.Option("--team-version", min=1, help="A registered version of the team.")],
    reason: Reason,
    root: Root = "runs",
    address: Address = "",
    debug: Debug = False,
) -> None:
    """Put a registered team version into service, once the engines have proven that they serve its weights."""
    with errors(debug):
        from pipelines.cluster import connect
        from pipelines.service import promote_version

        run = existing_run(config, root)
        connect(address)
        hand_back(promote_version(run, team_version, reason=reason))


def rollback(
    config: RunName,
    reason: Reason,
    to: Annotated[int | None, typer.Option(min=1, help="An earlier champion; default: the one before.")] = None,
    root: Root = "runs",
    address: Address = "",
    debug: Debug = False,
) -> None:
    """Put an earlier champion back into service, with the same proof."""
    with errors(debug):
        from pipelines.cluster import connect
        from pipelines.service import rollback as roll_back

        run = existing_run(config, root)
        connect(address)
        hand_back(roll_back(run, to=to, reason=reason))


def watch(
    config: RunName,
    team: Annotated[str, typer.Option(help="Alias or version of the team that plays.")] = "champion",
    section: Annotated[list[str] | None, typer.Option(help="Set of tasks; default: test and sentinel.")] = None,
    root: Root = "runs",
    address: Address = "",
    debug: Debug = False,
) -> None:
    """Let the champion play the run's test and sentinel tasks, to see that it still does what it did."""
    with errors(debug):
        from pipelines.cluster import connect
        from pipelines.service import watch as watch_team

        run = existing_run(config, root)
        connect(address)
        hand_back(watch_team(run, team, section or ["test", "sentinel"]))

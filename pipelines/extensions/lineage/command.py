"""command: `troupe lineage`, what shaped a team or an answer, and what an episode shaped."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.jobs import hand_back
from pipelines.cli.options import LOOK, Root, existing_run, reports_errors, split_team


def add_to(app: typer.Typer) -> None:
    """Adds the command of this file to `app`."""
    app.command(rich_help_panel=LOOK)(lineage)


@reports_errors
def lineage(
    what: Annotated[
        str, typer.Argument(help="TEAM@ALIAS or TEAM@VERSION, or with --run the id of an episode or an answer.")
    ],
    run_name: Annotated[
        str, typer.Option("--run", metavar="RUN", help="The run that the episode or answer belongs to.")
    ] = "",
    root: Root = "runs",
) -> None:
    """Print as JSON what led to a team or an answer of the gateway (models, iterations, traces), or what was trained on an episode."""
    from pipelines.extensions.lineage.lineage import lineage_of_id, lineage_of_team

    if "@" in what:
        name, alias = split_team(what)
        run = existing_run(name, root, is_read_only=True)
        hand_back(lineage_of_team(run, *run.load_team(alias)))
    elif not run_name:
        raise ValueError(
            f"{what!r}: give TEAM@ALIAS or TEAM@VERSION (an answer's `system_fingerprint` is one), or the id of an episode "
            "or answer and --run RUN"
        )
    else:
        hand_back(lineage_of_id(existing_run(run_name, root, is_read_only=True), what))

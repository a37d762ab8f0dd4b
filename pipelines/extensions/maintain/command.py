"""command: `troupe maintain`, which removes what nothing needs."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli import jobs
from pipelines.cli.options import TOOLS, Root, RunName, reports_errors


def add_to(app: typer.Typer) -> None:
    """Adds the command of this file to `app`."""
    app.command(rich_help_panel=TOOLS)(maintain)


@reports_errors
def maintain(
    config: RunName,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Prints what would be removed, and changes nothing.")
    ] = False,
    root: Root = "runs",
) -> None:
    """Merge small files, and remove old versions, weights and checkpoints that nothing needs (config section `maintain`)."""
    from pipelines.extensions.maintain.maintain import described
    from pipelines.extensions.maintain.maintain import maintain as maintain_run

    run = jobs.scheduled_run(config, root, is_read_only=dry_run)
    if run is None:
        return
    ref = maintain_run(run, is_dry_run=dry_run)
    print("\n".join(described(ref)))
    jobs.hand_back(ref)

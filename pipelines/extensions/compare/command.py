"""command: `troupe compare`, the team against one agent."""

from __future__ import annotations

import typer

from pipelines.cli.options import LOOK, Address, Root, RunName, existing_run, reports_errors


def add_to(app: typer.Typer) -> None:
    """Adds the command of this file to `app`."""
    app.command(rich_help_panel=LOOK)(compare)


@reports_errors
def compare(
    config: RunName,
    root: Root = "runs",
    address: Address = "",
) -> None:
    """Say whether the team is worth it: train one agent in its place, and compare both at as many tokens per task.

    The agent of the section `compare` begins from the same weights and plays as many episodes of the same tasks, as a run of its own
    (RUN-alone), which goes on where it stopped. On the test tasks it answers again until it has spent the team's tokens. The
    result is printed, and shown in the team's report.
    """
    from pipelines.extensions.compare.compare import compare_with_one
    from pipelines.report.progress import Screen

    compare_with_one(existing_run(config, root), address=address, screen=Screen())

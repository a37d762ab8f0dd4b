"""command: `troupe why`, the turn that decided an episode."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.options import LOOK, Address, Root, RunName, existing_run, reports_errors


def add_to(app: typer.Typer) -> None:
    """Adds the command of this file to `app`."""
    app.command(rich_help_panel=LOOK)(why)


@reports_errors
def why(
    config: RunName,
    episode: Annotated[str, typer.Argument(help="The id of the episode, or a unique beginning of it.")] = "",
    root: Root = "runs",
    replays: Annotated[int, typer.Option(min=16, help="How often each episode is played again, in all.")] = 64,
    lost_at: Annotated[
        int,
        typer.Option(
            "--lost-at",
            metavar="ITERATION",
            help="In the place of an episode: the tasks on which the candidate of this iteration did worse than the champion at the gate.",
        ),
    ] = 0,
    tasks: Annotated[
        int, typer.Option(min=1, help="With --lost-at: how many of these tasks, the largest loss first.")
    ] = 8,
    address: Address = "",
) -> None:
    """Find the turn that decided an episode: play it again from each turn, and compare what comes out.

    Everything before a turn is replayed token by token; it and all that follows is sampled anew by the versions that played the
    episode. Replays go to where the fault seems to lie. What was found is kept beside the episode: `troupe show`, the
    report and the dashboard show it. With --lost-at the same is done for a candidate's lost tasks, and counted by agent.
    """
    from rich.console import Console

    from pipelines.extensions.why.lost_tasks import lost_tasks_view
    from pipelines.extensions.why.shown import explanation_view
    from pipelines.extensions.why.why import explain_episode, explain_lost_tasks

    if bool(episode) == bool(lost_at):
        raise ValueError("name either an EPISODE, or by --lost-at the iteration whose candidate lost tasks")
    run = existing_run(config, root)
    if episode:
        shown = explanation_view(explain_episode(run, episode, budget=replays, address=address))
    else:
        shown = lost_tasks_view(explain_lost_tasks(run, lost_at, tasks=tasks, budget=replays, address=address))
    Console().print(shown)

"""command: `troupe watch`, whether the champion is as good as before."""

from __future__ import annotations

from typing import Annotated

import typer

from pipelines.cli.jobs import hand_back, scheduled_run
from pipelines.cli.options import SERVE, Address, Root, RunName, refuse, reports_errors, telling

EXIT_CODES = {"alarm": 12, "learning": 13}


def add_to(app: typer.Typer) -> None:
    """Adds the command of this file to `app`."""
    app.command(rich_help_panel=SERVE)(watch)


@reports_errors
def watch(
    config: RunName,
    team: Annotated[
        str | None, typer.Option(help="The alias or version of the team that plays. Default: champion.")
    ] = None,
    section: Annotated[
        list[str] | None,
        typer.Option(
            help="A set of tasks of the run; may be given several times. Default: those of test and sentinel that it has."
        ),
    ] = None,
    accept: Annotated[
        str, typer.Option(metavar="REASON", help="Plays nothing, but accepts the present figures as usual from now on.")
    ] = "",
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code",
            help="Exits with 12 if a figure raises an alarm, 13 if some are still being learned, otherwise 0.",
        ),
    ] = False,
    root: Root = "runs",
    address: Address = "",
) -> None:
    """Check whether the champion is as good as before, on the run's test and sentinel tasks and in its answers since the last check.

    Its figures are compared with its own history (config section `watch`). The JSON at the end has `state` (sound, alarm or
    learning), every alarm with its limits and what to try, and the figures that were judged or are still being learned.
    """
    from pipelines.cluster.connect import connect

    if accept:
        useless = {"--team": team, "--section": section, "--exit-code": exit_code}
        refuse(useless, "has no effect with --accept, which plays nothing")
    run = scheduled_run(config, root)
    if run is None:
        return
    if accept:
        from pipelines.extensions.watch.watching import accept as accept_alarms

        hand_back(accept_alarms(run, accept))
        return
    connect(address)
    from pipelines.extensions.watch.champion import watch as watch_team

    with telling(f"{team or 'champion'} plays the tasks that it is watched on"):
        checked = watch_team(run, team or "champion", section or ())
    hand_back(checked)
    if exit_code and (code := EXIT_CODES.get(checked["state"], 0)):
        raise SystemExit(code)

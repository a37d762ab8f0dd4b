"""cli_service: the commands that say which team is in service: `serve`, `canary`, `shadow`, `promote`, `rollback`, `watch`, `lineage`; and `key`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.cli.jobs import hand_back
from pipelines.cli.options import Address, Debug, Root, RunName, errors, existing_run

if TYPE_CHECKING:
    from pipelines.run.run import Run
    from stores.team import Team

Reason = Annotated[str, typer.Option(help="Why, for those who look at the history of champions.")]


ExitCode = Annotated[
    bool,
    typer.Option(
        "--exit-code", help="End with 10 where the team was sent back, 11 where too little is known; otherwise 0."
    ),
]
EXIT_CODES = {"sent_back": 10, "undecided": 11, "alarm": 12, "learning": 13}


def add_to(app: typer.Typer) -> None:
    """Makes the commands of this file commands of `app`."""
    for command in (serve, canary, shadow, promote, rollback, watch, lineage, key):
        app.command()(command)


def serve(
    team: Annotated[
        str,
        typer.Argument(
            help="TEAM@ALIAS or TEAM@VERSION, e.g. demo@champion; RUN.yaml@ALIAS: with other sections `gateway` and `traffic`."
        ),
    ],
    guard: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Then watch its answers this long, and go back where they are worse.",
        ),
    ] = None,
    exit_code: ExitCode = False,
    root: Root = "runs",
    address: Address = "",
    debug: Debug = False,
) -> None:
    """Put a team behind the gateway, or switch the one that is there: loaded and proven first, then all at once."""
    with errors(debug):
        run, version, found = _team(team, root)
        _connect(address)
        from pipelines.release import traffic
        from pipelines.release.production import put_into_service

        put = put_into_service(run, version, found)
        if guard is None:
            hand_back(put)
            return
        _told(traffic.guard(run, seconds=guard), exit_code=exit_code)


def canary(
    team: Annotated[
        str, typer.Argument(help="TEAM@ALIAS or TEAM@VERSION, e.g. demo@candidate; with --end TEAM alone.")
    ],
    share: Annotated[float, typer.Option(min=0, max=1, help="Of the requests that it answers.")] = 0.1,
    salt: Annotated[str, typer.Option(help="Another one deals users anew.")] = "",
    end: Annotated[bool, typer.Option("--end", help="The team in service answers everything again.")] = False,
    auto: Annotated[
        bool,
        typer.Option(
            "--auto",
            help="Advance through `traffic.shares` as its answers hold, then promote; send it back where they are worse.",
        ),
    ] = False,
    exit_code: ExitCode = False,
    root: Root = "runs",
    address: Address = "",
    debug: Debug = False,
) -> None:
    """Let a team answer a share of the gateway's requests beside the one in service."""
    with errors(debug):
        if end:
            _end_beside(team, root, address)
            return
        run, version, found = _team(team, root)
        _connect(address)
        from pipelines.release import production

        if auto:
            from pipelines.release import traffic

            _told(traffic.roll_out(run, version, found), exit_code=exit_code)
            return
        hand_back(production.canary(run, version, found, share=share, salt=salt))


def shadow(
    team: Annotated[
        str, typer.Argument(help="TEAM@ALIAS or TEAM@VERSION, e.g. demo@candidate; with --end TEAM alone.")
    ],
    share: Annotated[float, typer.Option(min=0.01, max=1, help="Of the requests that it gets too.")] = 1.0,
    end: Annotated[bool, typer.Option("--end", help="It gets none any more.")] = False,
    root: Root = "runs",
    address: Address = "",
    debug: Debug = False,
) -> None:
    """Let a team get a share of the requests too, once they are answered: nobody sees what it says, and its engines have the CPU only when nobody else wants it."""
    with errors(debug):
        if end:
            _end_beside(team, root, address)
            return
        run, version, found = _team(team, root)
        _connect(address)
        from pipelines.release import production

        hand_back(production.canary(run, version, found, share=0.0, shadow=share))


def _end_beside(team: str, root: str, address: str) -> None:
    """Whoever is beside the team in service no longer is."""
    run = existing_run(team.rpartition("@")[0] or team, root)
    _connect(address)
    from pipelines.release import production

    hand_back(production.end_canary(run))


def _connect(address: str) -> None:
    """To the cluster, before anything is imported that imports Ray: how it shows its token is fixed by then."""
    from pipelines.cluster.connect import connect_for_good

    connect_for_good(address)


def _told(found: dict[str, Any], *, exit_code: bool) -> None:
    """Hands a traffic decision back."""
    hand_back(found)
    _exit_as(found["verdict"], exit_code=exit_code)


def _exit_as(verdict: str, *, exit_code: bool) -> None:
    if exit_code and (code := EXIT_CODES.get(verdict, 0)):
        raise SystemExit(code)


def _team(text: str, root: str) -> tuple[Run, int, Team]:
    """The run, version and manifest that `TEAM@ALIAS` names; RUN.yaml in place of TEAM: with what the file says of the gateway."""
    name, _, which = text.rpartition("@")
    if not name or not which:
        raise ValueError(f"{text!r} names no team version: give TEAM@ALIAS or TEAM@VERSION, e.g. demo@champion")
    run = existing_run(name, root)
    run.begin()  # a file's settings of who answers are the run's from now on, for whoever names it
    version, team = run.registry.load(run.team_name, int(which) if which.isdigit() else which)
    return run, version, team


def lineage(
    what: Annotated[
        str, typer.Argument(help="TEAM@ALIAS or TEAM@VERSION; or the id of an episode or of an answer, with --run.")
    ],
    run_name: Annotated[str, typer.Option("--run", metavar="RUN", help="Whose episode or answer it is.")] = "",
    root: Root = "runs",
    debug: Debug = False,
) -> None:
    """What shaped a team or an answer of the gateway: models, iterations, traces; what an episode has shaped. JSON."""
    with errors(debug):
        from pipelines.report.answer_lineage import lineage_of_id
        from pipelines.report.lineage import lineage_of_team

        if "@" in what:
            run, version, team = _team(what, root)
            hand_back(lineage_of_team(run, version, team))
        elif not run_name:
            raise ValueError(
                f"{what!r}: give TEAM@ALIAS or TEAM@VERSION (an answer's `system_fingerprint` is one), or the id of an episode "
                "or answer and --run RUN"
            )
        else:
            hand_back(lineage_of_id(existing_run(run_name, root), what))


def key(
    name: Annotated[str, typer.Argument(help="Who uses it; shows in metrics.")],
    file: Annotated[Path, typer.Option(help="The gateway's `keys_file`; made where there is none.")],
    scope: Annotated[list[str], typer.Option(help="call, feedback or admin; may be given several times.")] = ["call"],  # noqa: B006
    days: Annotated[float | None, typer.Option(min=0, help="Until it expires; default: never.")] = None,
    per_minute: Annotated[int | None, typer.Option(min=1, help="Requests it may make per minute.")] = None,
    revoke: Annotated[bool, typer.Option("--revoke", help="Remove the key of this name instead.")] = False,
    debug: Debug = False,
) -> None:
    """Make an API key for the gateway, shown once and kept as a hash, or revoke one. A running gateway follows in seconds."""
    with errors(debug):
        from serve_apps.gateway.api_keys import SCOPES, make_key, read_keys, write_keys

        if unknown := [s for s in scope if s not in SCOPES]:
            raise ValueError(f"--scope {unknown[0]}: scopes are {', '.join(SCOPES)}")
        keys = read_keys(file) if file.exists() else []
        known = [k for k in keys if k.name == name]
        if revoke:
            if not known:
                raise ValueError(f"{file} has no key {name!r}; it has {', '.join(k.name for k in keys) or 'none'}")
            write_keys(file, [k for k in keys if k.name != name])
            typer.echo(f"revoked {name}")
            return
        if known:
            raise ValueError(f"{file} has a key {name!r} already: revoke it first, or take another name")
        expires_at = None if days is None else time.time() + days * 86_400
        secret, made = make_key(name, scopes=tuple(scope), expires_at=expires_at, requests_per_minute=per_minute)  # type: ignore[arg-type]
        write_keys(file, [*keys, made])
        typer.echo(secret)


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
        from pipelines.cluster.connect import connect

        run = existing_run(config, root)
        run.registry.load(run.team_name, team_version)  # an unknown one is refused before anything starts
        connect(address)
        from pipelines.release.by_hand import promote_version

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
        from pipelines.cluster.connect import connect

        run = existing_run(config, root)
        connect(address)
        from pipelines.release.by_hand import rollback as roll_back

        hand_back(roll_back(run, to=to, reason=reason))


def watch(
    config: RunName,
    team: Annotated[str, typer.Option(help="Alias or version of the team that plays.")] = "champion",
    section: Annotated[list[str] | None, typer.Option(help="Set of tasks; default: test and sentinel.")] = None,
    accept: Annotated[
        str, typer.Option(metavar="REASON", help="Play nothing: what was seen until now is usual from now on.")
    ] = "",
    exit_code: Annotated[
        bool,
        typer.Option(
            "--exit-code", help="End with 12 where a figure alarms, 13 where one is still being learned; otherwise 0."
        ),
    ] = False,
    root: Root = "runs",
    address: Address = "",
    debug: Debug = False,
) -> None:
    """See whether the champion still does what it did: on the run's test and sentinel tasks, and in what it answered since.

    Figures are judged by the champion's own history (section `watch`). The JSON at the end says `state` (sound, alarm,
    learning), every alarm in words with its limits and what to try, and which figures were judged and which are still learned.
    """
    with errors(debug):
        from pipelines.cluster.connect import connect

        run = existing_run(config, root)
        if accept:
            from pipelines.monitoring.watching import accept as accept_alarms

            hand_back(accept_alarms(run, accept))
            return
        connect(address)
        from pipelines.runners.watch_champion import watch as watch_team

        found = watch_team(run, team, section or ["test", "sentinel"])
        hand_back(found)
        _exit_as(found["state"], exit_code=exit_code)

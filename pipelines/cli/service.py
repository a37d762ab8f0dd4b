"""service: the commands around serving teams: `serve`, `canary`, `shadow`, `promote`, `rollback`, `key`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.cli.jobs import hand_back
from pipelines.cli.options import (
    SERVE,
    Address,
    Changes,
    Root,
    RunName,
    existing_run,
    load,
    overrides,
    refuse,
    reports_errors,
    split_team,
    telling,
)

if TYPE_CHECKING:
    from pipelines.run.run import Run
    from serve_apps.gateway.routes import Change
    from stores.registry.team import Team

Reason = Annotated[str, typer.Option(help="The reason, for the history of champions.")]

ExitCode = Annotated[
    bool,
    typer.Option(
        "--exit-code", help="Exits with 10 if the team was sent back, 11 if too little is known, otherwise 0."
    ),
]
CANARY_SHARE = 0.1
"""Of the requests, where --share does not say another."""
EXIT_CODES = {"sent_back": 10, "undecided": 11}


def add_to(app: typer.Typer) -> None:
    """Adds the commands of this file to `app`."""
    for command in (serve, canary, shadow, promote, rollback, key):
        app.command(rich_help_panel=SERVE)(command)


@reports_errors
def serve(
    team: Annotated[
        str,
        typer.Argument(
            help="TEAM@ALIAS or TEAM@VERSION, e.g. demo@champion. RUN.yaml@ALIAS takes the sections `gateway` and `traffic` "
            "from the file. A model folder is served as it is, as the agent NAME_OF_FOLDER/model; RUN.yaml alone with the "
            "models that its run begins with."
        ),
    ],
    guard: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Watches the team's answers for this long, and restores the team before it if they are worse.",
        ),
    ] = None,
    exit_code: ExitCode = False,
    replace_gateway: Annotated[
        bool,
        typer.Option(
            "--replace-gateway",
            help="Gives the gateway the settings of this team's config even where that changes its port for other teams, or takes API "
            "keys or redaction from the team. Without it, such a config is refused.",
        ),
    ] = False,
    root: Root = "runs",
    changes: Changes = None,
    address: Address = "",
) -> None:
    """Serve a team through the gateway, or replace the team there. The switch happens at once, after the new engines have proven their weights."""
    if guard is None:
        refuse({"--exit-code": exit_code}, "needs --guard, which decides about the team")
    if _is_untrained(team):
        run, version, manifest = _untrained(team, root, changes, address)
    elif changes:
        raise ValueError(
            "--set changes the config of models that are served untrained; give a model folder or RUN.yaml"
        )
    else:
        run, version, manifest = _team(team, root)
        _connect(address)
    from pipelines.release import traffic

    with telling(f"load {team}, prove its weights, start the gateway"):
        deployed = _deploy(run, team, version, manifest, change="any" if replace_gateway else "compatible")
    print(f"{team} answers at {deployed['url']}", file=sys.stderr)
    if guard is None:
        hand_back(deployed)
        return
    with telling(f"watch its answers for {guard:g} s"):
        decision = traffic.guard_deployed(run, seconds=guard)
    _finish(decision, exit_code=exit_code)


@reports_errors
def canary(
    team: Annotated[str, typer.Argument(help="TEAM@ALIAS or TEAM@VERSION, e.g. demo@candidate; with --end only TEAM.")],
    share: Annotated[
        float | None,
        typer.Option(min=0, max=1, help=f"The share of requests that it answers. Default: {CANARY_SHARE:g}."),
    ] = None,
    salt: Annotated[str | None, typer.Option(help="Changes which users get which team.")] = None,
    end: Annotated[
        bool, typer.Option("--end", help="Ends the canary: the deployed team answers all requests again.")
    ] = False,
    auto: Annotated[
        bool,
        typer.Option(
            "--auto",
            help="Raises the share step by step (`traffic.shares`) while its answers are as good, then promotes it; sends it back "
            "if they are worse.",
        ),
    ] = False,
    exit_code: ExitCode = False,
    root: Root = "runs",
    address: Address = "",
) -> None:
    """Let a team answer a share of the gateway's requests beside the deployed one."""
    dealt = {"--share": share, "--salt": salt}
    if end:
        refuse({**dealt, "--auto": auto, "--exit-code": exit_code}, "has no effect on a canary that --end ends")
    elif auto:
        refuse(dealt, "is not for --auto, which takes the shares in `traffic.shares`")
    else:
        refuse({"--exit-code": exit_code}, "needs --auto, which decides about the team")
    if end:
        _end_beside(team, root, address, is_shadow=False)
        return
    run, version, manifest = _team(team, root)
    _connect(address)
    from pipelines.release import production

    if auto:
        from pipelines.release import traffic

        with telling(f"raise the share of {team} step by step"):
            decision = traffic.roll_out(run, version, manifest)
        _finish(decision, exit_code=exit_code)
        return
    with telling(f"load {team} and prove its weights"):
        share = CANARY_SHARE if share is None else share
        begun = production.canary(run, version, manifest, share=share, salt=salt)
    hand_back(begun)


@reports_errors
def shadow(
    team: Annotated[str, typer.Argument(help="TEAM@ALIAS or TEAM@VERSION, e.g. demo@candidate; with --end only TEAM.")],
    share: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="The share of requests that it also gets. Default: 1.")
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="Ends the shadow traffic.")] = False,
    root: Root = "runs",
    address: Address = "",
) -> None:
    """Copy a share of the answered requests to a team. Users never see its replies, and its engines run at the lowest CPU priority."""
    if end:
        refuse({"--share": share}, "has no effect on shadow traffic that --end ends")
        _end_beside(team, root, address, is_shadow=True)
        return
    run, version, manifest = _team(team, root)
    _connect(address)
    from pipelines.release import production

    with telling(f"load {team} and prove its weights"):
        begun = production.canary(run, version, manifest, share=0.0, shadow=1.0 if share is None else share)
    hand_back(begun)


def _end_beside(team: str, root: str, address: str, *, is_shadow: bool) -> None:
    """Ends the canary, or the shadow traffic, beside the deployed team."""
    name = team if Path(team).is_file() else team.rpartition("@")[0] or team
    run = existing_run(name, root)
    _connect(address)
    from pipelines.release import production

    hand_back(production.end_shadow(run) if is_shadow else production.end_canary(run))


def _connect(address: str) -> None:
    """Connects to the cluster. Before anything imports Ray, which reads its authentication mode once, at import."""
    from pipelines.cluster.connect import connect_for_good

    connect_for_good(address)


def _finish(decision: dict[str, Any], *, exit_code: bool) -> None:
    """Prints a decision about traffic, and ends with its exit code if asked to."""
    hand_back(decision)
    if exit_code and (code := EXIT_CODES.get(decision["verdict"], 0)):
        raise SystemExit(code)


def _team(text: str, root: str) -> tuple[Run, int, Team]:
    """The run, version and manifest that `TEAM@ALIAS` names; with RUN.yaml as TEAM, the gateway's settings are the file's."""
    name, alias = split_team(text)
    run = existing_run(name, root)
    run.begin(
        is_continued=False
    )  # keeps the file's gateway settings as the run's, for later commands that give the run's name
    return run, *run.load_team(alias)


def _is_untrained(text: str) -> bool:
    is_there = Path(text).exists()
    if text.endswith((".yaml", ".yml")) and not is_there:
        raise ValueError(f"{text} does not exist (seen from {Path.cwd()})")
    return is_there


def _deploy(run: Run, text: str, version: int, manifest: Team, *, change: Change) -> dict[str, Any]:
    """Deploys a team; an alias is looked up once more, because a promotion that is under way may give it to another one."""
    from pipelines.release.production import deploy_alias, deploy_team

    if _is_untrained(text) or split_team(text)[1].isdigit():
        return deploy_team(run, version, manifest, change=change)
    return deploy_alias(run, split_team(text)[1], change=change)


def _untrained(text: str, root: str, changes: list[str] | None, address: str) -> tuple[Run, int, Team]:
    """The run, version and manifest of a model folder, or of the models with which the run of a config begins."""
    _connect(address)
    from pipelines.run.run import Run
    from pipelines.runners.begin import plain_config, untrained_team

    folder = Path(text) if Path(text).is_dir() else None
    if folder is None:
        config = load(Path(text), changes)
    else:
        config = plain_config(folder, root=root, changes=overrides(changes or []))
    run = Run(config)
    return run, *untrained_team(run, folder=folder)


@reports_errors
def key(
    name: Annotated[str, typer.Argument(help="The name of its user, which metrics show.")],
    file: Annotated[Path, typer.Option(help="The gateway's `keys_file`; it is made if it is missing.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="What it allows: call, feedback, metrics or admin. May be given several times. Default: call."
        ),
    ] = None,
    days: Annotated[float | None, typer.Option(min=0, help="Days until it expires. Default: never.")] = None,
    per_minute: Annotated[int | None, typer.Option(min=1, help="How many requests it may make per minute.")] = None,
    revoke: Annotated[bool, typer.Option("--revoke", help="Removes the key of this name instead.")] = False,
) -> None:
    """Make an API key for the gateway, which is shown once and stored as a hash, or revoke one. It takes effect within seconds."""
    from serve_apps.gateway.traffic.callers import SCOPES, make_key, read_keys, write_keys

    scopes = tuple(scope or ["call"])
    if unknown := [s for s in scopes if s not in SCOPES]:
        raise ValueError(f"--scope {unknown[0]}: scopes are {', '.join(SCOPES)}")
    keys = read_keys(file) if file.exists() else []
    known = [k for k in keys if k.name == name]
    if revoke:
        useless = {"--scope": scope, "--days": days, "--per-minute": per_minute}
        refuse(useless, "has no effect on a key that --revoke removes")
        if not known:
            raise ValueError(f"{file} has no key {name!r}; it has {', '.join(k.name for k in keys) or 'none'}")
        write_keys(file, [k for k in keys if k.name != name])
        typer.echo(f"revoked {name}")
        return
    if known:
        raise ValueError(f"{file} has a key {name!r} already: revoke it first, or take another name")
    expires_at = None if days is None else time.time() + days * 86_400
    secret, made = make_key(name, scopes=scopes, expires_at=expires_at, requests_per_minute=per_minute)  # type: ignore[arg-type]
    write_keys(file, [*keys, made])
    typer.echo(secret)


@reports_errors
def promote(
    config: RunName,
    team_version: Annotated[int, typer.Option("--team-version", min=1, help="A registered version of the team.")],
    reason: Reason,
    root: Root = "runs",
    address: Address = "",
) -> None:
    """Make a registered team version the champion, after the engines have proven that they serve its weights."""
    from pipelines.cluster.connect import connect

    run = existing_run(config, root)
    run.registry.load(run.team_name, team_version)  # an unknown one is refused before anything starts
    connect(address)
    from pipelines.release.by_hand import promote_version

    with telling(f"load team version {team_version} and prove its weights"):
        promoted = promote_version(run, team_version, reason=reason)
    hand_back(promoted)


@reports_errors
def rollback(
    config: RunName,
    reason: Reason,
    to: Annotated[
        int | None, typer.Option(min=1, help="The team version of an earlier champion. Default: the champion before.")
    ] = None,
    root: Root = "runs",
    address: Address = "",
) -> None:
    """Make an earlier champion the champion again, with the same proof."""
    from pipelines.cluster.connect import connect

    run = existing_run(config, root)
    connect(address)
    from pipelines.release.by_hand import rollback as roll_back

    with telling("load the champion of before and prove its weights"):
        champion = roll_back(run, to=to, reason=reason)
    hand_back(champion)

"""options: what the commands of `troupe` share: options, finding the run that they name, and reporting errors."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipelines.cluster.user_code import add_user_code
from stores.logs import configure

if TYPE_CHECKING:
    from pipelines.config.run_config import RunConfig
    from pipelines.run.run import Run

COMMENT = re.compile(r"(?![\"'{\[])(?:.*\s)?#", re.DOTALL)
"""A value of `--set` of which YAML would leave out a part in silence."""
TRAIN, LOOK, SERVE, JOBS, TOOLS = "Train", "Look", "Serve", "Jobs", "Tools"
"""The panels of `troupe --help`."""
RUN_HELP = "A run config (RUN.yaml), or the name of a run in --root."
RunName = Annotated[str, typer.Option("--run", metavar="RUN", help=RUN_HELP)]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]
TeamName = Annotated[
    str,
    typer.Argument(
        metavar="TEAM@ALIAS", help="A run (its name or RUN.yaml) and an alias or team version, e.g. demo@champion."
    ),
]
Root = Annotated[
    str,
    typer.Option(
        help="The folder that holds the runs which are given by name, or the URL of their journal.",
        callback=os.path.expanduser,  # of `--root=~/runs` no shell does
    ),
]
ConfigPath = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run config.")]
IterationNumber = Annotated[int, typer.Option("--iteration", min=1, help="The number of the iteration, from 1.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Changes a key of the config, e.g. train.optimizer.lr=1e-4."),
]
Address = Annotated[
    str,
    typer.Option(help="The address of the Ray cluster. Default: RAY_ADDRESS, or else a local head for this command."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Shows the traceback of an error.")]


def reports_errors(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a function fit to be a command: an error ends it in one message, and it gets the option `--debug`."""

    @wraps(function)
    def run_command(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        with errors(debug):
            function(*args, **kwargs)

    # Typer reads options from the signature, so that it must show `debug`, too.
    signature = inspect.signature(function, eval_str=True)
    option = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    parameters = [*signature.parameters.values(), option]
    run_command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run_command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run_command


def split_team(text: str) -> tuple[str, str]:
    """`TEAM@ALIAS` as the run's name and the alias or version; ValueError for another form."""
    name, _, alias = text.rpartition("@")
    if not name or not alias or "/" in alias:  # the folder of a file may have an @
        raise ValueError(f"{text!r} is not of the form TEAM@ALIAS, e.g. demo@champion or my_run.yaml@3")
    return name, alias


def open_run(config: Path, changes: list[str] | None, *, is_read_only: bool = False) -> Run:
    """The run of a config file."""
    from pipelines.run.run import Run

    return Run(load(config, changes), is_read_only=is_read_only)


def find_run(name: str, root: str, changes: list[str] | None = None, *, is_read_only: bool = False) -> Run:
    """A run by its config file, by its name from the config that came with the job, or from the one its journal keeps.

    Args: is_read_only: for commands that only show it; its disk may be read-only or full.
    """
    from pipelines.run.run import Run
    from pipelines.run.stored_runs import stored_run

    if config := config_of_job(name):
        return Run(config, is_read_only=is_read_only)
    if Path(name).is_file() or name.endswith((".yaml", ".yml")):
        return open_run(Path(name), changes, is_read_only=is_read_only)
    add_user_code()
    run = stored_run(name, root, is_read_only=is_read_only)
    for key, value in overrides(changes or []).items():
        raise ValueError(f"--set {key}={value}: a run given by name keeps its config; give the RUN.yaml to change it")
    return run


class NotStarted(ValueError):
    """Nobody has started the run yet."""


def existing_run(name: str, root: str, *, is_read_only: bool = False) -> Run:
    """A run that has been started; NotStarted where it has not, rather than making one. Args: is_read_only: see `find_run`."""
    from stores.journal.journal import Journal
    from stores.store_faults import UnreadableStore

    run = find_run(name, root, is_read_only=is_read_only)
    is_file = not run.config.storage.journal
    if is_file and not Path(run.folder, "journal.db").is_file():
        raise NotStarted(f"run {run.run_id!r} has not been started: there is no {run.folder}/journal.db")
    try:
        known = {row.run_id for row in Journal(run.journal.url, is_read_only=True).runs()}
    except UnreadableStore as error:
        raise UnreadableStore(f"run {run.run_id!r}: {error}") from None
    if run.run_id not in known:
        raise NotStarted(f"run {run.run_id!r} has not been started: it is not in {run.journal.shown_url}")
    return run


def config_of_job(name: str) -> RunConfig | None:
    """The run config that a Ray job carries by value, if this is one and the run has this name."""
    from pipelines.cluster.jobs import RUN_CONFIG_VARIABLE
    from pipelines.config.run_config import parse_config

    text = os.environ.get(RUN_CONFIG_VARIABLE, "")
    if not text:
        return None
    data = json.loads(text)
    if data.get("run") != name:
        return None
    add_user_code()
    return parse_config(data, RUN_CONFIG_VARIABLE)


def load(config: Path, changes: list[str] | None) -> RunConfig:
    """The run config of a file; in a Ray job the one that it carries, if it is of that run."""
    from pipelines.config.run_config import load_config

    if carried := config_of_job(str(config)):
        return carried
    add_user_code()
    return load_config(config, overrides(changes or []))


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Says on standard error what a command is at that takes seconds; its result alone goes to standard output."""
    from rich.console import Console

    from pipelines.report.progress import Screen

    screen = Screen(Console(stderr=True))
    if not screen.console.is_terminal:  # where a line shows when it is done only
        screen.say(f"… {what}")
    with screen.stage(what):
        yield


def refuse(options: Mapping[str, object], reason: str) -> None:
    """ValueError for the first of these options that was given: it would have no effect."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} {reason}: drop {name}")


def overrides(changes: list[str]) -> dict[str, Any]:
    """Returns `--set KEY=VALUE` options as dotted keys and values; ValueError for another form."""
    from serve_apps.authoring.yaml_text import read_yaml

    values = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"--set {change!r} is not of the form KEY=VALUE")
        if COMMENT.match(value):
            raise ValueError(
                f"--set {change!r}: what begins with # is a comment in YAML: put the value into quotes of its own, '{key}=\"...\"'"
            )
        values[key] = read_yaml(value, f"--set {key}")
    return values


@contextmanager
def errors(debug: bool) -> Iterator[None]:
    """Ends the process with one message and the exit code of its kind where something fails, see cluster/faults.py."""
    try:
        configure()
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):  # an extension's command ends by itself, as Typer's do
        raise
    except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 - the boundary of every command
        if isinstance(error, BrokenPipeError) and not _is_read():
            raise SystemExit(1) from None  # `| head` has enough, and nobody is there to be told
        if debug:
            traceback.print_exception(error)
        from pipelines.cluster.faults import ClusterLost, diagnose

        fault = diagnose(error)
        if isinstance(error, ClusterLost):
            from pipelines.run.watchdog import end_process

            print(f"troupe: {fault.message}", file=sys.stderr)
            end_process(fault.exit_code)  # a shutdown would ask the head
        _fail(fault.message, fault.exit_code)


def _is_read() -> bool:
    """Whether somebody reads this command's output still: another pipe than that may be broken."""
    try:
        print(flush=True)
    except BrokenPipeError:
        return False
    return True


def _fail(message: str, code: int) -> None:
    print(f"troupe: {message}", file=sys.stderr)
    raise SystemExit(code)

"""cli_options: what the commands of `troupe` share: options, the run they name, how they say what is wrong."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from pipelines.cluster.user_code import add_user_code
from stores.logs import configure

if TYPE_CHECKING:
    from pipelines.config.run_config import RunConfig
    from pipelines.run.run import Run

RunName = Annotated[
    str, typer.Option("--run", metavar="RUN", help="Run config (RUN.yaml), or the name of a run below --root.")
]
Root = Annotated[
    str, typer.Option(help="Where runs given by name are found: the folder that holds them, or a journal's URL.")
]
ConfigPath = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run config.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. train.optimizer.lr=1e-4.")
]
Address = Annotated[str, typer.Option(help="Ray cluster; default RAY_ADDRESS, else a local head for this command.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def open_run(config: Path, changes: list[str] | None) -> Run:
    """The run of a config file."""
    from pipelines.run.run import Run

    return Run(load(config, changes))


def find_run(name: str, root: str, changes: list[str] | None = None) -> Run:
    """A run by its config file, by its name from the config that came with the job, or from the one its journal keeps."""
    from pipelines.run.run import Run
    from pipelines.run.stored_runs import stored_run

    if given := config_of_job(name):
        return Run(given)
    if Path(name).is_file() or name.endswith((".yaml", ".yml")):
        return open_run(Path(name), changes)
    add_user_code()
    run = stored_run(name, root)
    for key, value in _overrides(changes or []).items():
        raise ValueError(f"--set {key}={value}: a run given by name keeps its config; give the RUN.yaml to change it")
    return run


def existing_run(name: str, root: str) -> Run:
    """A run that has been started; ValueError where it has not, rather than making one."""
    run = find_run(name, root)
    is_file = not run.config.storage.journal
    if is_file and not Path(run.folder, "journal.db").is_file():
        raise ValueError(f"run {run.run_id!r} has not been started: there is no {run.folder}/journal.db")
    if not is_file and run.run_id not in {row.run_id for row in run.journal.runs()}:
        raise ValueError(f"run {run.run_id!r} has not been started: it is not in {run.journal.shown_url}")
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
    """The run config of a file, or of the job where it bears that name."""
    from pipelines.config.run_config import load_config

    if given := config_of_job(str(config)):
        return given
    add_user_code()
    return load_config(config, _overrides(changes or []))


def _overrides(changes: list[str]) -> dict[str, Any]:
    found = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"--set {change!r} is not of the form KEY=VALUE")
        found[key] = yaml.safe_load(value)
    return found


@contextmanager
def errors(debug: bool) -> Iterator[None]:
    """A failure ends in one message and the exit code of its kind, see pipelines/cluster/faults.py."""
    try:
        configure()
        yield
    except (KeyboardInterrupt, Exception) as error:
        if debug and isinstance(error, Exception):
            raise
        from pipelines.cluster.faults import ClusterLost, diagnose

        fault = diagnose(error)
        if isinstance(error, ClusterLost):
            from pipelines.run.watchdog import end_process

            print(f"troupe: {fault.message}", file=sys.stderr)
            end_process(fault.exit_code)  # a shutdown would ask the head
        _fail(fault.message, fault.exit_code)


def _fail(message: str, code: int) -> None:
    print(f"troupe: {message}", file=sys.stderr)
    raise SystemExit(code)

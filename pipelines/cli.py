"""cli: `troupe ...`. Every command parses its input, says in one line what is wrong with it, and exits non-zero.

Nothing heavy is imported before a command needs it: `troupe --help` answers at once.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

if TYPE_CHECKING:
    from pipelines.config import RunConfig
    from pipelines.run import Run

app = typer.Typer(
    help="Train multi-agent LLM workflows with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunName = Annotated[
    str, typer.Option("--run", metavar="RUN", help="Run config (RUN.yaml), or the name of a run below --root.")
]
Root = Annotated[Path, typer.Option(help="Folder that holds the runs, for runs given by name.")]
ConfigPath = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run config.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. train.optimizer.lr=1e-4.")
]
Address = Annotated[str, typer.Option(help="Ray cluster; default RAY_ADDRESS, else a local head for this command.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command()
def train(
    config: ConfigPath,
    changes: Changes = None,
    address: Address = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and the plan, start nothing.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Run every iteration that is not done yet. Ctrl-C is safe: the same command goes on."""
    with _errors(debug):
        loaded = _load(config, changes)
        _check(loaded)
        if dry_run:
            _print_plan(loaded)
            return
        from pipelines.local_runner import train_team
        from pipelines.progress import Screen

        train_team(loaded, address=address, screen=Screen())


@app.command()
def stage(
    name: Annotated[str, typer.Argument(help="collect, score, train, sync, evaluate or promote.")],
    config: RunName,
    iteration: Annotated[int, typer.Option("--iteration", min=1, help="Which iteration, from 1.")],
    model_group: Annotated[str, typer.Option("--model-group", help="For train: which model group.")] = "",
    root: Root = Path("runs"),
    changes: Changes = None,
    address: Address = "",
    debug: Debug = False,
) -> None:
    """Run one stage of one iteration, or return its recorded ref if it is done. Prints the ref as JSON."""
    with _errors(debug):
        run = _find(config, root, changes)
        run.open()
        key = run.key(iteration, name, model_group)
        ref = run.journal.ref(key)
        if ref is None:
            from pipelines.cluster import connect
            from pipelines.stages import STAGES, run_stage

            if name not in STAGES:
                raise ValueError(f"unknown stage {name!r}: one of {', '.join(STAGES)}")
            if name not in ("score", "promote"):
                connect(address)
            ref = run_stage(run, name, iteration, model_group=model_group)
        print(json.dumps(ref, indent=2))


@app.command("record")
def record_iteration(
    config: RunName,
    iteration: Annotated[int, typer.Option("--iteration", min=1, help="Which iteration, from 1.")],
    root: Root = Path("runs"),
    debug: Debug = False,
) -> None:
    """Show a finished iteration to people: its MLflow run with metrics, traces and links; report.json and report.html."""
    with _errors(debug):
        from pipelines.record import record

        print(f"troupe-ref: {json.dumps(record(_existing(config, root), iteration))}")


@app.command()
def warmstart(config: ConfigPath, changes: Changes = None, debug: Debug = False) -> None:
    """Make version 0 of every model group: supervised training on demonstrations or chosen traces."""
    with _errors(debug):
        from pipelines.begin import make_version_zero
        from pipelines.progress import Screen

        run = _open(config, changes)
        run.open()
        with Screen().stage("warm start") as progress:
            result = make_version_zero(run, progress=progress)
        for group, ref in result["models"].items():
            print(f"{group} v{ref['version']}  {ref['uri']}")


@app.command()
def validate(config: ConfigPath, changes: Changes = None, debug: Debug = False) -> None:
    """Check a run config, its workflow, credit rule and task files without starting anything."""
    with _errors(debug):
        loaded = _load(config, changes)
        _check(loaded)
        print(f"{config}: ok ({len(loaded.model_groups)} model groups, {len(loaded.group_of)} agents)")


@app.command()
def evaluate(
    team: Annotated[
        str, typer.Argument(metavar="TEAM@ALIAS", help="Run (name or RUN.yaml) and alias or team version.")
    ],
    tasks: Annotated[Path, typer.Option(help="JSON, JSONL or Parquet file of tasks.")],
    root: Root = Path("runs"),
    address: Address = "",
    debug: Debug = False,
) -> None:
    """Let a registered team play a file of tasks; print accuracy with its interval and the format per agent."""
    with _errors(debug):
        from pipelines.inspect import evaluate_team

        name, _, alias = team.rpartition("@")
        if not name:
            raise ValueError(f"{team!r} is not of the form TEAM@ALIAS, e.g. demo@champion or my_run.yaml@3")
        print(json.dumps(evaluate_team(_existing(name, root), alias, tasks, address=address), indent=2))


@app.command()
def runs(
    root: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("runs"), debug: Debug = False
) -> None:
    """List runs: how far they are and what they reached."""
    with _errors(debug):
        from rich.console import Console

        from pipelines.inspect import runs_table

        Console().print(runs_table(root))


@app.command()
def show(
    episode: Annotated[str, typer.Argument(help="Episode id or a unique beginning of it.")],
    config: RunName,
    root: Root = Path("runs"),
    debug: Debug = False,
) -> None:
    """Show an episode: every turn with prompt, completion, format verdict and credit."""
    with _errors(debug):
        from rich.console import Console

        from pipelines.inspect import episode_view

        Console().print(episode_view(_existing(config, root), episode))


@app.command()
def diff(
    task: Annotated[str, typer.Argument(help="Task id.")],
    first: Annotated[int, typer.Argument(help="Iteration of the first version (0: before training).")],
    second: Annotated[int, typer.Argument(help="Iteration of the second version.")],
    config: RunName,
    root: Root = Path("runs"),
    debug: Debug = False,
) -> None:
    """Show how two versions of the team played the same task, side by side."""
    with _errors(debug):
        from rich.console import Console

        from pipelines.inspect import diff_view

        Console().print(diff_view(_existing(config, root), task, first, second))


@app.command()
def export(
    model_group: Annotated[str, typer.Argument(help="Model group.")],
    version: Annotated[int, typer.Argument(help="Version of its model.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    config: RunName,
    root: Root = Path("runs"),
    debug: Debug = False,
) -> None:
    """Write a model version as a Hugging Face folder, hashes checked."""
    with _errors(debug):
        from pipelines.inspect import export_version

        print(export_version(_existing(config, root), model_group, version, out))


@app.command()
def report(
    config: Annotated[str, typer.Argument(metavar="RUN", help="Run config, or the name of a run below --root.")],
    root: Root = Path("runs"),
    debug: Debug = False,
) -> None:
    """Write report.json and report.html again from what is stored."""
    with _errors(debug):
        from pipelines.record import write_reports

        _, paths = write_reports(_existing(config, root))
        for path in paths.values():
            print(path)


def _open(config: Path, changes: list[str] | None) -> Run:
    from pipelines.run import Run

    return Run(_load(config, changes))


def _find(name: str, root: Path, changes: list[str] | None = None) -> Run:
    """A run by its config file, or by its name from the config that its journal keeps."""
    from pipelines.config import parse_config
    from pipelines.run import Run

    if Path(name).is_file() or name.endswith((".yaml", ".yml")):
        return _open(Path(name), changes)
    path = root / name / "journal.db"
    if not path.is_file():
        known = sorted(p.parent.name for p in root.glob("*/journal.db"))
        raise ValueError(
            f"no run {name!r} below {root}; there are: {', '.join(known) or 'none'} (or give its RUN.yaml)"
        )
    from stores.journal import Journal

    row = next(row for row in Journal(f"sqlite:///{path.resolve()}").runs() if row.run_id == name)
    _add_user_code()
    data = json.loads(row.config_json)
    for key, value in _overrides(changes or []).items():
        raise ValueError(f"--set {key}={value}: a run given by name keeps its config; give the RUN.yaml to change it")
    data["storage"]["root"] = str(root)
    return Run(parse_config(data, str(path)))


def _existing(name: str, root: Path) -> Run:
    """A run that has been started; ValueError where it has not, rather than making one."""
    run = _find(name, root)
    if not run.config.storage.journal and not (Path(run.folder) / "journal.db").is_file():
        raise ValueError(f"run {run.run_id!r} has not been started: there is no {run.folder}/journal.db")
    return run


def _add_user_code() -> None:
    """Modules of the folder that the command is started in can be named in configs, here and in Ray's workers."""
    sys.path.insert(0, os.getcwd())
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (os.getcwd(), os.environ.get("PYTHONPATH", "")) if p)


def _load(config: Path, changes: list[str] | None) -> RunConfig:
    from pipelines.config import load_config

    _add_user_code()
    return load_config(config, _overrides(changes or []))


def _overrides(changes: list[str]) -> dict[str, Any]:
    found = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"--set {change!r} is not of the form KEY=VALUE")
        found[key] = yaml.safe_load(value)
    return found


def _check(config: RunConfig) -> None:
    from pipelines.validate import check

    check(config)


def _print_plan(config: RunConfig) -> None:
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    groups = ", ".join(
        f"{g} ({config.train_config(g).algorithm}: {', '.join(m.agents)})" for g, m in config.model_groups.items()
    )
    episodes = config.collect.tasks_per_iteration * config.collect.episodes_per_task
    print(f"plan: begin -> {config.iterations} x [collect {episodes} episodes -> score -> train {groups}")
    print(f"      -> sync -> evaluate every {config.evaluate.every} -> promote] -> report")


@contextmanager
def _errors(debug: bool) -> Iterator[None]:
    """Bad input ends in one message and exit code 2, a failed stage in 1, Ctrl-C in 130."""
    try:
        yield
    except KeyboardInterrupt:
        _fail("interrupted: what is finished is kept, the same command goes on", 130)
    except Exception as error:
        if debug:
            raise
        _fail(_message(error), 2 if isinstance(error, ValueError) else 1)


def _message(error: BaseException) -> str:
    if getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
        place = getattr(error, "filename", None) or "a store"
        return f"disk full while writing {place}: free some space, what is finished is kept; the same command goes on"
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{kind}{error}"


def _fail(message: str, code: int) -> None:
    print(f"troupe: {message}", file=sys.stderr)
    raise SystemExit(code)


def main(run: Callable[[], None] = app) -> None:
    """Entry point of the `troupe` command."""
    # Ray forks from processes that hold a LanceDB connection; the children never use it.
    warnings.filterwarnings("ignore", message="lancedb fork support")
    run()

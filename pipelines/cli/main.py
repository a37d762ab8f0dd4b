"""main: the command `troupe`. Every command parses its input, reports in one line what is wrong with it, and exits non-zero.

Nothing heavy is imported before a command needs it: `troupe --help` answers at once.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from inspect import signature
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from pipelines.cli import jobs, new_team, service, tools
from pipelines.cli.options import (
    LOOK,
    TRAIN,
    Address,
    Changes,
    ConfigPath,
    IterationNumber,
    Root,
    RunArgument,
    RunName,
    TeamName,
    config_of_job,
    errors,
    existing_run,
    find_run,
    load,
    open_run,
    reports_errors,
    split_team,
    telling,
)
from pipelines.stages.table import STAGES, Step, stage_named
from stores.by_name import open_by_name
from stores.extensions import extensions, left_out_if_broken
from stores.types import EpisodeStatus, Purpose

if TYPE_CHECKING:
    from pipelines.config.run_config import RunConfig
    from pipelines.run.run import Run
    from stores.traces.lookup import Asked

app = typer.Typer(
    help="Train multi-agent LLM workflows with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
new_team.add_to(app)  # first of the list


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(version("troupe-rl"))
        raise typer.Exit


@app.callback()
def _troupe(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Shows the version.")
    ] = False,
) -> None:
    pass


@app.command(rich_help_panel=TRAIN)
@reports_errors
def train(
    config: ConfigPath,
    changes: Changes = None,
    address: Address = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Prints the resolved config and the plan, and starts nothing.")
    ] = False,
    from_traces: Annotated[
        str,
        typer.Option(
            "--from-traces",
            metavar="RUN@ITERATION",
            help="Trains one iteration on the stored traces of another run instead of sampling. They are scored by this "
            "config's credit rule and weighed by importance; traces with too small an effective sample size are refused.",
        ),
    ] = "",
    store: Annotated[
        str,
        typer.Option(
            help="With --from-traces: the folder that holds that run, or its journal's URL. Default: where this run is."
        ),
    ] = "",
) -> None:
    """Run every iteration that is not done yet. After Ctrl-C the same command continues the run."""
    loaded = load(config, changes)
    if store and not from_traces:
        raise ValueError(f"--store {store} says where the run of --from-traces is: give that option, too")
    _check(loaded)
    if dry_run:
        _print_plan(loaded, from_traces)
        return
    from pipelines.report.progress import Screen
    from pipelines.runners.local_runner import train_team

    if not from_traces:
        train_team(loaded, address=address, screen=Screen())
        return
    train_on_traces = open_by_name("pipelines.extensions.other_runs.from_run:train_on_traces", place="--from-traces")
    iteration, trained = train_on_traces(loaded, from_traces, store=store, address=address, screen=Screen())
    for group, result in trained.items():
        ess = result.metrics.get("train/ess")
        weight = "" if ess is None else f", effective sample size {ess:.3f}"
        reason = f": {result.reason}" if result.reason else ""
        print(f"{group} v{result.model.version}{weight}{reason}")
    print(
        f"iteration {iteration} is trained; the same command without --from-traces evaluates it and continues the run"
    )


@app.command(rich_help_panel=TRAIN)
@reports_errors
def stage(
    name: Annotated[str, typer.Argument(help=f"The stage: {', '.join(STAGES)}.")],
    config: RunName,
    iteration: IterationNumber,
    model_group: Annotated[str, typer.Option("--model-group", help="The model group; for train only.")] = "",
    root: Root = "runs",
    changes: Changes = None,
    address: Address = "",
) -> None:
    """Run one stage of one iteration unless it is done, and print its recorded result as JSON.

    With loop.max_lag it first waits for the stages of earlier iterations that it needs, and does those at which nobody is any more.
    """
    work = stage_named(name)
    run = find_run(config, root, changes)
    run.open()
    key = run.key(iteration, name, model_group)
    ref = run.journal.ref(key)
    if ref is None:
        from pipelines.cluster.connect import connect
        from pipelines.stages.steps import do_step, run_stage, settle

        work.check_model_group(run.config, model_group)
        if work.needs_cluster(run.config):
            connect(address)

        def connected(run: Run, step: Step) -> None:
            connect(address)
            do_step(run, step)

        settle(run, Step(iteration, name), connected)
        ref = run_stage(run, name, iteration, model_group=model_group).to_json()
    if config_of_job(run.run_id) is None:
        print(json.dumps(ref, indent=2))
    else:  # its log is read by people who have the journal, too
        jobs.hand_back(work.hand_on(ref))


@app.command("record", rich_help_panel=TRAIN)
@reports_errors
def record_iteration(
    config: RunName,
    iteration: IterationNumber,
    root: Root = "runs",
    address: Address = "",
) -> None:
    """Record a finished iteration: write its MLflow run with metrics, traces and links, and the files of the report.

    After the last iteration the champion also plays the test tasks, and the MLflow run of the whole run ends.
    """
    from pipelines.report.progress import Screen
    from pipelines.runners.schedule import record_iteration as record

    jobs.hand_back(record(existing_run(config, root), iteration, address=address, screen=Screen()))


@app.command(rich_help_panel=TRAIN)
@reports_errors
def warmstart(config: ConfigPath, changes: Changes = None) -> None:
    """Make version 0 of every model group: supervised training on demonstrations or chosen traces."""
    from pipelines.report.progress import Screen
    from pipelines.runners.begin import make_version_zero

    run = open_run(config, changes)
    run.open()
    with Screen().stage("warm start") as progress:
        result = make_version_zero(run, progress=progress)
    for group, ref in result.models.items():
        print(f"{group} v{ref.version}  {ref.uri}")


@app.command(rich_help_panel=TRAIN)
@reports_errors
def validate(
    config: ConfigPath,
    try_it: Annotated[
        bool,
        typer.Option(
            "--try",
            help="Also plays one episode against a model that says what the demonstrator would, or the shortest text that fits, and "
            "shows its turns: it finds a program that cannot start or does not reach its model.",
        ),
    ] = False,
    changes: Changes = None,
) -> None:
    """Check a run config with its workflow, credit rule and task files, without starting a run.

    Where the workflow acts in a world, one begins with a task. Fields of task files that nobody reads are named.
    """
    loaded = load(config, changes)
    _check(loaded)
    if try_it:
        try_episode = open_by_name("pipelines.extensions.preflight.try_episode:try_episode", place="--try")
        for line in try_episode(loaded):
            print(line)
    print(f"{config}: ok ({len(loaded.model_groups)} model groups, {len(loaded.group_of)} agents)")


@app.command(rich_help_panel=TRAIN)
@reports_errors
def evaluate(
    team: TeamName,
    tasks: Annotated[
        list[Path], typer.Option(help="A JSON, JSONL or Parquet file of tasks; give it again for other files.")
    ],
    k: Annotated[
        int | None, typer.Option(min=1, help="Episodes per task. [default: evaluate.episodes_per_task of the run]")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Sampling temperature of all agents. [default: evaluate.temperature of the run]"),
    ] = None,
    root: Root = "runs",
    address: Address = "",
) -> None:
    """Have a registered team solve files of tasks, and print its accuracy (avg@k) with a 95% interval, pass@k for each k, both also by
    data set, and figures per agent.
    """
    from pipelines.runners.by_request import evaluate_team

    name, alias = split_team(team)
    with telling(f"{team} plays the tasks of {', '.join(map(str, tasks))}"):
        result = evaluate_team(existing_run(name, root), alias, tasks, k=k, temperature=temperature, address=address)
    print(json.dumps(result, indent=2))


@app.command(rich_help_panel=LOOK)
@reports_errors
def runs(
    root: Annotated[str, typer.Option(help="The folder that holds the runs, or the URL of their journal.")] = "runs",
) -> None:
    """List the runs: how many iterations are done, the last stage, and the champion.

    A journal that cannot be read is named after the others, with what can be done, and the command exits with 2.
    """
    from rich.console import Console

    from pipelines.report.inspect import runs_table
    from pipelines.run.stored_runs import journals
    from stores.store_faults import UnreadableStore

    if "://" not in root and not Path(root).is_dir():
        raise ValueError(f"--root {root}: there is no such folder, seen from {Path.cwd()}")
    table, faults = runs_table(journals(root))
    Console().print(table)
    if faults:
        raise UnreadableStore("\n".join(faults))


@app.command(rich_help_panel=LOOK)
@reports_errors
def show(
    config: RunName,
    episode: Annotated[
        str, typer.Argument(help="The id of the episode, or a unique beginning of it. Left out: lists stored episodes.")
    ] = "",
    iteration: Annotated[
        int | None, typer.Option(min=0, help="Lists those of this iteration; 0: before training.")
    ] = None,
    purpose: Annotated[Purpose | None, typer.Option(help="Lists those that were played for this.")] = None,
    task: Annotated[str, typer.Option(help="Lists those of the task with this id.")] = "",
    status: Annotated[EpisodeStatus | None, typer.Option(help="Lists those that ended like this.")] = None,
    agent: Annotated[str, typer.Option(help="Lists those in which this agent has a turn.")] = "",
    min_outcome: Annotated[float | None, typer.Option(help="Lists those with this outcome or a higher one.")] = None,
    max_outcome: Annotated[float | None, typer.Option(help="Lists those with this outcome or a lower one.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="The number of episodes in the list.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Prints the list as JSON.")] = False,
    served: Annotated[
        bool, typer.Option("--served", help="Of what callers of the team were answered and let be kept.")
    ] = False,
    root: Root = "runs",
) -> None:
    """Show an episode: every turn with its prompt, completion, format check and credit. Without an id, list those that are stored.

    The newest come first.
    """
    from rich.console import Console

    from pipelines.report.inspect import episode_view, list_episodes, list_view

    bounds = (min_outcome, max_outcome)
    asked: Asked = {
        "iteration": iteration,
        "purpose": purpose,
        "task_id": task or None,
        "status": status,
        "agent": agent or None,
        "outcomes": None if bounds == (None, None) else bounds,
    }
    run = existing_run(config, root, is_read_only=True)
    if episode:
        if as_json or any(value is not None for value in asked.values()):
            raise ValueError(
                f"episode {episode!r} is shown by itself: leave its id out to list episodes by their properties"
            )
        Console().print(episode_view(run, episode, is_served=served))
        return
    listed = list_episodes(run, limit=limit, is_served=served, **asked)
    if as_json:
        print(json.dumps(listed, indent=2))
    else:
        Console().print(list_view(listed))


@app.command(rich_help_panel=LOOK)
@reports_errors
def diff(
    task: Annotated[str, typer.Argument(help="The id of the task.")],
    first: Annotated[
        int, typer.Argument(help="The iteration after which the first version played; 0: before training.")
    ],
    second: Annotated[int, typer.Argument(help="The iteration after which the second version played.")],
    config: RunName,
    root: Root = "runs",
) -> None:
    """Show side by side how two versions of the team played the same task."""
    from rich.console import Console

    from pipelines.report.inspect import diff_view

    Console().print(diff_view(existing_run(config, root, is_read_only=True), task, first, second))


@app.command(rich_help_panel=LOOK)
@reports_errors
def report(
    config: RunArgument,
    out: Annotated[
        Path | None, typer.Option(help="The folder that the files are written to. Default: the folder of the run.")
    ] = None,
    root: Root = "runs",
) -> None:
    """Write report.json, report.html and the files of extensions (timeline.json) anew from what is stored."""
    from pipelines.report.record import write_reports

    print(*write_reports(existing_run(config, root, is_read_only=True), out=out).paths.values(), sep="\n")


service.add_to(app)
jobs.add_to(app)
tools.add_to(app)
for _extension in extensions():
    if _extension.commands:
        with left_out_if_broken(f"extension {_extension.name}"):
            _known = len(app.registered_commands)
            open_by_name(_extension.commands, place="its commands")(app)
            for _command in app.registered_commands[_known:]:
                if _command.callback and "debug" not in signature(_command.callback).parameters:
                    _command.callback = reports_errors(_command.callback)


def _check(config: RunConfig) -> None:
    from pipelines.runners.validate import check

    for line in check(config):
        print(line, file=sys.stderr)


def _print_plan(config: RunConfig, from_traces: str = "") -> None:
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    groups = ", ".join(
        f"{g} ({config.train_config(g).algorithm}: {', '.join(m.agents)})" for g, m in config.model_groups.items()
    )
    if from_traces:
        print(f"plan: begin -> traces of {from_traces} -> score -> train {groups}")
        return
    episodes = config.collect.tasks_per_iteration * config.collect.episodes_per_task
    print(f"plan: begin -> {config.iterations} x [collect {episodes} episodes -> score -> train {groups}")
    print(f"      -> sync -> evaluate every {config.evaluate.every} -> promote] -> report")


def main(run: Callable[[], None] = app) -> None:
    """Entry point of the `troupe` command."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may lack what a model said
    # Ray forks from processes that hold a LanceDB connection; the children never use it.
    warnings.filterwarnings("ignore", message="lancedb fork support")
    try:
        run()
    except OSError:  # help and version are written outside of commands, which report their own errors
        with errors(debug=False):
            raise

"""cli: `troupe ...`. Every command parses its input, says in one line what is wrong with it, and exits non-zero.

Nothing heavy is imported before a command needs it: `troupe --help` answers at once.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from pipelines.cli import jobs, new_team, service, tools
from pipelines.cli.options import (
    Address,
    Changes,
    ConfigPath,
    Debug,
    Root,
    RunName,
    config_of_job,
    errors,
    existing_run,
    find_run,
    load,
    open_run,
)

if TYPE_CHECKING:
    from pipelines.config.run_config import RunConfig

app = typer.Typer(
    help="Train multi-agent LLM workflows with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def train(
    config: ConfigPath,
    changes: Changes = None,
    address: Address = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and the plan, start nothing.")
    ] = False,
    from_traces: Annotated[
        str,
        typer.Option(
            "--from-traces",
            metavar="RUN@ITERATION",
            help="Train one iteration on the stored traces of another run instead of sampling: paid by this config's "
            "credit rule, importance weights always on, refused where their effective sample size is too small.",
        ),
    ] = "",
    store: Annotated[
        str,
        typer.Option(
            help="With --from-traces: where that run is found, the folder that holds it or its journal's URL; default: "
            "where this one is."
        ),
    ] = "",
    debug: Debug = False,
) -> None:
    """Run every iteration that is not done yet. Ctrl-C is safe: the same command goes on."""
    with errors(debug):
        loaded = load(config, changes)
        if store and not from_traces:
            raise ValueError(f"--store {store} says where the run of --from-traces is: give that too")
        _check(loaded)
        if dry_run:
            _print_plan(loaded, from_traces)
            return
        from pipelines.report.progress import Screen
        from pipelines.runners.local_runner import train_on_traces, train_team

        if not from_traces:
            train_team(loaded, address=address, screen=Screen())
            return
        iteration, trained = train_on_traces(loaded, from_traces, store=store, address=address, screen=Screen())
        for group, ref in trained.items():
            weight = (
                f", effective sample size {ref['metrics']['train/ess']:.3f}" if "train/ess" in ref["metrics"] else ""
            )
            print(f"{group} v{ref['model']['version']}{weight}{': ' if ref['reason'] else ''}{ref['reason']}")
        print(f"iteration {iteration} is trained; the same command without --from-traces evaluates it and goes on")


@app.command()
def stage(
    name: Annotated[str, typer.Argument(help="collect, score, train, sync, evaluate or promote.")],
    config: RunName,
    iteration: Annotated[int, typer.Option("--iteration", min=1, help="Which iteration, from 1.")],
    model_group: Annotated[str, typer.Option("--model-group", help="For train: which model group.")] = "",
    root: Root = "runs",
    changes: Changes = None,
    address: Address = "",
    debug: Debug = False,
) -> None:
    """Run one stage of one iteration, or return its recorded ref if it is done. Prints the ref as JSON."""
    with errors(debug):
        run = find_run(config, root, changes)
        run.open()
        key = run.key(iteration, name, model_group)
        ref = run.journal.ref(key)
        if ref is None:
            from pipelines.cluster.connect import connect
            from pipelines.stages.run_stage import STAGES, run_stage

            if name not in STAGES:
                raise ValueError(f"unknown stage {name!r}: one of {', '.join(STAGES)}")
            if name != "score" and (name != "promote" or run.config.promote.into_service != "never"):
                connect(address)
            ref = run_stage(run, name, iteration, model_group=model_group)
        from pipelines.runners.claim import handed_on

        if config_of_job(run.run_id) is None:  # a job's log is read by people who have the journal, too
            print(json.dumps(ref, indent=2))
        jobs.hand_back(handed_on(name, ref))


@app.command("record")
def record_iteration(
    config: RunName,
    iteration: Annotated[int, typer.Option("--iteration", min=1, help="Which iteration, from 1.")],
    root: Root = "runs",
    address: Address = "",
    debug: Debug = False,
) -> None:
    """Show a finished iteration to people: its MLflow run with metrics, traces and links; report.json and report.html.

    After the last iteration the champion plays the test tasks, too, and the run's own MLflow run ends.
    """
    with errors(debug):
        from pipelines.monitoring.watching import handed_on
        from pipelines.report.progress import Screen
        from pipelines.report.record import finish_parent, record
        from pipelines.runners.begin import measure_last

        run = existing_run(config, root)
        ref = record(run, iteration)
        if iteration == run.config.iterations:
            measure_last(run, address=address, screen=Screen())
            finish_parent(run)
        jobs.hand_back(ref | ({"watch": handed_on(ref["watch"])} if "watch" in ref else {}))


@app.command()
def warmstart(config: ConfigPath, changes: Changes = None, debug: Debug = False) -> None:
    """Make version 0 of every model group: supervised training on demonstrations or chosen traces."""
    with errors(debug):
        from pipelines.report.progress import Screen
        from pipelines.runners.begin import make_version_zero

        run = open_run(config, changes)
        run.open()
        with Screen().stage("warm start") as progress:
            result = make_version_zero(run, progress=progress)
        for group, ref in result["models"].items():
            print(f"{group} v{ref['version']}  {ref['uri']}")


@app.command()
def validate(config: ConfigPath, changes: Changes = None, debug: Debug = False) -> None:
    """Check a run config, its workflow, credit rule and task files without starting anything."""
    with errors(debug):
        loaded = load(config, changes)
        _check(loaded)
        print(f"{config}: ok ({len(loaded.model_groups)} model groups, {len(loaded.group_of)} agents)")


@app.command()
def evaluate(
    team: Annotated[
        str, typer.Argument(metavar="TEAM@ALIAS", help="Run (name or RUN.yaml) and alias or team version.")
    ],
    tasks: Annotated[Path, typer.Option(help="JSON, JSONL or Parquet file of tasks.")],
    root: Root = "runs",
    address: Address = "",
    debug: Debug = False,
) -> None:
    """Let a registered team play a file of tasks; print accuracy with its interval and the format per agent."""
    with errors(debug):
        from pipelines.report.inspect import evaluate_team

        name, alias = _team(team)
        print(json.dumps(evaluate_team(existing_run(name, root), alias, tasks, address=address), indent=2))


@app.command("serve-config")
def print_serve_config(
    team: Annotated[
        str, typer.Argument(metavar="TEAM@ALIAS", help="Run (name or RUN.yaml) and alias or team version.")
    ],
    root: Root = "runs",
    debug: Debug = False,
) -> None:
    """Print the Serve config of a registered team's policy apps, for `serve deploy` or a RayService."""
    with errors(debug):
        from pipelines.report.inspect import serve_config

        name, alias = _team(team)
        print(yaml.safe_dump(serve_config(existing_run(name, root), alias), sort_keys=False), end="")


@app.command()
def runs(
    root: Annotated[str, typer.Option(help="Folder that holds the runs, or a journal's URL.")] = "runs",
    debug: Debug = False,
) -> None:
    """List runs: how far they are and what they reached."""
    with errors(debug):
        from rich.console import Console

        from pipelines.report.inspect import runs_table
        from pipelines.run.stored_runs import journals

        Console().print(runs_table(journals(root)))


@app.command()
def show(
    episode: Annotated[str, typer.Argument(help="Episode id or a unique beginning of it.")],
    config: RunName,
    root: Root = "runs",
    debug: Debug = False,
) -> None:
    """Show an episode: every turn with prompt, completion, format verdict and credit."""
    with errors(debug):
        from rich.console import Console

        from pipelines.report.inspect import episode_view

        Console().print(episode_view(existing_run(config, root), episode))


@app.command()
def diff(
    task: Annotated[str, typer.Argument(help="Task id.")],
    first: Annotated[int, typer.Argument(help="Iteration of the first version (0: before training).")],
    second: Annotated[int, typer.Argument(help="Iteration of the second version.")],
    config: RunName,
    root: Root = "runs",
    debug: Debug = False,
) -> None:
    """Show how two versions of the team played the same task, side by side."""
    with errors(debug):
        from rich.console import Console

        from pipelines.report.inspect import diff_view

        Console().print(diff_view(existing_run(config, root), task, first, second))


@app.command()
def export(
    model_group: Annotated[str, typer.Argument(help="Model group.")],
    version: Annotated[int, typer.Argument(help="Version of its model.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    config: RunName,
    is_merged: Annotated[
        bool, typer.Option("--merged", help="An adapter: merged with its base into one model, not as peft's folder.")
    ] = False,
    root: Root = "runs",
    debug: Debug = False,
) -> None:
    """Write a model version as a Hugging Face folder, an adapter as a peft folder, hashes checked."""
    with errors(debug):
        from pipelines.report.inspect import export_version

        print(export_version(existing_run(config, root), model_group, version, out, is_merged=is_merged))


@app.command()
def report(
    config: Annotated[str, typer.Argument(metavar="RUN", help="Run config, or the name of a run below --root.")],
    root: Root = "runs",
    debug: Debug = False,
) -> None:
    """Write report.json and report.html again from what is stored."""
    with errors(debug):
        from pipelines.report.record import write_reports

        _, places = write_reports(existing_run(config, root))
        for place in places.values():
            print(place)


@app.command()
def maintain(
    config: RunName,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, change nothing.")] = False,
    root: Root = "runs",
    debug: Debug = False,
) -> None:
    """Merge small files and remove old versions, weights and checkpoints that nothing needs (section `maintain`)."""
    with errors(debug):
        from pipelines.runners.maintain import described
        from pipelines.runners.maintain import maintain as tidy

        ref = tidy(existing_run(config, root), is_dry_run=dry_run)
        print("\n".join(described(ref)))
        jobs.hand_back(ref)


jobs.add_to(app)
service.add_to(app)
tools.add_to(app)
new_team.add_to(app)


def _check(config: RunConfig) -> None:
    from pipelines.runners.validate import check

    for line in check(config):
        print(line, file=sys.stderr)


def _team(text: str) -> tuple[str, str]:
    name, _, alias = text.rpartition("@")
    if not name:
        raise ValueError(f"{text!r} is not of the form TEAM@ALIAS, e.g. demo@champion or my_run.yaml@3")
    return name, alias


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
    # Ray forks from processes that hold a LanceDB connection; the children never use it.
    warnings.filterwarnings("ignore", message="lancedb fork support")
    run()

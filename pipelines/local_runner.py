"""local_runner: a run config -> a trained team, all stages in this process over one Ray cluster.

    begin ──> for each iteration: collect ──> score ──> train (per model group) ──> sync ──> evaluate ──> promote
                     ^                                                                                      │
                     └──────────────────────────────────────────────────────────────────────────────────────┘

Every stage goes through the journal, so the same command goes on where a killed one stopped.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipelines.begin import make_version_zero, measure_team, register_first_team
from pipelines.config import RunConfig
from pipelines.progress import Screen
from pipelines.run import Run
from pipelines.stages import run_stage
from pipelines.summary import iteration_summary, run_report
from stores.types import ModelVersionRef

NUM_EXAMPLES = 4
NUM_TRACES = 8
"""Traces of an iteration that go into MLflow's trace view; LanceDB has them all."""


def train_team(config: RunConfig, *, address: str = "", screen: Screen) -> dict[str, Any]:
    """Runs every iteration that is not done yet and writes report.json and report.html into the run's folder.

    Returns the report. Raises ValueError for a run name that another config holds, before anything starts.
    """
    from pipelines.cluster import connect

    began = time.perf_counter()
    run = Run(config)
    run.begin()
    with screen.stage("connect"):
        connect(address)
    run.traces.create()
    with screen.stage("warm start") as progress:
        make_version_zero(run, progress=progress)
    todo = [k for k in range(1, config.iterations + 1) if run.journal.ref(run.key(k, "promote")) is None]
    with _Tracking(run) as tracking:
        if todo or run.journal.ref(run.key(config.iterations, "measure")) is None:
            _bring_up(run, todo, screen)
        register_first_team(run)
        with screen.stage("before: test tasks") as progress:
            before = measure_team(run, run.trained(0), iteration=0, progress=progress)
        screen.measured("before", before)
        for iteration in range(1, config.iterations + 1):
            if iteration in todo:
                _iterate(run, iteration, screen)
            summary = iteration_summary(run, iteration)
            assert summary is not None, f"iteration {iteration} ran through without all its stages"
            if iteration in todo:
                screen.iteration(summary)
                tracking.iteration(summary)
        with screen.stage("after: test tasks") as progress:
            after = measure_team(run, _final_team(run), iteration=config.iterations, progress=progress)
        screen.measured("after", after)
        _add_wall(run, "wall", time.perf_counter() - began)
        report = run_report(run)
        paths = write_reports(run, report)
        tracking.finish(report, paths)
    screen.result(report, paths)
    return report


def _bring_up(run: Run, todo: list[int], screen: Screen) -> None:
    """Engines first, then the trainers one after another: starting all at once is slower on a small machine."""
    from pipelines.serving import start
    from pipelines.train import trainer_of

    models = run.parents(todo[0]) if todo else run.trained(run.config.iterations)
    with screen.stage("start engines"):
        start(run, models)
    if todo:
        with screen.stage("start trainers"):
            for group in run.config.model_groups:
                if run.config.train_config(group).keep_warm:
                    trainer_of(run, group).wait_ready(run.config.train_config(group).start_timeout_s)


def _iterate(run: Run, iteration: int, screen: Screen) -> None:
    began = time.perf_counter()
    groups = list(run.config.model_groups)
    for stage in ("collect", "score"):
        with screen.stage(stage, iteration) as progress:
            run_stage(run, stage, iteration, progress=progress)
    with screen.stage("train", iteration), ThreadPoolExecutor(max_workers=len(groups)) as pool:
        list(pool.map(lambda group: run_stage(run, "train", iteration, model_group=group), groups))
    for stage in ("sync", "evaluate", "promote"):
        with screen.stage(stage, iteration) as progress:
            run_stage(run, stage, iteration, progress=progress)
    _add_wall(run, f"wall/{iteration}", time.perf_counter() - began)


def _add_wall(run: Run, name: str, seconds: float) -> None:
    """Wall time, summed over the sittings that a run took."""
    before = run.journal.value(run.run_id, name)
    run.journal.put_value(run.run_id, name, {"seconds": seconds + (before["seconds"] if before else 0.0)})


def _final_team(run: Run) -> dict[str, ModelVersionRef]:
    """What the run hands over: its champion, which is the last team where that was promoted."""
    return run.champion()


def write_reports(run: Run, report: Mapping[str, Any]) -> dict[str, Path]:
    """Writes report.json and report.html; returns their paths."""
    from pipelines.report import Example, ExampleEpisode, ReportData, write_report

    folder = Path(run.folder)
    folder.mkdir(parents=True, exist_ok=True)
    json_path = folder / "report.json"
    json_path.write_text(json.dumps(report, indent=2))
    rows = [row for k in range(1, run.config.iterations + 1) if (row := iteration_summary(run, k))]
    before, after = (_traces_of(run, k) for k in (0, run.config.iterations))

    def shown(found: Mapping[str, Any], task_id: str) -> ExampleEpisode | None:
        trace = found.get(task_id)
        if trace is None:
            return None
        rewards = [r for r in run.traces.rewards_of(trace.episode_id) if r.credit_version == run.credit_version]
        return ExampleEpisode(trace=trace, rewards=rewards[0] if rewards else None)

    chosen = sorted(set(before) & set(after))[:NUM_EXAMPLES]
    data = ReportData(
        run_id=run.run_id,
        headline={key: report[key] for key in ("before", "after", "delta", "delta_ci95")},
        iterations=rows,
        examples=[Example(before=shown(before, task), after=shown(after, task)) for task in chosen],
        notes=_notes(run),
        facts={
            "workflow": run.config.workflow.path,
            "credit": run.config.credit.path,
            "model groups": ", ".join(f"{g}: {' + '.join(m.agents)}" for g, m in run.config.model_groups.items()),
            "algorithm": ", ".join(f"{g}: {name}" for g, name in report["algorithm"].items()),
            "seed": run.config.seed,
            "versions": ", ".join(f"{g} v{v}" for g, v in report["versions"].items()),
            "team version": report["team_version"],
            "commit": report["commit"],
        },
    )
    return {"json": json_path, "html": Path(write_report(data, folder / "report.html"))}


def _notes(run: Run) -> list[str]:
    warm = run.config.warmstart
    if warm is None or warm.tiny_model is None:
        return []
    return [
        "The models are tiny and made from nothing by a warm start on generated demonstrations of mixed quality, "
        "so that they know the format and are often wrong. This shows that the loop works, not what large models gain."
    ]


def _traces_of(run: Run, iteration: int) -> dict[str, Any]:
    """One test trace per task of a measurement, by task id."""
    from stores.types import TracesRef

    measured = run.journal.ref(run.key(iteration, "measure"))
    if measured is None:
        return {}
    return {trace.task.task_id: trace for trace in run.traces.read_traces(TracesRef(**measured["traces"]))}


class _Tracking:
    """MLflow, written by a thread of its own: importing and migrating it takes seconds that nothing must wait for."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._jobs: list[Any] = []

    def __enter__(self) -> _Tracking:
        self._submit(self._start)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self._submit(lambda: self._run.tracker.finish("FAILED" if kind is not KeyboardInterrupt else "KILLED"))
        self._pool.shutdown(wait=True)
        for job in self._jobs:
            if kind is None:
                job.result()

    def iteration(self, summary: Mapping[str, Any]) -> None:
        """Metrics and a few traces of one iteration."""
        self._submit(lambda: self._log(summary))

    def finish(self, report: Mapping[str, Any], paths: Mapping[str, Path]) -> None:
        """Result and artifacts; ends the MLflow run."""

        def work() -> None:
            tracker = self._run.tracker
            numbers = {k: report[k] for k in ("delta", "sync_seconds") if report[k] is not None}
            for name in ("before", "after"):
                if report[name]:
                    numbers[f"{name}/accuracy"] = report[name]["accuracy"]
            tracker.log_metrics(numbers, self._run.config.iterations)
            for path in paths.values():
                tracker.log_artifact(path)
            tracker.finish("FINISHED")

        self._submit(work)

    def _submit(self, work: Any) -> None:
        self._jobs.append(self._pool.submit(work))

    def _start(self) -> None:
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        config = self._run.config
        self._run.tracker.start(
            params={
                "workflow": config.workflow.path,
                "credit": config.credit.path,
                "seed": config.seed,
                "config_sha256": config.sha256,
                **{f"algorithm/{g}": config.train_config(g).algorithm for g in config.model_groups},
            },
            tags={"troupe.run": self._run.run_id},
        )

    def _log(self, summary: Mapping[str, Any]) -> None:
        iteration = int(summary["iteration"])
        metrics: dict[str, float] = dict(summary["metrics"])
        metrics |= {f"seconds/{stage}": s for stage, s in summary["seconds"].items()}
        for group, figures in summary["groups"].items():
            metrics |= {f"{group}/{name}": value for name, value in figures.items()}
        for agent, figures in summary["agents"].items():
            metrics |= {f"agent/{agent}/{name}": value for name, value in figures.items()}
        if summary["evaluation"]:
            metrics["evaluate/accuracy"] = summary["evaluation"]["candidate"]["mean"]
        self._run.tracker.log_metrics(metrics, iteration)
        traces = self._run.traces.find_traces(run_id=self._run.run_id, iteration=iteration, limit=NUM_TRACES)
        rewards = {
            trace.episode_id: [
                r for r in self._run.traces.rewards_of(trace.episode_id) if r.credit_version == self._run.credit_version
            ]
            for trace in traces
        }
        self._run.tracker.log_traces([(trace, next(iter(rewards[trace.episode_id]), None)) for trace in traces])

"""record: an iteration whose stages are done -> what shows it to people: MLflow, report.json, report.html.

    journal, traces ──> an MLflow run of the iteration, nested under the run's own, with links to DAG run and Ray jobs
                   ├──> a point on every curve of the run's own
                   └──> runs/<run>/report.json, report.html and files of extensions, as far as the run has come

The last task of a DAG run, and what the local runner calls after each iteration. Done once per iteration, like a stage.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.cluster.observe import Observer, tell
from pipelines.cluster.owner_links import as_markdown, owner_links, stage_owner
from pipelines.config.run_config import leaves
from pipelines.report.parts import found_of, parts_of
from pipelines.report.result import run_report
from pipelines.report.summaries import RECORD, SoFar, Summaries, iteration_summary
from pipelines.report.summary import trained_agents
from pipelines.run.champions import hold_mlflow
from pipelines.run.run import Run, plain
from pipelines.run.scoring import rewards_for
from pipelines.stages.table import STAGES
from stores.extensions import hooks
from stores.files import write_file
from stores.journal.journal import DONE
from stores.logs import bound
from stores.settings import identity

STAGE = RECORD
REPORT, PAGE = "report.json", "report.html"
UPLOAD_EVERY = 10
"""The page goes into MLflow with the first iterations, then with each tenth, and at the end of the run; report.json always."""
NUM_TRACES = 8
"""Traces of an iteration that extensions may show beside its figures; LanceDB has them all."""


def record(run: Run, iteration: int) -> dict[str, Any]:
    """Shows a finished iteration in MLflow and the report; returns {"mlflow_run_id", "mlflow_url", "report", "links"} and, under the
    names of extensions, what they found (`watch`).

    Links to the DAG run and the Ray jobs come from the environment and the journal, see `owner_links`. Raises ValueError
    where a stage of the iteration is not done. Where iterations overlap, those before are recorded first, whoever left them.
    """
    if run.config.loop.max_lag:
        for earlier in sorted(set(range(1, iteration)) - set(run.journal.finished(run.run_id, STAGE))):
            _record_once(run, earlier)
    return _record_once(run, iteration)


def _record_once(run: Run, iteration: int) -> dict[str, Any]:
    with bound(run=run.run_id, iteration=iteration, stage=STAGE):
        ref = run.journal.once(run.key(iteration, STAGE), lambda lease: _record(run, iteration), owner=stage_owner())
        rows = [row for row in run.journal.stages(run.run_id, iteration) if row.stage == STAGE]
        tell(Observer.stages, rows, has_latest=False)
        return ref


def open_parent(run: Run) -> None:
    """Makes the MLflow run of the whole run, or opens it again: its params are all that identifies the run, and run.yaml the whole config."""
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    params = dict(leaves(identity(run.config))) | {"config_sha256": run.config.sha256}
    with hold_mlflow(run):
        run.tracker.start(params=params, tags={"troupe.run": run.run_id})
    run.tracker.log_dict("run.yaml", run.config.model_dump(mode="json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The reports of a run."""

    report: dict[str, Any]
    """The content of report.json."""
    paths: Mapping[str, str]
    """By the names of the files."""
    lines: Sequence[str]
    """What the terminal says of the run at its end."""


def finish_parent(run: Run) -> Written:
    """Ends a run: writes the reports with `after`, and the result into MLflow."""
    written = write_reports(run)
    report = written.report
    numbers = {k: report[k] for k in ("delta", "sync_seconds") if report[k] is not None}
    numbers |= {f"{name}/accuracy": report[name]["accuracy"] for name in ("before", "after") if report[name]}
    rows = run.journal.stages(run.run_id, run.config.iterations)
    run.tracker.log_metrics(numbers, run.config.iterations, at=max(row.ended_at or row.started_at for row in rows))
    for path in written.paths.values():
        run.tracker.log_file(path)
    run.tracker.finish("FINISHED")
    return written


def _record(run: Run, iteration: int) -> dict[str, Any]:
    summary = iteration_summary(run, iteration)
    if summary is None:
        done = {row.stage for row in run.journal.stages(run.run_id, iteration) if row.status == DONE}
        missing = [name for name in STAGES if name not in done]
        raise ValueError(
            f"iteration {iteration} of run {run.run_id!r} is not done, {', '.join(missing)} missing: run that first"
        )
    rows = [row for row in run.journal.stages(run.run_id, iteration) if row.stage in STAGES]
    links = owner_links(rows)
    ended_at = max(row.ended_at or row.started_at for row in rows)
    found = found_of(run, iteration, at=ended_at)
    metrics = iteration_metrics(summary | {"trained_agents": trained_agents(run, iteration)})
    tags = _tags(summary, links)
    for of in found.values():
        metrics |= of.metrics
        tags |= of.tags
    open_parent(run)
    shown = run.tracker.log_iteration(
        iteration,
        metrics=metrics,
        tags=tags,
        started_at=min(row.started_at for row in rows),
        ended_at=ended_at,
    )
    _show_episodes(run, iteration, shown.mlflow_run_id)
    paths = write_reports(run).paths
    run.tracker.log_file(paths[REPORT])
    if iteration <= UPLOAD_EVERY or iteration % UPLOAD_EVERY == 0:
        run.tracker.log_file(paths[PAGE])
    return {**plain(shown), "report": paths[PAGE], "links": links, **{name: of.result for name, of in found.items()}}


def iteration_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """What MLflow's curves show of an iteration: `train/<group>/<name>` and `train/<group>/<agent>/<name>` of training,
    `agent/<agent>/<name>` of all that is known of an agent, `sync/<group>/<name>` of the proofs,
    `warnings/<kind>/<where>/<figure>` 1 for each warning.
    """
    metrics: dict[str, float] = dict(summary["metrics"])
    metrics |= {f"seconds/{stage}": s for stage, s in summary["seconds"].items()}
    metrics |= {f"policy_version/{group}": float(version) for group, version in summary["versions"].items()}
    for group, figures in summary["groups"].items():
        metrics |= {f"train/{group}/{name.removeprefix('train/')}": value for name, value in figures.items()}
    for group, agents in summary["trained_agents"].items():
        for agent, figures in agents.items():
            metrics |= {f"train/{group}/{agent}/{name}": value for name, value in figures.items()}
    for agent, figures in summary["agents"].items():
        metrics |= {f"agent/{agent}/{name}": value for name, value in figures.items()}
    metrics["warnings/count"] = float(len(summary["warnings"]))
    metrics |= {f"warnings/{warning.key}": 1.0 for warning in summary["warnings"]}
    for group, figures in summary.get("proofs", {}).items():
        metrics |= {f"sync/{group}/{name}": value for name, value in figures.items()}
    if summary["evaluation"]:
        metrics["evaluate/accuracy"] = summary["evaluation"]["candidate"]["mean"]
        if (solved := summary["evaluation"]["solved"]["candidate"]) is not None:
            metrics["evaluate/solved"] = solved
    return metrics


def _tags(summary: Mapping[str, Any], links: Mapping[str, str]) -> dict[str, str]:
    tags = {f"troupe.policy_version.{group}": str(version) for group, version in summary["versions"].items()}
    tags |= {f"troupe.link.{name}": link for name, link in links.items()}
    tags |= {f"troupe.warning.{warning.key}": f"{warning.what}; try: {warning.try_}" for warning in summary["warnings"]}
    if summary["evaluation"]:
        tags |= {
            "troupe.verdict": summary["evaluation"]["verdict"],
            "troupe.condition": summary["evaluation"]["condition"],
        }
    return tags | {"mlflow.note.content": as_markdown(links)} if links else tags


def _show_episodes(run: Run, iteration: int, mlflow_run: str) -> None:
    if shows := hooks("episodes"):
        traces = run.traces.find_traces(run_id=run.run_id, iteration=iteration, variant="", limit=NUM_TRACES)
        episodes = [(trace, rewards_for(run, trace)) for trace in traces]
        for show in shows.values():
            show(run.tracker, mlflow_run, episodes)


def write_reports(run: Run, *, out: Path | None = None) -> Written:
    """Writes report.json, report.html and the files of extensions from what is stored so far.

    Args: out: the folder that they are written to; default that of the run. ValueError where nothing can be written to it.
    """
    from pipelines.report.page import ReportData, render

    summaries = Summaries(run)
    so_far = summaries.so_far()
    rows = summaries.rows(so_far.numbers_to_draw())
    report = run_report(run, so_far, rows)
    parts = parts_of(run, so_far.last)
    for part in parts:
        report |= part.values
    data = ReportData(
        run_id=run.run_id,
        headline={key: report[key] for key in ("before", "after", "delta", "delta_ci95")},
        control=report["control"],
        parts=parts,
        iterations=rows,
        extremes=so_far.extreme_rows(),
        num_iterations=so_far.num_iterations,
        total_seconds=so_far.seconds.get("total", 0.0),
        warnings=so_far.shown_warnings(),
        num_warnings=so_far.num_warnings,
        notes=_notes(run, so_far),
        facts=_facts(run, report),
    )
    contents = {REPORT: json.dumps(report, indent=2), PAGE: render(data)}
    for part in parts:
        contents |= part.files
    folder = run.folder if out is None else str(out)
    paths = {name: f"{folder}/{name}" for name in contents}
    for name, path in paths.items():
        try:
            write_file(path, contents[name].encode())
        except OSError as error:
            if not run.is_read_only:
                raise
            reason = "disk full" if error.errno == errno.ENOSPC else error.strerror
            raise ValueError(
                f"run {run.run_id!r}: {path} cannot be written ({reason}): name another folder with --out"
            ) from None
    return Written(report=report, paths=paths, lines=[line for part in parts for line in part.lines])


def _facts(run: Run, report: Mapping[str, Any]) -> dict[str, Any]:
    facts = {
        "workflow": run.config.workflow.path,
        "credit": run.config.credit.path,
        "model groups": ", ".join(f"{g}: {' + '.join(m.agents)}" for g, m in run.config.model_groups.items()),
        "algorithm": ", ".join(f"{g}: {name}" for g, name in report["algorithm"].items()),
        "seed": run.config.seed,
        "versions": ", ".join(f"{g} v{v}" for g, v in report["versions"].items()),
        "team version": report["team_version"],
        "commit": report["commit"],
    }
    return {name: fact for name, fact in facts.items() if fact not in (None, "")}  # of a run that has just begun


def _notes(run: Run, so_far: SoFar) -> Sequence[str]:
    notes = []
    warm = run.config.warmstart
    if warm is not None and warm.tiny_model is not None:
        notes.append(
            "The models are tiny and made from nothing by a warm start on generated demonstrations of mixed quality, so "
            "that they know the format and are often wrong. This shows that the loop works, not what large models gain."
        )
    if taken := so_far.notes.get("source"):
        notes.append(f"Nothing was sampled for iteration {', '.join(taken)}: trained on the traces of that run.")
    notes += so_far.notes.get("failed", [])
    if lost := so_far.notes.get("lost"):
        notes.append(
            f"Optimizer (and critic, with PPO) started afresh in iteration {', '.join(lost)}: no checkpoint of the version "
            "that was trained from was left."
        )
    return notes

"""airflow_stages: seconds per stage that Airflow and Ray jobs add beside the local runner, on the same warm cluster.

Airflow     iterations 1 (warms the cluster), 2 and 3 of a run with one Ray job per iteration, then of one with a job per stage
local       iterations 4 and 5 of the first run, in one process that joins the same cluster; 5 is compared, as 4 warms the process
floor       an empty Ray job (`true`), and one that only joins the cluster, from submission to its seen end
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from pipelines.cluster.job_api import JobApi
from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.stages.table import STAGES
from tests.bench.figures import Figure
from tests.bench.setting import ROOT
from tests.e2e.airflow_client import LocalAirflow

SMALL = ROOT / "tests" / "e2e" / "small.yaml"
LIMIT_S = 2.5
NUM_EMPTY = 3


def measure(folder: Path) -> list[Figure]:
    """Three iterations by Airflow in either way, two by the local runner, and the floor, all on one Ray head."""
    configs = {jobs: _write(folder, f"by_{jobs}", jobs, iterations=3) for jobs in ("iteration", "stage")}
    with LocalAirflow(folder / "cache", os.pathsep.join(map(str, configs.values()))) as airflow:
        by_iteration, by_stage = (_iterations(airflow, config) for config in configs.values())
        local = _local(_write(folder, "by_iteration", "iteration", iterations=5), airflow, folder)
        empty = _floor(airflow.jobs_url, "true")
        joining = _floor(airflow.jobs_url, f"{sys.executable} -c 'import ray; ray.init()'")
    return _figures(by_iteration, by_stage, local, empty, joining)


def _iterations(airflow: LocalAirflow, config: Path) -> list[dict[str, Any]]:
    """What the second and the third iteration of a run took by Airflow."""
    run = Run(load_config(config))
    dag = f"train_team__{run.run_id}"
    airflow.pause(dag, is_paused=False)
    airflow.wait(
        "three iterations",
        lambda: Path(run.folder).is_dir() and run.journal.ref(run.key(3, "record")),
        700,
    )
    skipped = airflow.wait("the one that skips", lambda: airflow.dag_runs(dag)[3:], 120)[0]["dag_run_id"]
    airflow.wait("its end", lambda: airflow.state(dag, skipped) == "success", 120)
    airflow.pause(dag, is_paused=True)
    api = JobApi(airflow.jobs_url)
    airflow.wait("quiet", lambda: all(job.has_ended for job in api.jobs()), 120)
    dag_runs = airflow.dag_runs(dag)[1:3]
    return [_timed(airflow, run, dag, found, iteration) for iteration, found in zip((2, 3), dag_runs, strict=True)]


def _figures(
    by_iteration: list[Mapping[str, Any]],
    by_stage: list[Mapping[str, Any]],
    local: float,
    empty: float,
    joining: float,
) -> list[Figure]:
    walls = [sum(t["wall"] for t in timed) / len(timed) for timed in (by_iteration, by_stage)]
    num = len(by_stage)
    parts = {part: sum(t["stages"][s][part] for t in by_stage for s in STAGES) / num / len(STAGES) for part in PARTS}
    others = [sum(t["others"] for t in timed) / len(timed) for timed in (by_iteration, by_stage)]
    each = "; ".join(
        f"{s} {sum(t['stages'][s]['task'] - t['stages'][s]['work'] for t in by_stage) / num:.1f}" for s in STAGES
    )
    where = ", ".join(f"{name} {parts[part]:.1f}" for part, name in PARTS.items() if part not in ("task", "work"))
    return [
        Figure(
            "added per stage, Airflow's iteration - the local one's, over six stages, a job per iteration",
            (walls[0] - local) / len(STAGES),
            "s",
            most=LIMIT_S,
            note=f"iteration {walls[0]:.1f} s by Airflow, {local:.1f} s by the local runner; begin, gate and record {others[0]:.1f} s of it",
        ),
        Figure(
            "the same, a job per stage",
            (walls[1] - local) / len(STAGES),
            "s",
            note=f"iteration {walls[1]:.1f} s by Airflow; begin, gate and record {others[1]:.1f} s of it",
        ),
        Figure("task - work, a job per stage", parts["task"] - parts["work"], "s", note=each),
        Figure("where it goes: Airflow", parts["before"] + parts["after"], "s", note=where),
        Figure("where it goes: the job around the work", parts["up"] + parts["down"], "s"),
        Figure("floor: an empty Ray job", empty, "s", note=f"that only joins the cluster: {joining:.1f} s"),
    ]


PARTS = {
    "task": "task",
    "work": "work",
    "before": "to submit",
    "up": "job to work (interpreter, imports, joining)",
    "down": "work to job's end",
    "after": "job's end to task's end, and to the next task",
}


def _timed(airflow: LocalAirflow, run: Run, dag: str, dag_run: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """Seconds of an iteration's tasks, cut at what Airflow, Ray and the journal wrote down."""
    jobs = {job.submission_id: job for job in JobApi(airflow.jobs_url).jobs()}
    rows = {row.stage: row for row in run.journal.stages(run.run_id, iteration)}
    tasks = {t["task_id"]: t for t in airflow.tasks(dag, dag_run["dag_run_id"]) if t["state"] == "success"}
    tasks["promote"] = tasks.get("promote") or tasks["report"]
    begin, end = _unix(tasks["begin"]["start_date"]), _unix(tasks["record"]["end_date"])
    starts = sorted(_unix(task["start_date"]) for task in tasks.values())
    stages = {}
    for stage in STAGES:
        row = rows[stage]
        group = "-team" if stage == "train" else ""
        job = jobs.get(f"troupe-{run.run_id}-it{iteration}-{stage}{group}-a0")
        start, stop = _unix(tasks[stage]["start_date"]), _unix(tasks[stage]["end_date"])
        following = next((s for s in starts if s >= stop), stop)
        assert row.ended_at
        stages[stage] = {"task": following - start, "work": row.ended_at - row.started_at}
        if job is None:  # the stage was done in the iteration's job
            continue
        assert job.started_at and job.ended_at
        stages[stage] |= {
            "before": job.started_at - start,
            "up": row.started_at - job.started_at,
            "down": job.ended_at - row.ended_at,
            "after": following - job.ended_at,
        }
    return {"wall": end - begin, "stages": stages, "others": end - begin - sum(s["task"] for s in stages.values())}


def _local(config: Path, airflow: LocalAirflow, folder: Path) -> float:
    """Wall seconds of the local runner's second iteration on the same cluster."""
    with (folder / "local.log").open("w") as log:
        subprocess.run(
            [Path(sys.executable).parent / "troupe", "train", config, "--address", airflow.ray_address],
            env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=300,
            check=True,
        )
    run = Run(load_config(config))
    wall = run.journal.value(run.run_id, "wall/5")
    assert wall is not None, "the local runner writes it"
    return float(wall["seconds"])


def _floor(address: str, entrypoint: str) -> float:
    """Mean seconds of a job, from its submission until its end is seen, asked ten times a second."""
    api = JobApi(address)
    seconds = []
    for number in range(NUM_EMPTY):
        began = time.perf_counter()
        job = f"empty-{abs(hash(entrypoint))}-{number}"
        api.submit({"entrypoint": entrypoint, "submission_id": job, "runtime_env": {}, "metadata": {}})
        while not ((found := api.job(job)) and found.has_ended):
            time.sleep(0.1)
        assert found.status == "SUCCEEDED", found.message
        seconds.append(time.perf_counter() - began)
    return sum(seconds) / len(seconds)


def _write(folder: Path, name: str, jobs: str, *, iterations: int) -> Path:
    data = yaml.safe_load(SMALL.read_text())
    schedule = {"cron": "@continuous", "jobs": jobs}
    data |= {"run": name, "iterations": iterations, "storage": {"root": str(folder / "runs")}, "schedule": schedule}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def _unix(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()

"""airflow_stages: seconds per stage that Airflow and Ray jobs add beside the local runner, on the same warm cluster.

Airflow     iterations 1 (warms the cluster), 2, 3, one Ray job per stage
local       iterations 4 and 5, in one process that joins the same cluster; 5 is compared, as 4 warms the process
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
DAG = "train_team__small"
LIMIT_S = 15.0
NUM_EMPTY = 3


def measure(folder: Path) -> list[Figure]:
    """Three iterations by Airflow, two by the local runner, and the floor, all on one Ray head."""
    config = _write(folder, iterations=3)
    with LocalAirflow(folder / "cache", str(config)) as airflow:
        airflow.pause(DAG, is_paused=False)
        run = Run(load_config(config))
        airflow.wait(
            "three iterations",
            lambda: Path(run.folder).is_dir() and run.journal.ref(run.key(3, "record")),
            700,
        )
        skipped = airflow.wait("the one that skips", lambda: airflow.dag_runs(DAG)[3:], 120)[0]["dag_run_id"]
        airflow.wait("its end", lambda: airflow.state(DAG, skipped) == "success", 120)
        airflow.pause(DAG, is_paused=True)
        api = JobApi(airflow.jobs_url)
        airflow.wait("quiet", lambda: all(job.has_ended for job in api.jobs()), 120)
        dag_runs = airflow.dag_runs(DAG)[1:3]
        timed = [_timed(airflow, run, found, iteration) for iteration, found in zip((2, 3), dag_runs, strict=True)]
        local = _local(_write(folder, iterations=5), airflow, folder)
        empty = _floor(airflow.jobs_url, "true")
        joining = _floor(airflow.jobs_url, f"{sys.executable} -c 'import ray; ray.init()'")
    return _figures(timed, local, empty, joining)


def _figures(timed: list[Mapping[str, Any]], local: float, empty: float, joining: float) -> list[Figure]:
    num = len(timed)
    wall = sum(t["wall"] for t in timed) / num
    parts = {part: sum(t["stages"][s][part] for t in timed for s in STAGES) / num / len(STAGES) for part in PARTS}
    others = sum(t["others"] for t in timed) / num
    each = "; ".join(
        f"{s} {sum(t['stages'][s]['task'] - t['stages'][s]['work'] for t in timed) / num:.1f}" for s in STAGES
    )
    where = ", ".join(f"{name} {parts[part]:.1f}" for part, name in PARTS.items() if part not in ("task", "work"))
    return [
        Figure(
            name="added per stage, Airflow's iteration - the local one's, over six stages",
            value=(wall - local) / len(STAGES),
            unit="s",
            limit=LIMIT_S,
            is_upper=True,
            note=f"iteration {wall:.1f} s by Airflow, {local:.1f} s by the local runner",
        ),
        Figure(name="task - work, mean of the stages", value=parts["task"] - parts["work"], unit="s", note=each),
        Figure(name="where it goes: Airflow", value=parts["before"] + parts["after"], unit="s", note=where),
        Figure(name="where it goes: the job around the work", value=parts["up"] + parts["down"], unit="s"),
        Figure(name="begin, gate and record together, per iteration", value=others, unit="s"),
        Figure(
            name="floor: an empty Ray job", value=empty, unit="s", note=f"that only joins the cluster: {joining:.1f} s"
        ),
    ]


PARTS = {
    "task": "task",
    "work": "work",
    "before": "to submit",
    "up": "job to work (interpreter, imports, joining)",
    "down": "work to job's end",
    "after": "job's end to task's end, and to the next task",
}


def _timed(airflow: LocalAirflow, run: Run, dag_run: Mapping[str, Any], iteration: int) -> dict[str, Any]:
    """Seconds of an iteration's tasks, cut at what Airflow, Ray and the journal wrote down."""
    jobs = {job.submission_id: job for job in JobApi(airflow.jobs_url).jobs()}
    rows = {row.stage: row for row in run.journal.stages(run.run_id, iteration)}
    tasks = {t["task_id"]: t for t in airflow.tasks(DAG, dag_run["dag_run_id"]) if t["state"] == "success"}
    tasks["promote"] = tasks.get("promote") or tasks["report"]
    begin, end = _unix(tasks["begin"]["start_date"]), _unix(tasks["record"]["end_date"])
    starts = sorted(_unix(task["start_date"]) for task in tasks.values())
    stages = {}
    for stage in STAGES:
        row = rows[stage]
        job = jobs[f"troupe-small-it{iteration}-{stage}" + ("-team" if stage == "train" else "") + "-a0"]
        start, stop = _unix(tasks[stage]["start_date"]), _unix(tasks[stage]["end_date"])
        following = next((s for s in starts if s >= stop), stop)
        assert job.started_at and job.ended_at and row.ended_at
        stages[stage] = {
            "task": following - start,
            "work": row.ended_at - row.started_at,
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


def _write(folder: Path, *, iterations: int) -> Path:
    data = yaml.safe_load(SMALL.read_text())
    data |= {"iterations": iterations, "storage": {"root": str(folder / "runs")}, "schedule": {"cron": "@continuous"}}
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def _unix(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()

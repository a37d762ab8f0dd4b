"""`troupe submit`, `jobs` and `stop` as a person types them, against a stand-in for Ray's dashboard."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_server import JobServer, job_server
from waits import wait_until

from pipelines.cli.jobs import _limit_s, hand_back
from pipelines.cluster.jobs import RUN_CONFIG_VARIABLE
from pipelines.config.run_config import load_config

pytestmark = pytest.mark.test

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
TROUPE = Path(sys.executable).parent / "troupe"
STAGE = ("--stage", "score", "--iteration", "2")
JOB = "troupe-small-it2-score-a0"


@pytest.fixture
def server() -> Iterator[JobServer]:
    with job_server() as found:
        yield found


def start(server: JobServer, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [TROUPE, *arguments],
        cwd=folder,
        env={**os.environ, "RAY_API_SERVER_ADDRESS": server.url, "RAY_AUTH_MODE": "disabled", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background ignores Ctrl-C, and what it starts would, too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def run_until_followed(server: JobServer) -> None:
    """Lets the job run once it is submitted, and waits until its log was read."""
    wait_until(lambda: server.requests)
    server.put(JOB, "RUNNING", "one\n")
    wait_until(lambda: server.read_logs.get(JOB) == "one\n")


def test_a_followed_job_shows_its_log_and_ends_the_command_as_it_ended(server: JobServer, tmp_path: Path) -> None:
    process = start(server, tmp_path, "submit", str(SMALL), *STAGE)
    run_until_followed(server)
    server.put(JOB, "FAILED", "one\ntroupe: score needs its collect\n", driver_exit_code=2)
    code, out, err = end(process)
    assert (code, out) == (2, "one\ntroupe: score needs its collect\n")
    assert f"job {JOB} FAILED: troupe: score needs its collect" in err
    assert server.requests[JOB]["entrypoint"].startswith(f"cd {tmp_path} || exit 2; troupe stage score --run small")


def test_ctrl_c_stops_a_followed_job_and_leaves_a_detached_one(server: JobServer, tmp_path: Path) -> None:
    process = start(server, tmp_path, "submit", str(SMALL), *STAGE)
    run_until_followed(server)
    process.send_signal(signal.SIGINT)
    assert end(process)[0] == 130
    assert server.stopped == [JOB]

    code, _, err = end(start(server, tmp_path, "submit", str(SMALL), *STAGE, "--detach"))
    assert (code, server.stopped) == (0, [JOB])
    assert f"troupe stop {JOB}" in err


def test_a_whole_run_is_one_job_that_carries_the_changed_config(server: JobServer, tmp_path: Path) -> None:
    assert end(start(server, tmp_path, "submit", str(SMALL), "--set", "iterations=7", "--detach"))[0] == 0
    ((job, request),) = server.requests.items()
    assert (job, request["entrypoint"].split("; ")[1]) == ("troupe-small-to-it7-a0", "troupe train small")
    assert json.loads(request["runtime_env"]["env_vars"]["TROUPE_RUN_CONFIG"])["iterations"] == 7


@pytest.mark.nightly
def test_jobs_are_listed_and_stopped_by_name(server: JobServer, tmp_path: Path) -> None:
    server.put("troupe-small-it1-collect-a0", "FAILED", start_time=1000, end_time=4000, driver_exit_code=3)
    other = {"troupe_run": "other"}
    server.put("troupe-other-it1-collect-a0", "RUNNING", start_time=2000, metadata=other)
    server.put("troupe-other-small-it1-collect-a0", "RUNNING", metadata={"troupe_run": "other-small"})
    server.put("somebody-elses", "RUNNING", start_time=2000)
    _, out, _ = end(start(server, tmp_path, "jobs"))
    assert "troupe-small-it1-collect-a0" in out
    assert "FAILED (3)" in out
    assert "somebody-elses" not in out
    assert "small" not in end(start(server, tmp_path, "jobs", "--run", "other"))[1]
    assert end(start(server, tmp_path, "stop", "troupe-other-it1-collect-a0"))[0] == 0
    code, _, err = end(start(server, tmp_path, "stop", "troupe-small-it1-colect-a0"))
    assert code == 2
    assert "has no job 'troupe-small-it1-colect-a0'; running are: " in err


def test_a_list_of_jobs_that_a_program_reads_has_a_line_of_each_with_all_of_it(
    server: JobServer, tmp_path: Path
) -> None:
    job = f"troupe-{'a-long-name-' * 8}it12-train-solver-a0"
    server.put(job, "RUNNING", start_time=2000)
    _, out, _ = end(start(server, tmp_path, "jobs"))
    (line,) = (line for line in out.splitlines() if job in line)
    assert "RUNNING" in line and "1970" in line


def test_a_stage_has_the_time_of_the_schedule_for_each_iteration_that_it_may_wait_for_and_for_its_canary() -> None:
    lagging = load_config(SMALL, {"schedule.cron": "@daily", "loop.max_lag": 1})
    assert (_limit_s(lagging, "train"), _limit_s(lagging, "")) == (2 * 7200, float("inf"))
    assert _limit_s(load_config(SMALL), "train") == float("inf")
    canary = load_config(SMALL, {"schedule.cron": "@daily", "promote.deploy": "canary"})
    assert _limit_s(canary, "promote") == 7200 + canary.canary_timeout_s > _limit_s(canary, "train") == 7200


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        (("--stage", "score"), 2, "--stage score needs --iteration"),
        (("--stage", "scroe", "--iteration", "1"), 2, "unknown stage 'scroe': one of collect, score,"),
        (("--stage", "train", "--iteration", "1"), 2, "stage train needs --model-group, one of team"),
        (("--iteration", "2"), 2, "--iteration and --model-group need --stage"),
        (("--cluster", "ray://h:10001"), 2, "is a Ray client address: jobs go to the dashboard"),
        (("--cluster", "http://127.0.0.1:1"), 75, "no Ray cluster answers at http://127.0.0.1:1"),
    ],
)
def test_what_cannot_be_submitted_is_said_in_one_line(
    server: JobServer, tmp_path: Path, arguments: tuple[str, ...], exit_code: int, said: str
) -> None:
    code, _, err = end(start(server, tmp_path, "submit", str(SMALL), *arguments))
    assert code == exit_code
    assert said in err
    assert "Traceback" not in err
    assert server.requests == {}


@pytest.mark.fast
def test_a_result_is_plain_json_but_for_a_job_whose_follower_looks_for_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_back({"n": 1}, "train/a")
    monkeypatch.setenv(RUN_CONFIG_VARIABLE, "{}")
    hand_back({"n": 1}, "train/a")
    assert capsys.readouterr().out == '{"n": 1}\ntroupe-ref train/a: {"n": 1}\n'

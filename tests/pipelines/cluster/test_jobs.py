"""A troupe command as a Ray job: which attempt, what it carries, how it ends, and what a person is told about faults."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
import zipfile
from base64 import b64encode
from collections.abc import Iterator
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from job_server import JobServer, job_server

from pipelines.cluster.job_api import ClusterUnreachable, JobApi, address_of
from pipelines.cluster.jobs import RUN_CONFIG_VARIABLE, Follower, attach, begin_work, loop_work, package, stage_work
from pipelines.config.run_config import RunConfig, load_config
from pipelines.config.schedule import ClusterConfig

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
WORK = stage_work("small", "train", 3, "team")
NAME = "troupe-small-it3-train-team"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[JobServer]:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "no-token"))
    with job_server() as found:
        yield found


@pytest.fixture
def api(server: JobServer) -> JobApi:
    return JobApi(server.url)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(SMALL)


def follow_to_end(api: JobApi, job: str, deadline: float = float("inf")) -> tuple[str, object]:
    new, outcome = Follower(api, job, deadline=deadline).poll()
    return new, outcome


def test_the_attempt_advances_only_after_failed_or_stopped(server: JobServer, api: JobApi, config: RunConfig) -> None:
    found = []
    for status in ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "RUNNING", "STOPPED"):
        found.append(attach(api, config, WORK, folder="/work", links={}))
        server.put(found[-1].submission_id, status, "troupe-ref: {}\n")
    found.append(attach(api, config, WORK, folder="/work", links={}))
    assert [job for job, _ in found] == [f"{NAME}-a{n}" for n in (0, 0, 0, 0, 1, 1, 2)]
    assert [is_new for _, is_new in found] == [True, False, False, False, True, False, True]
    assert sorted(server.requests) == [f"{NAME}-a0", f"{NAME}-a1", f"{NAME}-a2"]


def test_what_was_done_for_a_removed_run_of_the_same_name_does_not_count(
    server: JobServer, api: JobApi, config: RunConfig
) -> None:
    server.put(f"{NAME}-a0", "SUCCEEDED", "troupe-ref: {}\n", end_time=100_000)
    server.put(f"{NAME}-a1", "RUNNING")
    assert attach(api, config, WORK, folder="", links={}, since=99.0).submission_id == f"{NAME}-a0"
    assert attach(api, config, WORK, folder="", links={}, since=101.0).submission_id == f"{NAME}-a1"


def test_a_job_whose_log_is_gone_or_that_nobody_can_trust_is_done_again(
    server: JobServer, api: JobApi, config: RunConfig
) -> None:
    server.put(f"{NAME}-a0", "SUCCEEDED", "")
    assert attach(api, config, WORK, folder="", links={}) == (f"{NAME}-a1", True)
    server.put(f"{NAME}-a1", "SUCCEEDED", "troupe-ref: {}\n")
    assert attach(api, config, WORK, folder="", links={}) == (f"{NAME}-a1", False)
    assert attach(api, config, WORK, folder="", links={}, takes_done=False) == (f"{NAME}-a2", True)


def test_a_job_that_runs_with_another_config_is_not_taken_for_this_one(
    server: JobServer, api: JobApi, config: RunConfig
) -> None:
    job, _ = attach(api, config, WORK, folder="", links={})
    server.put(job, "RUNNING", metadata=server.requests[job]["metadata"])
    longer = config.model_copy(update={"iterations": 9})
    assert attach(api, longer, WORK, folder="", links={}) == (job, False)
    with pytest.raises(ValueError, match=f"{job} runs with another config of run 'small': .*troupe stop"):
        attach(api, load_config(SMALL, {"seed": 99}), WORK, folder="", links={})


def test_who_loses_the_race_to_submit_attaches(server: JobServer, api: JobApi, config: RunConfig) -> None:
    server.loses_race_to = {"status": "RUNNING"}
    assert attach(api, config, WORK, folder="/work", links={}) == (f"{NAME}-a0", False)
    assert server.requests == {}


def test_a_job_carries_its_config_by_value_and_starts_in_the_folder(
    server: JobServer, api: JobApi, config: RunConfig
) -> None:
    placed = config.model_copy(update={"cluster": ClusterConfig(resources={"CPU": 1, "memory": 2**29, "big": 1})})
    job, _ = attach(api, placed, WORK, folder="/my work", links={"TROUPE_DAG_RUN_URL": "http://here"})
    request = server.requests[job]
    assert request["metadata"]["dag_run"] == "http://here"
    line = "troupe stage train --run small --iteration 3 --model-group team"
    assert request["entrypoint"] == f"cd '/my work' || exit 2; {line}"
    variables = request["runtime_env"]["env_vars"]
    assert variables["PYTHONPATH"] == "/my work"
    assert variables["TROUPE_DAG_RUN_URL"] == "http://here"
    assert json.loads(variables[RUN_CONFIG_VARIABLE])["run"] == "small"
    assert request["entrypoint_num_cpus"] == 1
    assert request["entrypoint_memory"] == 512 * 1024**2
    assert request["entrypoint_resources"] == {"big": 1}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"OMP_NUM_THREADS": 4, "DEBUG": True, "NAME": "a"}, {"OMP_NUM_THREADS": "4", "DEBUG": "true", "NAME": "a"}),
        (None, {}),
    ],
)
def test_the_variables_of_a_job_are_texts_as_ray_wants_them(
    server: JobServer, api: JobApi, config: RunConfig, given: Any, sent: dict[str, str]
) -> None:
    placed = config.model_copy(update={"cluster": ClusterConfig(runtime_env={"env_vars": given})})
    job, _ = attach(api, placed, WORK, folder="", links={})
    variables = server.requests[job]["runtime_env"]["env_vars"]
    assert {name: variables[name] for name in variables if name != RUN_CONFIG_VARIABLE} == sent


def test_a_working_directory_is_uploaded_once_and_by_content(
    server: JobServer, api: JobApi, config: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "team.py").write_text("x = 1\n")
    placed = config.model_copy(update={"cluster": ClusterConfig(working_dir=str(tmp_path))})
    for iteration in (1, 2):
        attach(api, placed, stage_work("small", "score", iteration), folder="/ignored", links={})
    (name,) = server.packages
    assert zipfile.ZipFile(BytesIO(server.packages[name])).namelist() == ["team.py"]
    for request in server.requests.values():
        assert request["runtime_env"]["working_dir"] == f"gcs://{name}"
        assert request["entrypoint"].startswith("troupe stage score")
    (tmp_path / "team.py").write_text("x = 2\n")
    assert package(tmp_path)[0] != name
    with pytest.raises(ValueError, match="is no folder"):
        package(tmp_path / "nowhere")


def test_a_working_directory_without_git_is_sent_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "team.py").write_text("x = 1\n")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert zipfile.ZipFile(BytesIO(package(tmp_path)[1])).namelist() == ["team.py"]


def git(*arguments: object) -> None:
    subprocess.run(["git", *map(str, arguments)], check=True, capture_output=True)


def test_a_checkout_of_which_git_does_not_answer_is_not_sent_with_what_it_ignores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another user's checkout, which is mounted into a container: "detected dubious ownership"."""
    git("init", tmp_path)
    (tmp_path / ".gitignore").write_text(".env\n")
    (tmp_path / ".env").write_text("KEY=secret")
    (tmp_path / "my code").mkdir()
    (tmp_path / "my code" / "team.py").write_text("x = 1\n")
    assert zipfile.ZipFile(BytesIO(package(tmp_path)[1])).namelist() == [".gitignore", "my code/team.py"]
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    for folder in (tmp_path, tmp_path / "my code"):
        with pytest.raises(ValueError, match=r"git does not say which files are to be sent: .*safe\.directory"):
            package(folder)


def test_a_checkout_within_a_checkout_is_sent_too(tmp_path: Path) -> None:
    library, other = tmp_path / "library", tmp_path / "other"
    for folder in (tmp_path, library, other):
        git("init", folder)
        (folder / ".gitignore").write_text(".env\n")
        (folder / ".env").write_text("KEY=secret")
        (folder / f"{folder.name}.py").write_text("x = 1\n")
    git("-C", library, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", "first")
    git("-C", tmp_path, "add", "library")  # as a submodule is kept; the other one is not known to git yet
    (tmp_path / "empty").mkdir()
    own = [".gitignore", "library/.gitignore", "library/library.py", "other/.gitignore", "other/other.py"]
    assert zipfile.ZipFile(BytesIO(package(tmp_path)[1])).namelist() == sorted([*own, f"{tmp_path.name}.py"])


def test_other_work_has_another_name(config: RunConfig) -> None:
    longer = config.model_copy(update={"iterations": 5})
    names = [
        WORK.name,
        stage_work("small", "train", 3, "other").name,
        stage_work("small", "train", 4, "team").name,
        stage_work("small", "train", 3, "a/b").name,
        stage_work("small", "train", 3, "a-b").name,
        begin_work("small", "one").name,
        begin_work("small", "two").name,
        loop_work(config).name,
        loop_work(longer).name,
    ]
    assert len(set(names)) == len(names)


def test_an_id_is_one_part_of_a_path(server: JobServer, api: JobApi) -> None:
    server.put("j", "RUNNING", "one\n")
    assert api.job("j") is not None and api.job("j/logs") is None and api.job("j?x") is None
    assert not api.stop("j/stop") and server.jobs.keys() == {"j"}


def test_a_follower_shows_whole_new_lines_and_hands_over_the_last_ref(server: JobServer, api: JobApi) -> None:
    server.put("j", "RUNNING", "one\ntw")
    follower = Follower(api, "j", deadline=float("inf"))
    assert follower.poll() == ("one\n", None)
    server.put("j", "RUNNING", 'one\ntwo\ntroupe-ref: {"old": 1}\n')
    assert follower.poll() == ('two\ntroupe-ref: {"old": 1}\n', None)
    server.put("j", "SUCCEEDED", 'one\ntwo\ntroupe-ref: {"old": 1}\ntroupe-ref: {"new": 2}', driver_exit_code=0)
    new, outcome = follower.poll()
    assert new == 'troupe-ref: {"new": 2}'
    assert outcome is not None
    assert (outcome.status, outcome.ref, outcome.error) == ("SUCCEEDED", {"new": 2}, "")


def test_a_result_is_found_behind_what_a_users_code_began_the_line_with(server: JobServer, api: JobApi) -> None:
    log = 'troupe-ref begin: {"iteration": 3}\n...troupe-ref collect: {"n": 1}\n 50%|##troupe-ref score: {"n": 2}\n'
    server.put("j", "RUNNING", log)
    followed = [
        Follower(api, "j", deadline=float("inf"), part=part).poll()[1] for part in ("begin", "collect", "score")
    ]
    assert [outcome and outcome.ref for outcome in followed] == [{"iteration": 3}, {"n": 1}, {"n": 2}]
    assert Follower(api, "j", deadline=float("inf"), part="score").poll()[0] == ' 50%|##troupe-ref score: {"n": 2}\n'


@pytest.mark.parametrize(
    ("status", "printed", "ref"),
    [
        ("SUCCEEDED", 'troupe-ref: {"n": 1}2026-01-01 WARNING: of another process\n', {"n": 1}),
        ("SUCCEEDED", 'troupe-ref: {"n": 1, "links": {"da', None),
        ("FAILED", 'troupe-ref: {"n": 1, "links": {"da', None),
        ("FAILED", "ValueError: the line troupe-ref: is missing\n", None),
    ],
)
def test_a_result_that_others_wrote_after_or_that_was_cut_ends_the_job_as_it_ended(
    server: JobServer, api: JobApi, config: RunConfig, status: str, printed: str, ref: dict[str, Any] | None
) -> None:
    server.put(f"{NAME}-a0", status, printed, driver_exit_code=0 if status == "SUCCEEDED" else -9)
    outcome = follow_to_end(api, f"{NAME}-a0")[1]
    assert (outcome.status, outcome.ref, outcome.may_repeat) == (status, ref, True)
    assert attach(api, config, WORK, folder="", links={}).is_new is (ref is None), "else it would be read for ever"


def test_a_part_is_done_once_its_whole_result_is_there(server: JobServer, api: JobApi) -> None:
    server.put("j", "RUNNING", 'troupe-ref collect: {"n": WARNING: of another process\n1}\n')
    assert Follower(api, "j", deadline=float("inf"), part="collect").poll()[1] is None


@pytest.mark.parametrize(
    ("code", "may_repeat"), [(1, True), (75, True), (-9, True), (137, True), (2, False), (3, False), (127, False)]
)
def test_a_failed_job_says_its_last_lines_and_whether_to_repeat_it(
    server: JobServer, api: JobApi, code: int, may_repeat: bool
) -> None:
    log = "Running entrypoint for job j: troupe\nconnect\ntroupe: tasks.train holds no task\nadd some\n"
    server.put("j", "FAILED", log, driver_exit_code=code, message=f"failed with exit code {code}")
    _, outcome = follow_to_end(api, "j")
    assert outcome.error.startswith("troupe: tasks.train holds no task\nadd some")
    assert outcome.may_repeat is may_repeat
    assert ("no `troupe` on the cluster" in outcome.error) is (code == 127)
    assert ("ended by kill -9" in outcome.error) is (code in (-9, 137))


RAYS_LINES = (
    "2026-01-01 00:00:00 INFO job_manager.py:581 -- Runtime env is setting up.\nRunning entrypoint for job j: t\n"
)


@pytest.mark.parametrize(
    ("status", "log", "about", "error", "may_repeat"),
    [
        ("FAILED", f"{RAYS_LINES}Killed\n", {"driver_exit_code": 137}, "Killed\nended by kill -9", True),
        ("FAILED", "", {"message": "Failed to set up runtime environment."}, "Failed to set up runtime env", True),
        ("STOPPED", "half\n", {}, "stopped by hand", False),
        ("LOST", "", {}, "http://127.0.0.1", True),
    ],
)
def test_a_job_that_ended_says_why_and_whether_to_repeat_it(
    server: JobServer, api: JobApi, status: str, log: str, about: dict[str, Any], error: str, may_repeat: bool
) -> None:
    if status != "LOST":  # gone with its cluster
        server.put("j", status, log, **about)
    outcome = follow_to_end(api, "j")[1]
    assert (outcome.status, outcome.may_repeat) == (status, may_repeat) and outcome.error.startswith(error)


def test_a_job_past_its_deadline_is_stopped(server: JobServer, api: JobApi) -> None:
    server.put("j", "RUNNING", "waits for replica 3\n")
    outcome = follow_to_end(api, "j", deadline=time.time() - 1)[1]
    assert (outcome.status, server.stopped) == ("TIMEOUT", ["j"])
    assert "waits for replica 3" in outcome.error


def test_a_job_past_its_deadline_is_stopped_once_the_cluster_can_be_reached_again(
    server: JobServer, api: JobApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put("j", "RUNNING", "waits for replica 3\n")
    follower = Follower(api, "j", deadline=time.time() - 1)
    with monkeypatch.context() as broken:
        broken.setattr(api, "stop", lambda _: JobApi("http://127.0.0.1:1").stop("j"))  # it goes between two calls
        assert follower.poll() == ("", None)
    new, outcome = follower.poll()
    assert new == "waits for replica 3\n" and outcome is not None
    assert (outcome.status, server.stopped) == ("TIMEOUT", ["j"])


def test_the_password_of_a_proxy_before_the_dashboard_is_used_and_not_shown(
    server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = server.url.replace("http://", "http://me:hunter2@")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address)
    api = JobApi(address_of(ClusterConfig()))
    assert api.jobs() == [] and server.authorization == f"Basic {b64encode(b'me:hunter2').decode()}"
    server.token = "right"
    said = [repr(api), api.shown]
    for wrong in (api, JobApi("http://me:hunter2@127.0.0.1:1")):
        with pytest.raises((ValueError, ClusterUnreachable)) as refusal:
            wrong.jobs()
        said.append(str(refusal.value))
    assert all("http://me:...@127.0.0.1:" in text and "hunter2" not in text for text in said), said


@pytest.mark.parametrize(("mode", "is_sent"), [("TOKEN", True), ("Disabled", False)])
def test_the_mode_is_read_in_any_case_as_ray_does(
    server: JobServer, api: JobApi, monkeypatch: pytest.MonkeyPatch, mode: str, is_sent: bool
) -> None:
    server.token = "right"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "right")
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr("pipelines.cluster.job_api.is_loopback", lambda address: mode == "Disabled")
    with nullcontext() if is_sent else pytest.raises(ValueError, match="wants a token"):
        assert api.jobs() == []


def test_a_cluster_that_is_down_is_borne_for_a_while(
    api: JobApi, server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = Follower(JobApi("http://127.0.0.1:1"), "j", deadline=float("inf"))
    assert follower.poll() == ("", None)
    monkeypatch.setattr("pipelines.cluster.jobs.UNREACHABLE_S", 0.0)
    outcome = follower.poll()[1]
    assert outcome is not None
    assert (outcome.status, outcome.may_repeat) == ("UNREACHABLE", True)
    assert "no Ray cluster answers at http://127.0.0.1:1" in outcome.error


def test_a_missing_token_and_a_wrong_one_are_told_apart(
    server: JobServer, api: JobApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.token = "right"
    with pytest.raises(ValueError, match=r"wants a token.*set RAY_AUTH_MODE=token.*no-token"):
        api.jobs()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "old")
    with pytest.raises(ValueError, match=r"refuses the token of RAY_AUTH_TOKEN.*expired"):
        api.jobs()
    outcome = follow_to_end(api, "j")[1]
    assert (outcome.status, outcome.may_repeat) == ("REFUSED", False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "right")
    assert api.jobs() == []


def test_a_port_that_does_not_speak_http_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.recv(4096)
            connection.sendall(b"\x00\x00\x12\x04")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ValueError, match="answers, but not in HTTP"):
            JobApi(f"http://127.0.0.1:{listener.getsockname()[1]}").jobs()


def test_a_server_that_is_no_dashboard_is_named(server: JobServer) -> None:
    with pytest.raises(ValueError, match="no Ray dashboard"):
        JobApi(f"{server.url}/api/jobs/x/api").jobs()


def test_silence_has_a_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        api = JobApi(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.2)
        with pytest.raises(ClusterUnreachable, match="timed out"):
            api.jobs()

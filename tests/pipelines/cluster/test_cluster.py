"""An address at which no cluster answers is told soon and without noise."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.cluster import connect as cluster
from pipelines.cluster.faults import InfrastructureLost

pytestmark = pytest.mark.fast


def test_a_cluster_that_does_not_answer_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ANSWER_TIMEOUT_S", 0.1)
    with pytest.raises(InfrastructureLost, match=r"'127.0.0.1:1' .*refused.*make up"):
        cluster.check_answers("127.0.0.1:1")


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (socket.EAI_NONAME, ValueError, r"no machine is called 'head\.svc'"),
        (socket.EAI_AGAIN, InfrastructureLost, r"no Ray cluster answers at 'head\.svc:6379'"),
    ],
)
def test_a_machine_that_no_one_knows_is_bad_input_and_one_whose_name_server_is_silent_is_not(
    code: int, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(code, "said by the resolver")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(cluster, "ANSWER_TIMEOUT_S", -1.0)
    with pytest.raises(error, match=said):
        cluster.check_answers("head.svc:6379")


def test_a_port_above_the_highest_asks_no_other_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        cluster.check_answers(f"127.0.0.1:{port}")
        for number in (port + 65536, 10**20):  # the first one's last 16 bits are those of the port that answers
            with pytest.raises(ValueError, match=f"'127.0.0.1:{number}': the highest port is 65535"):
                cluster.check_answers(f"127.0.0.1:{number}")


@pytest.mark.parametrize("name", ["RAY_TMPDIR", "TMPDIR"])
def test_a_temporary_folder_that_is_too_long_for_sockets_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray._private.utils import validate_socket_filepath

    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    pid = os.getpid()
    longest = 107 - len(f"/ray/session_2026-11-25_19-51-37_123456_{pid}/sockets/plasma_store")
    monkeypatch.setenv(name, "/" + "x" * (longest - 1))
    cluster.check_temporary_folder()
    validate_socket_filepath(os.environ[name] + cluster.LONGEST_SOCKET.format(pid=pid))
    monkeypatch.setenv(name, "/" + "x" * longest)
    with pytest.raises(OSError, match="AF_UNIX"):
        validate_socket_filepath(os.environ[name] + cluster.LONGEST_SOCKET.format(pid=pid))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(
        ValueError, match=rf"^{name} = '/x+' has {longest + 1} bytes.*{longest} are left.*RAY_TMPDIR=/tmp$"
    ):
        cluster.connect()


@pytest.mark.parametrize("address", ["auto", "local", "ray://127.0.0.1:1"])
def test_other_kinds_of_address_are_left_to_ray(address: str) -> None:
    cluster.check_answers(address)


def connected(home: Path, environment: dict[str, str], shown: str) -> str:
    """What a fresh process prints that imports Ray, then connects: `shown` is evaluated where Ray would connect."""
    script = (
        "import os, ray, ray._raylet as raylet\n"
        "import pipelines.cluster.connect as cluster\n"
        f"ray.init = lambda **_: print({shown})\n"
        "cluster.check_answers = lambda address: None\n"
        "cluster.connect('127.0.0.1:6399')\n"
    )
    given = ("RAY_AUTH", "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=inherited | {"HOME": str(home)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("environment", "is_sent"), [({}, "True"), ({"RAY_AUTH_MODE": "disabled"}, "False")])
def test_the_token_is_sent_also_where_ray_was_imported_before(
    environment: dict[str, str], is_sent: str, tmp_path: Path
) -> None:
    """Ray reads RAY_AUTH_MODE as it is imported, and most of `pipelines` imports Ray."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("f" * 64)
    mode = "raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN"
    assert connected(tmp_path, environment, mode) == is_sent


def test_a_cluster_on_this_machine_is_reached_past_a_proxy(tmp_path: Path) -> None:
    hosts = connected(tmp_path, {"HTTP_PROXY": "http://10.0.0.1:3128"}, "os.environ.get('NO_PROXY')")
    assert hosts.split(",") == ["127.0.0.1", "localhost", "::1"]


def test_a_cluster_of_another_ray_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def refuse(**_: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.9.0\n    Python: 3.10.1\n")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(
        ValueError, match=r"'auto' runs another version .*Ray: 2\.9\.0 Python: 3\.10\.1.*use the environment"
    ):
        cluster.connect("auto")


def test_the_dashboard_of_a_cluster_is_asked_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.util import state

    from serve_apps.policy import app_list

    direct: list[str] = []

    def list_workers(**_: object) -> list[object]:
        direct.extend(os.environ["NO_PROXY"].split(","))
        return []

    monkeypatch.setenv("HTTP_PROXY", "http://10.0.0.1:3128")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(app_list, "dashboard_url", lambda: "http://10.0.0.7:8265")
    monkeypatch.setattr(state, "list_workers", list_workers)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01"))
    assert cluster.memory_deaths("run", 60.0) == []
    assert "10.0.0.7" in direct


@pytest.mark.parametrize(
    ("victim", "is_own"),
    [
        ("SERVE_REPLICA::demo-rollout-team#Policy#x:ServeReplica:demo-rollout-team:Policy.f", True),
        ("ServeReplica:demo-green-team:Policy.f", True),
        ("ServeReplica:demo-2-rollout-team:Policy.f", False),
        ("ServeReplica:my-demo-rollout-team:Policy.f", False),
        ("trainer:trainer-demo/team:0a1b:TrainerSupervisor.__init__", True),
        ("trainer:trainer-trainer-demo/team:0a1b:TrainerSupervisor.__init__", False),
    ],
)
def test_a_death_of_another_run_with_a_name_like_this_ones_is_not_this_ones(
    victim: str, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.util import state

    from serve_apps.policy import app_list

    detail = f"Selected to kill: (Actor: job ID=01000000, lease ID=0100, task name={victim}, pid=1)\n"
    row = SimpleNamespace(end_time_ms=float("inf"), exit_detail=detail)
    monkeypatch.setattr(app_list, "dashboard_url", lambda: "http://127.0.0.1:1")
    monkeypatch.setattr(state, "list_workers", lambda **_: [row])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "05000000"))
    assert (cluster.memory_deaths("demo", 60.0) == [detail]) is is_own


@pytest.mark.parametrize(
    ("victim", "is_trainer"),
    [
        ("RayTrainWorker.__init__", True),
        ("trainer:trainer-demo/team:0a1b:TrainerSupervisor.__init__", True),
        ("SERVE_REPLICA::my-trainer-a-rollout-team#Policy#x:ServeReplica:my-trainer-a-rollout-team:Policy.f", False),
    ],
)
def test_where_stages_overlap_a_death_counts_for_the_stage_of_its_process(victim: str, is_trainer: bool) -> None:
    assert cluster._is_of_stage(victim, "train") is is_trainer
    assert cluster._is_of_stage(victim, "collect") is not is_trainer
    assert cluster._is_of_stage(victim, "")


def test_a_head_that_does_not_start_is_one_sentence_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def init(**settings: object) -> None:
        raise Exception("\nline of a log\n" * 20 + "Failed to start a dashboard.")  # as Ray does

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # tests beside this one may share a head
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cluster, "keep_token_private", lambda: None)
    with pytest.raises(
        InfrastructureLost, match=r"^[^\n]*Failed to start a dashboard\.\): mostly .* then repeat\. Ray's logs: \S+$"
    ):
        cluster.connect()
    monkeypatch.setattr(cluster.resource, "getrlimit", lambda which: (8 << 30, 8 << 30))
    with pytest.raises(
        InfrastructureLost, match=r"may have 8\.0 GiB of addresses .*: ulimit -v unlimited, then repeat"
    ):
        cluster.connect()

"""connect: connects this process to the Ray cluster that stages run on: a named one, or a local head that ends with it."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import tempfile
import threading
import time
from typing import Any

from pipelines.cluster.auth import auth_token, keep_token_private
from pipelines.cluster.faults import InfrastructureLost
from stores.inside_ray import AUTHENTICATION_LOGGER, forget_serve_client, use_token
from stores.urls import ask_directly, is_loopback

ANSWER_TIMEOUT_S = 10.0
MAX_PORT = 65535
MAX_SOCKET_PATH = 107
"""Bytes that a socket's path may have on Linux (unix(7), sun_path)."""
LONGEST_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
"""What Ray appends to the temporary folder."""

APP_KINDS = ("rollout", "blue", "green")
"""What stands between run and weights in the name of a policy app, see `run.serving`: by the run alone, r would be r-2, too."""


def connect(address: str = "") -> None:
    """Connects to `address` (or RAY_ADDRESS); without either, starts a local head. Once connected, does nothing.

    Raises ValueError for an address that cannot be one, for a cluster of another Ray or Python and for a temporary folder
    that Ray cannot use, InfrastructureLost where no cluster answers.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "worker processes have been started")
    ask_directly()  # here and, of a local head, in all its processes
    address = address or os.environ.get("RAY_ADDRESS", "")
    import ray

    if ray.is_initialized():
        return
    if is_loopback(address) and auth_token():
        use_token()
    forget_serve_client()
    logging.getLogger(AUTHENTICATION_LOGGER).setLevel(logging.ERROR)
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    if not address:
        check_temporary_folder()
        keep_token_private()
        os.environ.setdefault("RAY_worker_niceness", "0")  # as `make up` does; Ray's default is 15
        try:
            ray.init(address="local", include_dashboard=True, **quiet)
        except (ValueError, OSError):
            raise
        except Exception as error:  # Ray has no class for it, and for a message the end of a log
            raise InfrastructureLost(
                f"Ray did not start on this machine (it says: ...{_in_a_line(error)[-200:]}): {_why_not_started()}, then repeat. Ray's logs: {os.environ.get('RAY_TMPDIR') or tempfile.gettempdir()}/ray/session_latest/logs"
            ) from error
        _interrupt_on_sigterm()
        return
    check_answers(address)
    try:
        ray.init(address=address, **quiet)
        _interrupt_on_sigterm()
    except ConnectionError as error:
        raise InfrastructureLost(_no_answer(address, error)) from None
    except RuntimeError as error:
        if "version mismatch" not in str(error).lower():
            raise
        raise ValueError(
            f"the cluster at {address!r} runs another version of Ray or Python than this environment ({_in_a_line(error)}): "
            "use the environment that its nodes were started from, or start them from this one"
        ) from None


def _why_not_started() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return "mostly other programs keep it busy, or its memory is full: end some"
    return (
        f"a process of this shell may have {limit / 2**30:.1f} GiB of addresses (ulimit -v), and Ray, torch and vLLM reserve tens of GiB, "
        "which they do not fill: ulimit -v unlimited"
    )


def _interrupt_on_sigterm() -> None:
    """Makes SIGTERM an interrupt: what Ray's own handler raises, SystemExit, ends the process in its C++ with SIGABRT."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def connect_for_good(address: str = "") -> None:
    """Connects for work that goes on after this command; ValueError where the cluster would end with the command."""
    if not (address or os.environ.get("RAY_ADDRESS", "")):
        raise ValueError(
            "a team can be served only on a Ray cluster that outlives this command: start one with `make up` and give its "
            "address with --address or RAY_ADDRESS"
        )
    connect(address)


def check_temporary_folder() -> None:
    """Raises ValueError where the path of the folder for temporary files is too long for the sockets of a local head."""
    name = "RAY_TMPDIR" if "RAY_TMPDIR" in os.environ else "TMPDIR"
    folder = os.environ.get(name) or tempfile.gettempdir()
    room = MAX_SOCKET_PATH - len(LONGEST_SOCKET.format(pid=os.getpid()))
    if len(os.fsencode(folder)) > room:
        raise ValueError(
            f"{name} = {folder!r} has {len(os.fsencode(folder))} bytes: Ray puts its sockets below it, whose paths the system limits to "
            f"{MAX_SOCKET_PATH}, so that {room} are left for the folder: set RAY_TMPDIR to a shorter one, e.g. RAY_TMPDIR=/tmp"
        )


def check_answers(address: str) -> None:
    """Raises as `connect` does where host:port takes no connection: Ray would try for minutes, and fill the screen."""
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdecimal():
        return
    if int(port) > MAX_PORT:  # the system would take it modulo 65536, and ask a port that nobody named
        raise ValueError(f"address {address!r}: the highest port is {MAX_PORT}")
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_TIMEOUT_S).close()
            return
        except OSError as error:
            # A name server that does not answer now says nothing of the name.
            if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
                raise ValueError(f"address {address!r}: no machine is called {host!r} ({error.strerror})") from None
            if time.monotonic() > deadline:
                raise InfrastructureLost(_no_answer(address, error)) from None
        time.sleep(1.0)


def _no_answer(address: str, error: Exception) -> str:
    return (
        f"no Ray cluster answers at {address!r} ({error}): start one (make up), give the address of one "
        "(--address or RAY_ADDRESS, host:port of its head), or neither for a local head"
    )


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())


def is_answering() -> bool:
    """False if the head of the cluster that this process is connected to takes no connection now."""
    import ray

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def memory_deaths(run_id: str, within_s: float, *, stage: str = "") -> list[str]:
    """Ray's message on each process of a run that it ended for lack of memory in the last `within_s` seconds, latest last.

    The run's processes are those of this job and those named for it; a trainer's workers have no name, so all count.

    Args: stage: where stages overlap, the one that asks: trainers' deaths are those of stage train. Empty: all are.
    """
    import ray
    from ray.util.state import list_workers
    from ray.util.state.exception import RayStateApiException

    from serve_apps.policy.app_list import dashboard_url

    try:
        dashboard = dashboard_url()
        ask_directly(dashboard)
        rows: list[Any] = list_workers(
            filters=[("exit_type", "=", "NODE_OUT_OF_MEMORY")],
            detail=True,
            limit=1000,
            timeout=5,
            raise_on_missing_output=False,
            address=dashboard,  # else Ray asks the cluster that was started last on this machine
        )
    except (RayStateApiException, OSError, ValueError):  # no dashboard, or it is down: no answer is no reason to fail
        return []
    since = (time.time() - within_s) * 1000
    recent = sorted((row.end_time_ms, row.exit_detail) for row in rows if row.end_time_ms >= since)
    apps = (f":{run_id}-{kind}-" for kind in APP_KINDS)
    own = (f"job ID={ray.get_runtime_context().get_job_id()}", *apps, f":trainer-{run_id}/", "RayTrainWorker")
    victims = ((detail, detail.partition("Selected to kill:")[2].partition("\n")[0]) for _, detail in recent)
    return [d for d, victim in victims if any(mark in victim for mark in own) and _is_of_stage(victim, stage)]


def _is_of_stage(victim: str, stage: str) -> bool:
    is_trainer = any(mark in victim for mark in ("RayTrainWorker", "trainer:trainer-"))
    return not stage or is_trainer == (stage == "train")


def disconnect() -> None:
    """Leaves the cluster; ends it if `connect` started it."""
    import ray

    ray.shutdown()

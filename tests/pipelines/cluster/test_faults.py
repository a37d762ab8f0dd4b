"""Every kind of failure, with the real exception classes: its exit code, and a message that names what to do."""

from __future__ import annotations

import errno

import pytest
from mlflow.exceptions import MlflowException
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    AuthenticationError,
    GetTimeoutError,
    NodeDiedError,
    OutOfMemoryError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.serve.exceptions import RayServeException
from sqlalchemy.exc import OperationalError

from pipelines.cluster.faults import FaultKind, InfrastructureLost, OutOfMemory, diagnose
from stores.journal.journal import LeaseLost
from stores.store_faults import UnreadableStore
from train_loops.worker.trainer_handle import TrainJobError

pytestmark = pytest.mark.fast

MEMORY = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.7, ID: 3de3) \
was 22.60GB used / 23.54GB limit (0.960068)
OOM kill reason: Memory usage 2276093952B exceeded threshold of 505530272B (2.0% of 25276514304B limit)
Ray killed 1 worker(s) based on the killing policy
Considered workers: [
Selected to kill: ({kind}: job ID=01000000, lease ID=0100, task name={name}, required resources={{CPU: 0.1}}, \
pid=22540, actual memory used=9.04GB, worker ID=115d)
]
Total non-selected idle workers: 0
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
22016\t12.12\tray::RayTrainWorker
22540\t9.04\t{name}
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/
"""


def raised_in_a_task(cause: Exception) -> RayTaskError:
    return RayTaskError("run", "Traceback (most recent call last):\n  ...\nOSError: x", cause).as_instanceof_cause()


def caused_by(cause: Exception) -> RuntimeError:
    error = RuntimeError("collect failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (KeyboardInterrupt(), FaultKind.INTERRUPTED, 130),
        (ValueError("run.yaml: unknown key"), FaultKind.BAD_INPUT, 2),
        (raised_in_a_task(ValueError("bad row")), FaultKind.BAD_INPUT, 2),
        (TrainJobError("ValueError", "version 3 exists already"), FaultKind.BAD_INPUT, 2),
        (AuthenticationError("token"), FaultKind.BAD_INPUT, 2),
        (RuntimeError("app 'x' did not start"), FaultKind.FAILED, 1),
        (TimeoutError("no end"), FaultKind.FAILED, 1),
        (GetTimeoutError("no end"), FaultKind.FAILED, 1),
        (TrainJobError("MismatchError", "0.3 nats"), FaultKind.FAILED, 1),
        (ActorDiedError(RayTaskError("__init__", "KeyError: 'x'", KeyError("x"))), FaultKind.FAILED, 1),
        (ActorDiedError(), FaultKind.LOST, 75),
        (ActorUnavailableError("socket closed", b"\0" * 16), FaultKind.LOST, 75),
        (raised_in_a_task(ActorDiedError()), FaultKind.LOST, 75),
        (NodeDiedError("node 3 is gone"), FaultKind.LOST, 75),
        (WorkerCrashedError(), FaultKind.LOST, 75),
        (caused_by(ActorDiedError()), FaultKind.LOST, 75),
        (ConnectionRefusedError("[Errno 111] Connection refused"), FaultKind.LOST, 75),
        (ConnectionError("Failed to connect to Ray at address: http://127.0.0.1:1"), FaultKind.LOST, 75),
        (TrainJobError("WorkerHealthCheckFailedError", "worker 0 died"), FaultKind.LOST, 75),
        (LeaseLost("lease 1 was taken over"), FaultKind.LOST, 75),
        (InfrastructureLost("the engines died"), FaultKind.LOST, 75),
        (OperationalError("SELECT", {}, Exception("connection refused")), FaultKind.LOST, 75),
        (OperationalError("SELECT", {}, Exception("database is locked")), FaultKind.LOST, 75),
        (OperationalError("", {}, Exception("password authentication failed")), FaultKind.BAD_INPUT, 2),
        (OperationalError("", {}, Exception("no such table: runs")), FaultKind.FAILED, 1),
        (MlflowException("API request to http://m:1/api failed: Max retries exceeded with url"), FaultKind.LOST, 75),
        (MlflowException("Registered Model with name=demo not found"), FaultKind.FAILED, 1),
        (RayServeException("no such app"), FaultKind.FAILED, 1),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), FaultKind.FAILED, 1),
        (UnreadableStore("/data/journal.db is damaged"), FaultKind.BAD_INPUT, 2),
        (UnreadableStore("/data/journal.db: [Errno 28] No space left on device: '/tmp/x'"), FaultKind.BAD_INPUT, 2),
        (raised_in_a_task(UnreadableStore("table x is damaged")), FaultKind.BAD_INPUT, 2),
        (OSError(errno.EROFS, "Read-only file system", "/data/x"), FaultKind.BAD_INPUT, 2),
        (PermissionError(errno.EACCES, "Permission denied", "/data/x"), FaultKind.BAD_INPUT, 2),
        (PermissionError(errno.EPERM, "Operation not permitted"), FaultKind.FAILED, 1),
        (OutOfMemoryError(MEMORY.format(kind="Task", name="hog")), FaultKind.OUT_OF_MEMORY, 3),
        (OutOfMemory("Cannot allocate memory"), FaultKind.OUT_OF_MEMORY, 3),
        (MemoryError(), FaultKind.OUT_OF_MEMORY, 3),
        (TrainJobError("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"), FaultKind.OUT_OF_MEMORY, 3),
    ],
)
def test_each_failure_has_its_kind_and_exit_code(error: BaseException, kind: FaultKind, code: int) -> None:
    fault = diagnose(error)
    assert (fault.kind, fault.exit_code) == (kind, code), fault.message


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Collector.run", "a collector (Collector.run, pid 22540, 9.04GB) was ended by Ray on node 192.0.2.7"),
        ("Collector.run", "lower collect.episodes_in_flight"),
        ("RayTrainWorker.__init__", "lower train.microbatch_tokens"),
        ("trainer:trainer-demo/team:0a1b:TrainerSupervisor.__init__", "train.keep_warm: false"),
        ("SERVE_REPLICA::demo-rollout-team#Policy#x:ServeReplica:demo-rollout-team:Policy.f", "serve.kv_cache_gib"),
        ("Collector.run", "the largest there: ray::RayTrainWorker 12.12 GB, Collector.run 9.04 GB"),
    ],
)
def test_out_of_memory_names_the_process_and_what_to_lower(name: str, says: str) -> None:
    error = OutOfMemoryError(MEMORY.format(kind="Actor(baf9eae1900cab27)", name=name))
    assert says in diagnose(error).message
    assert says in diagnose(caused_by(error)).message


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            RuntimeError("app 'a' did not start: ValueError: No available memory for the cache blocks."),
            "serve.kv_cache_gib",
        ),
        (TrainJobError("RuntimeError", "DefaultCPUAllocator: can't allocate memory"), "train.microbatch_tokens"),
        (MemoryError(), "this command itself"),
        (raised_in_a_task(ActorDiedError()), "infrastructure lost, repeat: what is finished is kept"),
        (raised_in_a_task(KeyError("x")), "KeyError: 'x'"),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "disk full while writing /data/x: free some"),
        (
            raised_in_a_task(OSError(errno.ENOSPC, "No space left on device", "/data/x")),
            "full while writing /data/x: free",
        ),
        (
            TrainJobError("OSError", "[Errno 28] No space left on device: '/data/x y'"),
            "full while writing /data/x y: free",
        ),
        (UnreadableStore("j.db: No space left on device"), "j.db: No space left on device"),
        (
            OSError(errno.EROFS, "Read-only file system", "/data/x"),
            "/data/x cannot be used: Read-only file system. Let",
        ),
        (
            OperationalError("INSERT", {}, Exception("database or disk is full")),
            "a store or this command's output: free",
        ),
    ],
)
def test_messages_say_what_to_do(error: BaseException, says: str) -> None:
    message = diagnose(error).message
    assert says in message
    assert "Traceback" not in message

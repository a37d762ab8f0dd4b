"""faults: an exception that ended a command -> what kind of failure it is, its exit code, and a message that helps.

    0 done   1 failed, may be repeated   2 bad input, never repeat   3 out of memory, not as it is
    75 infrastructure lost (node, actor, cluster, lease), repeat     130 interrupted

Exit codes are what a scheduler decides on without reading messages. Exceptions are told apart by the names of their
classes, so that neither Ray nor SQLAlchemy is imported by a command that never used it.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """Why a command ended."""

    FAILED = "failed"
    BAD_INPUT = "bad_input"
    OUT_OF_MEMORY = "out_of_memory"
    LOST = "lost"
    INTERRUPTED = "interrupted"


EXIT_CODES = {
    FaultKind.FAILED: 1,
    FaultKind.BAD_INPUT: 2,
    FaultKind.OUT_OF_MEMORY: 3,
    FaultKind.LOST: 75,  # EX_TEMPFAIL of sysexits.h
    FaultKind.INTERRUPTED: 130,
}


class InfrastructureLost(RuntimeError):
    """Raised where Troupe itself finds that a machine, a service or the cluster is to blame: repeat."""


class ClusterLost(InfrastructureLost):
    """The Ray cluster is gone with its head. Ray ends the process soon, with exit code 1 and without a message."""


class OutOfMemory(RuntimeError):
    """Raised where Troupe itself finds that a process was ended for lack of memory: its message is Ray's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A failure as a person and a scheduler need it."""

    kind: FaultKind
    message: str

    @property
    def exit_code(self) -> int:
        """What the process ends with."""
        return EXIT_CODES[self.kind]


LOST = {
    "InfrastructureLost",
    "LeaseLost",
    "ConnectionError",  # Python's, requests', Ray's job and Serve clients'
    # ray.exceptions
    "RayActorError",
    "NodeDiedError",
    "WorkerCrashedError",
    "LocalRayletDiedError",
    "RaySystemError",
    "RpcError",
    "ObjectLostError",
    "TaskUnschedulableError",
    "ActorUnschedulableError",
    "ActorHandleNotFoundError",
    # ray.serve and ray.train
    "DeploymentUnavailableError",
    "ReplicaUnavailableError",
    "WorkerHealthCheckFailedError",
    "WorkerHealthCheckTimeoutError",
    "WorkerGroupStartupTimeoutError",
    "WorkerGroupStartupFailedError",
}
"""Classes, with all that inherit from them, after which the same command may succeed. For a `TrainJobError` the class that
it names counts."""

REFUSED = {"AuthenticationError", "UnreadableStore"}
"""Classes that are bad input though no ValueError."""
FULL = {errno.ENOSPC, errno.EDQUOT}
NOT_ALLOWED = {errno.EROFS, errno.EACCES, errno.EPERM}

NO_SPACE = re.compile(rf"{re.escape(os.strerror(errno.ENOSPC))}|database or disk is full|OutOfDiskError")
FULL_FILE = re.compile(rf"{re.escape(os.strerror(errno.ENOSPC))}: '(?P<file>[^'\n]{{1,1000}})'")
NO_MEMORY = re.compile(
    r"running low on memory|OutOfMemoryError|CUDA out of memory|can't allocate memory|Cannot allocate memory|"
    r"No available memory for the cache blocks|larger than the available KV cache",
)
DATABASE_LOST = re.compile(
    r"database is locked|connection (refused|failed|timed out)|could not connect|server closed the connection|"
    r"connection to server .{0,200} failed|terminating connection|Connection reset|Max retries exceeded|could not translate host name",
    re.IGNORECASE,
)
DATABASE_REFUSED = re.compile(
    r"password authentication failed|role .{0,200} does not exist|database .{0,200} does not exist"
)
STORAGE = re.compile(r"AWS Error (\w+(?: \(HTTP status \d+\))?)|<Code>(\w+)</Code>|kind: (Connect|Timeout)\b")
"""What pyarrow and LanceDB quote of object storage; LanceDB calls all of it invalid input."""
STORAGE_REFUSED = re.compile(
    r"access.?denied|invalid.?access.?key|signature.?does.?not|no.?such.?bucket|expired.?token", re.IGNORECASE
)
STORAGE_LOST = re.compile(
    r"network.?connection|slow.?down|service.?unavailable|internal.?(error|failure)|request.?timeout|throttling|"
    r"status 5\d\d|connect|timeout",
    re.IGNORECASE,
)
VICTIM = re.compile(
    r"Selected to kill: \((?>.{0,1000}?task name=)(?P<name>[^,]{1,1000}+),(?>.{0,1000}?pid=)(?P<pid>\d{1,20}+), "
    r"actual memory used=(?P<used>[^\s,]{1,40}+),"
)
NODE = re.compile(
    r"Memory on the node \(IP: (?P<ip>[^,]{1,200}),[^)]{0,200}\) was (?P<used>\S{1,40}) used / (?P<limit>\S{1,40}) limit"
)
LARGEST = re.compile(r"^(\d+)\t([\d.]+)\t(.+)$", re.MULTILINE)

OWN_PACKAGES = ("pipelines", "serve_apps", "train_loops", "stores")
"""Errors of which the message alone says what happened."""
PARTS = (
    (
        re.compile(r"Collector|Writer|MapBatches"),
        "a collector",
        "collect.episodes_in_flight or collect.num_workers",
    ),
    (
        re.compile(r"RayTrainWorker|TrainJobError|train_loops"),
        "a trainer",
        "train.microbatch_tokens, or set train.deepspeed.gradient_checkpointing: true or a higher "
        "train.deepspeed.zero_stage",
    ),
    (
        re.compile(r"trainer:|TrainerSupervisor|TrainController"),
        "a trainer's supervisor",
        "the number of warm trainers: train.keep_warm: false for some model groups",
    ),
    (
        re.compile(r"ServeReplica|SERVE_REPLICA|EngineCore|Policy|KV cache|cache blocks|did not start"),
        "a policy app's engine",
        "serve.kv_cache_gib (on a GPU serve.engine.gpu_memory_utilization), serve.max_num_seqs or serve.max_model_len",
    ),
)
"""What a process is called in messages, and the keys that its memory depends on."""
OWN = ("this command itself", "collect.tasks_per_iteration x collect.episodes_per_task, or evaluate fewer tasks")


def diagnose(error: BaseException) -> Fault:
    """Tells the fault behind an exception; an unknown one counts as a failure that may be repeated, with its own message."""
    if isinstance(error, KeyboardInterrupt):
        return Fault(
            kind=FaultKind.INTERRUPTED, message="interrupted: what is finished is kept, the same command goes on"
        )
    chain = list(_chain(error))
    if full := [link for link in chain if _is_full(link)]:
        return Fault(kind=FaultKind.FAILED, message=_disk_full(full))
    for link in chain:
        if isinstance(link, OSError) and link.errno in NOT_ALLOWED and link.filename:
            return Fault(kind=FaultKind.BAD_INPUT, message=_not_allowed(link))
    for link in chain:
        if _is_memory(link):
            return Fault(kind=FaultKind.OUT_OF_MEMORY, message=_memory_message(link))
    for link in chain:
        fault = _storage_fault(str(link)) if isinstance(link, (OSError, ValueError, RuntimeError)) else None
        if fault is not None:
            return fault
    names = {name for link in chain for name in _names(link)}
    message = _message_of(error)
    if names & REFUSED or any(_is_database(link, DATABASE_REFUSED) for link in chain):
        return Fault(kind=FaultKind.BAD_INPUT, message=message)
    if names & LOST and not any(getattr(link, "actor_init_failed", False) for link in chain):
        return Fault(kind=FaultKind.LOST, message=f"{message}\ninfrastructure lost, repeat: what is finished is kept")
    if any(_is_database(link, DATABASE_LOST) for link in chain):
        return Fault(
            kind=FaultKind.LOST,
            message=f"{message}\nthe database (storage.journal or storage.mlflow) does not answer: repeat once it does",
        )
    if isinstance(error, ValueError) or getattr(error, "kind", "") == "ValueError":
        return Fault(kind=FaultKind.BAD_INPUT, message=message)
    return Fault(kind=FaultKind.FAILED, message=message)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, through Ray's wrapping too."""
    seen: set[int] = set()
    todo: list[object] = [error]
    while todo:
        link = todo.pop(0)
        if isinstance(link, BaseException) and id(link) not in seen:
            seen.add(id(link))
            yield link
            todo += [link.__cause__, getattr(link, "cause", None)]


def _names(error: BaseException) -> set[str]:
    """Names of the classes of an error; for a job that failed in a trainer, also of the one that was raised there."""
    return {cls.__name__ for cls in type(error).__mro__} | {str(getattr(error, "kind", ""))}


def _is_full(error: BaseException) -> bool:
    """Whether a disk is full; a message that explains more than that stays as it is."""
    is_explained = "UnreadableStore" in _names(error)
    return not is_explained and (getattr(error, "errno", None) in FULL or bool(NO_SPACE.search(str(error))))


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, OutOfMemory)) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return "OutOfMemoryError" in _names(error) or bool(NO_MEMORY.search(str(error)))


def _is_database(error: BaseException, pattern: re.Pattern[str]) -> bool:
    return bool(
        {"OperationalError", "InterfaceError", "MlflowException"} & _names(error) and pattern.search(str(error))
    )


def _storage_fault(text: str) -> Fault | None:
    """What object storage said, if that is what an error is about and it was no missing file."""
    quoted = STORAGE.search(text)
    reason = next((part for part in quoted.groups() if part), "") if quoted else ""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"
    if STORAGE_REFUSED.search(reason):
        message = (
            f"object storage at {endpoint} refused ({reason}): see that the bucket of `storage` exists and that "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY may use it"
        )
        return Fault(kind=FaultKind.BAD_INPUT, message=message)
    if STORAGE_LOST.search(reason):
        message = (
            f"object storage at {endpoint} does not answer ({reason}): repeat once it does, what is finished is kept"
        )
        return Fault(kind=FaultKind.LOST, message=message)
    return None


def _message_of(error: BaseException) -> str:
    """The message of an error, without the traceback of another process."""
    cause = getattr(error, "cause", None)
    if "RayTaskError" in _names(error) and isinstance(cause, BaseException):
        error = cause
    is_clear = isinstance(error, ValueError) or type(error).__module__.partition(".")[0] in OWN_PACKAGES
    return str(error) if is_clear else f"{type(error).__name__}: {error}"


def _disk_full(errors: list[BaseException]) -> str:
    files = [getattr(error, "filename", None) for error in errors]
    quoted = [match["file"] for error in errors if (match := FULL_FILE.search(str(error)))]
    target = next((file for file in [*files, *quoted] if file), "a store or this command's output")
    return (
        f"disk full while writing {target}: free some space, what is finished is kept; the same command goes on. "
        "`troupe maintain --run RUN --dry-run` says what a run does not need any more"
    )


def _not_allowed(error: OSError) -> str:
    return (
        f"{error.filename} cannot be used: {error.strerror}. Let this user use it, or give another place (storage.root or "
        "--root for runs, --out for what a command writes)"
    )


def _memory_message(error: BaseException) -> str:
    """Which process was ended, what it is for, what to lower, and who used most of the memory."""
    text = str(error)
    victim, node = VICTIM.search(text), NODE.search(text)
    line = next((line.strip() for line in text.splitlines() if NO_MEMORY.search(line)), "") or type(error).__name__
    part, keys = _part(victim["name"] if victim else f"{type(error).__name__} {text}")
    if victim and node:
        head = (
            f"out of memory: {part} ({victim['name']}, pid {victim['pid']}, {victim['used']}) was ended by Ray on node "
            f"{node['ip']}, which used {node['used']} of {node['limit']}"
        )
    else:
        head = f"out of memory in {part}: {line}"
    users = [f"{command.strip()} {used} GB" for _, used, command in LARGEST.findall(text)[:3]]
    largest = f"; the largest there: {', '.join(users)}" if users else ""
    return f"{head}{largest}\nlower {keys}; repeated as it is, it would end the same way"


def _part(name: str) -> tuple[str, str]:
    """Which part of Troupe a process of this name is, and what its memory depends on."""
    return next(((part, keys) for pattern, part, keys in PARTS if pattern.search(name)), OWN)

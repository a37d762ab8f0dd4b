"""jobs: a troupe command -> a Ray job, followed to its end.

    Work ──attach──> is an attempt of it pending, running or done, with its result in its log? ──yes──> that job
                     else: attempt n+1 ──submit──> job `troupe-<run>-it3-collect-a<n+1>`
    job ──follow──> its new log text, again and again, until it has ended ──> Outcome(ref | error, exit code)

A submission id is used once per cluster, so that two submitters never start a job twice. The job of a whole iteration does a part
of it when it is asked to: `ask` puts a mark on the cluster, for which it looks. No import of Ray by whoever submits.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipelines.cluster.job_api import ClusterUnreachable, Job, JobApi, last_lines
from pipelines.config.run_config import RunConfig

REF_MARK = "troupe-ref"
"""Begins the lines with which a command hands results to whoever follows its job, see `ref_prefix`."""
RUN_CONFIG_VARIABLE = "TROUPE_RUN_CONFIG"
NEVER_REPEAT = (2, 3, 127)
"""Exit codes that a second attempt cannot change: bad input, out of memory, no `troupe` on the cluster."""
KILLED = (-9, 137)
"""Exit codes of a command that somebody killed with SIGKILL: the command's own, and what the shell makes of it."""
RAY_LINES = ("Running entrypoint for job", "Runtime env is setting up.")
"""Parts of the lines that Ray, not the command, writes at the beginning of every job's log."""
MAX_UPLOAD_BYTES = 256 * 1024**2
UNREACHABLE_S = 120.0
"""How long a cluster may be out of reach before its job is given up."""

Status = Literal["SUCCEEDED", "FAILED", "STOPPED", "LOST", "UNREACHABLE", "REFUSED", "TIMEOUT"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One troupe command, as it is sent to a cluster."""

    run: str
    command: str
    """`begin`, `stage`, `train`, ..."""
    arguments: tuple[str, ...] = ()
    label: str
    """Identifies it among the work of the run: `it3-train-solver`, `begin-4f2a`."""

    @property
    def name(self) -> str:
        """The submission id without its attempt."""
        return _plain(f"troupe-{self.run}-{self.label}")

    def entrypoint(self, folder: str) -> str:
        """The command line of the job."""
        line = shlex.join(["troupe", self.command, *self.arguments])
        return f"cd {shlex.quote(folder)} || exit 2; {line}" if folder else line


def stage_work(run: str, stage: str, iteration: int, model_group: str = "") -> Work:
    """`troupe stage` of one iteration."""
    arguments = (stage, "--run", run, "--iteration", str(iteration))
    return Work(
        run=run,
        command="stage",
        arguments=(*arguments, "--model-group", model_group) if model_group else arguments,
        label=f"it{iteration}-{stage}" + (f"-{model_group}" if model_group else ""),
    )


def begin_work(run: str, claim: str, *, is_forced: bool = False) -> Work:
    """`troupe begin` for a claim; each claim has a job of its own."""
    arguments = ("--run", run, "--claim", claim, *(("--force",) if is_forced else ()))
    return Work(run=run, command="begin", arguments=arguments, label=f"begin-{sha256(claim.encode()).hexdigest()[:8]}")


def iterate_work(run: str, claim: str, *, is_forced: bool = False) -> Work:
    """`troupe iterate` for a claim: `begin` and the whole iteration that it gives, in one job."""
    begin = begin_work(run, claim, is_forced=is_forced)
    return replace(begin, command="iterate", label=begin.label.replace("begin", "iterate", 1))


def ask(api: JobApi, submission_id: str, part: str) -> None:
    """Asks the job of an iteration to do a part of it (`collect`, `train/solver`), once or again.

    Of what a cluster takes by HTTP only packages are kept where its jobs can look. Ray removes one that no job uses after
    10 minutes; the job looks several times a second.
    """
    api.upload(_mark(submission_id, part), b"asked")


def is_asked(submission_id: str, part: str) -> bool:
    """Whether somebody has asked this job to do a part; in a process that is connected to the cluster."""
    from stores.inside_ray import has_package

    return has_package(_mark(submission_id, part))


def _mark(submission_id: str, part: str) -> str:
    return f"_ray_pkg_{sha256(f'{submission_id} {part}'.encode()).hexdigest()[:32]}.zip"


def ref_prefix(part: str = "") -> str:
    """Returns the beginning of the line with a result. Args: part: which one, of a command that hands back several: `train/solver`."""
    return f"{REF_MARK} {part}: " if part else f"{REF_MARK}: "


def loop_work(config: RunConfig) -> Work:
    """`troupe train`: all iterations in one job; with another number of iterations it is other work."""
    return Work(run=config.run, command="train", arguments=(config.run,), label=f"to-it{config.iterations}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a job ended. JSON values: it crosses process borders as it is."""

    submission_id: str
    status: Status
    exit_code: int | None = None
    ref: dict[str, Any] | None = None
    error: str = ""

    @property
    def may_repeat(self) -> bool:
        """False where the same command must end the same way, and where somebody stopped it."""
        return self.status not in ("STOPPED", "REFUSED") and self.exit_code not in NEVER_REPEAT

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data that crosses processes."""
        return asdict(self)


class Attached(NamedTuple):
    """A job that does some work."""

    submission_id: str
    is_new: bool
    """False where it was there before: it may be of a try that is just being stopped."""


def attach(
    api: JobApi,
    config: RunConfig,
    work: Work,
    *,
    folder: str,
    links: Mapping[str, str],
    since: float = 0.0,
    takes_done: bool = True,
    part: str = "",
) -> Attached:
    """The job that does the work: one that is pending or running, one that has handed back its result, else a new attempt.

    Args:
        folder: where the job starts on the cluster, if the run config says neither a folder nor a working directory.
        links: environment variables that say where the job was started from, for MLflow and logs.
        since: unix seconds when the run was begun; what was done before was for a removed run of the same name.
        takes_done: False where `since` is not known (`troupe submit`): then a new job is submitted, which ends at once if
            the work is done.
        part: the result that is wanted, of a command that hands back several.

    Raises ValueError where a job of this name runs with another config.
    """
    attempt = 0
    while True:
        submission_id = f"{work.name}-a{attempt}"
        job = api.job(submission_id)
        if job is None:
            request = _request(api, config, work, submission_id, folder, links)
            if api.submit(request):
                return Attached(submission_id, is_new=True)
            job = api.job(submission_id)  # somebody else was first
        if job is None or not job.has_ended:
            if job is not None and job.config_sha256 not in ("", config.sha256):
                raise ValueError(
                    f"job {submission_id} runs with another config of run {work.run!r}: wait for it, or stop it "
                    f"(troupe stop {submission_id}), and give another run name to another config"
                )
            return Attached(submission_id, is_new=False)
        is_of_this_run = (job.ended_at or since) >= since
        # A log may be gone with its node: the stage is done all the same, and the next attempt says so at once.
        if (
            job.status == "SUCCEEDED"
            and takes_done
            and is_of_this_run
            and result_in(api.log(submission_id), part) is not None
        ):
            return Attached(submission_id, is_new=False)
        attempt += 1


class Follower:
    """Reads a job's new log text and how it ends. A cluster may be out of reach for a while; every wait has a limit."""

    def __init__(self, api: JobApi, submission_id: str, *, deadline: float, num_seen: int = 0, part: str = "") -> None:
        """Args:
        deadline: unix seconds after which the job is stopped.
        num_seen: characters of its log that somebody has read before.
        part: the result that is waited for, of a command that hands back several; the job may go on after it.
        """
        self._api, self.submission_id, self._deadline, self._part = api, submission_id, deadline, part
        self.num_seen = num_seen
        """Characters of the log that were returned."""
        self._silent_since: float | None = None

    def poll(self) -> tuple[str, Outcome | None]:
        """Whole lines that are new, and the outcome once there is one."""
        try:
            polled = self._poll()
        except ClusterUnreachable as error:
            now = time.monotonic()
            self._silent_since = self._silent_since or now
            if now - self._silent_since < UNREACHABLE_S:
                return "", None
            return "", self._outcome("UNREACHABLE", f"{error}; waited {UNREACHABLE_S:g} s")
        except ValueError as error:
            return "", self._outcome("REFUSED", str(error))
        self._silent_since = None
        return polled

    def _poll(self) -> tuple[str, Outcome | None]:
        job = self._api.job(self.submission_id)
        if job is None:
            return "", self._outcome("LOST", f"{self._api.shown} no longer knows this job: the cluster was restarted")
        text, is_done = self._api.log(self.submission_id), False
        if self._part:
            begin, end, is_done = _section(text, self._part)
            text, self.num_seen = text[:end], max(begin, self.num_seen)
        is_late = not job.has_ended and not is_done and time.time() > self._deadline
        if is_late:  # before its lines are counted as seen: where this does not reach the cluster, all is done again
            self._api.stop(self.submission_id)
        new = self._new(text, job.has_ended)
        if job.has_ended or is_done:
            return new, outcome(job, text, self._part)
        if is_late:
            last = last_lines(text, 5) or f"nothing printed yet, {job.status}: {job.message}"
            return new, self._outcome(
                "TIMEOUT", f"not done at its deadline (schedule.stage_timeout_s), stopped: {last}"
            )
        return new, None

    def _new(self, text: str, is_whole: bool) -> str:
        end = len(text) if is_whole else text.rfind("\n") + 1
        new, self.num_seen = text[self.num_seen : end], max(end, self.num_seen)
        return new

    def _outcome(self, status: Status, error: str) -> Outcome:
        return Outcome(submission_id=self.submission_id, status=status, error=error)


def follow(follower: Follower, show: Callable[[str], None], *, poll_s: float = 1.0) -> Outcome:
    """Shows the log as it grows; returns when the job has ended."""
    while True:
        new, ended = follower.poll()
        if new:
            show(new)
        if ended:
            return ended
        time.sleep(poll_s)


def outcome(job: Job, log: str, part: str = "") -> Outcome:
    """What a job handed back, or the last lines that say why it failed; one that has done its `part` may go on."""
    ref = result_in(log, part)
    if part and ref is not None:
        return Outcome(submission_id=job.submission_id, status="SUCCEEDED", exit_code=job.exit_code, ref=ref)
    error = ""
    if job.status == "FAILED":
        error = failure(log) or job.message
        if job.exit_code == 127:
            error += (
                ": the job found no `troupe` on the cluster: start Ray from an activated environment that has it, "
                "put its bin folder on the PATH of `ray start`, or name an image (cluster.runtime_env)"
            )
        elif job.exit_code in KILLED:
            error += "\nended by kill -9: by hand, or by the system for lack of memory (its log, dmesg, says which)"
    elif job.status == "STOPPED":
        error = "stopped by hand (troupe stop, or the task was cleared)"
    elif ref is None:
        error = "the job succeeded but its log is gone, and with it the result: the next attempt hands it back at once"
    return Outcome(
        submission_id=job.submission_id,
        status=job.status,  # type: ignore[arg-type]
        exit_code=job.exit_code,
        ref=ref,
        error=error,
    )


def failure(log: str) -> str:
    """The lines of a log that say why a command failed: its own message, else the last lines."""
    lines = [line for line in log.splitlines() if line.strip() and not any(words in line for words in RAY_LINES)]
    for start in range(len(lines) - 1, -1, -1):
        if lines[start].startswith("troupe: "):
            return "\n".join(lines[start : start + 20])
    return "\n".join(lines[-12:])


def result_in(log: str, part: str = "") -> dict[str, Any] | None:
    """The last result in a log; None where there is none, or only its beginning, as of a job that was killed meanwhile."""
    prefix = ref_prefix(part)
    # A user's code may have begun the line, e.g. with a progress bar, and another process have gone on with it.
    line = next((line for line in reversed(log.splitlines()) if prefix in line), "")
    with suppress(ValueError, TypeError):
        return dict(json.JSONDecoder().raw_decode(line.partition(prefix)[2])[0])
    return None


def _section(log: str, part: str) -> tuple[int, int, bool]:
    """Returns where the lines of a part begin and end, from the last result of another stage to its own, and whether that is there."""
    stage, begin, place = part.partition("/")[0], 0, 0
    own = (ref_prefix(stage), f"{REF_MARK} {stage}/")
    for line in log.splitlines(keepends=True):
        place += len(line)
        if ref_prefix(part) in line and line.endswith("\n") and result_in(line, part) is not None:
            return begin, place, True
        if f"{REF_MARK} " in line and not any(mark in line for mark in own):
            begin = place
    return begin, len(log), False


def _request(
    api: JobApi, config: RunConfig, work: Work, submission_id: str, folder: str, links: Mapping[str, str]
) -> dict[str, Any]:
    cluster = config.cluster
    start_folder = "" if cluster.working_dir else cluster.folder or folder
    runtime_env = dict(cluster.runtime_env)
    # Ray refuses what YAML makes of `OMP_NUM_THREADS: 4`, and its dashboard answers as if it had failed itself.
    own = runtime_env.pop("env_vars", None) or {}
    variables = {name: value if isinstance(value, str) else json.dumps(value) for name, value in own.items()}
    variables |= {**links, RUN_CONFIG_VARIABLE: config.model_dump_json()}
    if start_folder:  # replicas and collectors find the user's modules where the driver does
        variables["PYTHONPATH"] = os.pathsep.join(p for p in (start_folder, variables.get("PYTHONPATH", "")) if p)
    if cluster.working_dir:
        runtime_env["working_dir"] = api.upload(*package(Path(cluster.working_dir)))
    return {
        "entrypoint": work.entrypoint(start_folder),
        "submission_id": submission_id,
        "runtime_env": {**runtime_env, "env_vars": variables},
        "metadata": {
            "troupe_run": work.run,
            "troupe_work": work.label,
            "troupe_config": config.sha256,
            "dag_run": links.get("TROUPE_DAG_RUN_URL", ""),
        },
        **_reserved(cluster.resources),
    }


def _reserved(resources: Mapping[str, float]) -> dict[str, Any]:
    """What a job reserves, under the names of the job API."""
    kinds = {"CPU": "entrypoint_num_cpus", "GPU": "entrypoint_num_gpus", "memory": "entrypoint_memory"}
    own = {name: value for name, value in resources.items() if name not in kinds}
    named = {
        kinds[name]: int(value) if name == "memory" else value for name, value in resources.items() if name in kinds
    }
    return named | ({"entrypoint_resources": own} if own else {})


def package(folder: Path) -> tuple[str, bytes]:
    """Name (by content) and bytes of a zip of a folder: what git tracks or would, else everything.

    Raises ValueError where there is no such folder, or it is too large to send with every job.
    """
    if not folder.is_dir():
        raise ValueError(f"cluster.working_dir {str(folder)!r} is no folder")
    files = sorted(path for path in _known_to_git(folder) or folder.rglob("*") if path.is_file())
    total = sum(path.stat().st_size for path in files)
    if total > MAX_UPLOAD_BYTES:
        raise ValueError(
            f"cluster.working_dir {str(folder)!r} holds {total / 1024**2:.0f} MiB, at most "
            f"{MAX_UPLOAD_BYTES // 1024**2} are sent: name a smaller folder, or give cluster.folder on a shared disk"
        )
    content = BytesIO()
    digest = sha256()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            data, name = path.read_bytes(), path.relative_to(folder).as_posix()
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (path.stat().st_mode & 0o777) << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return f"_ray_pkg_{digest.hexdigest()[:32]}.zip", content.getvalue()


def _known_to_git(folder: Path) -> list[Path]:
    """Files that git tracks or would, also in checkouts within; none where the folder is no checkout, or there is no git.

    ValueError where git does not say it of a checkout: to send all of it would send keys that it ignores, and its history.
    """
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."]
    try:
        listed = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return []
    if listed.returncode:
        if any((place / ".git").exists() for place in (folder.resolve(), *folder.resolve().parents)):
            complaint = " ".join(listed.stderr.decode(errors="replace").split())
            raise ValueError(
                f"cluster.working_dir {str(folder)!r}: git does not say which files are to be sent: {complaint}"
            )
        return []
    paths = [folder / name for name in os.fsdecode(listed.stdout).split("\0") if name]
    inner = [path for path in paths if path.is_dir() and not path.is_symlink() and path.resolve() != folder.resolve()]
    return [*paths, *(file for checkout in inner for file in _known_to_git(checkout))]


def _plain(name: str) -> str:
    """A name without what has a meaning in addresses; one that had to be changed stays apart from its like."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
    return plain if plain == name else f"{plain}-{sha256(name.encode()).hexdigest()[:6]}"

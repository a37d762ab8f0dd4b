"""jobs: a troupe command -> a Ray job, followed to its end. The one owner of Ray's job API.

    Work ──attach──> is an attempt of it pending, running or done, with its result in its log? ──yes──> that job
                     else: attempt n+1 ──submit──> job `troupe-<run>-it3-collect-a<n+1>`
    job ──follow──> its new log text, again and again, until it has ended ──> Outcome(ref | error, exit code)

Plain HTTP (Ray's jobs REST API) and the standard library: no import of Ray, so that Airflow's processes stay light, and
every request has a deadline. A submission id is used once per cluster, so that two submitters never start a job twice.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from pipelines.auth import auth_token, is_on_this_machine, token_path
from pipelines.config import RunConfig
from pipelines.schedule import ClusterConfig, check_address

DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
REF_PREFIX = "troupe-ref: "
"""Begins the line with which a command hands its result to whoever follows its job."""
RUN_CONFIG_VARIABLE = "TROUPE_RUN_CONFIG"
NEVER_REPEAT = (2, 3, 127)
"""Exit codes that a second attempt cannot change: bad input, out of memory, no `troupe` on the cluster."""
KILLED = (-9, 137)
"""Exit codes of a command that somebody killed with SIGKILL: the command's own, and what the shell makes of it."""
REQUEST_TIMEOUT_S = 30.0
RAYS_OWN = ("Running entrypoint for job", "Runtime env is setting up.")
"""Lines of Ray's, not the command's, with which every job's log begins."""
PATIENCE_S = 120.0
"""How long a cluster may be out of reach before its job is given up."""
MAX_UPLOAD_BYTES = 256 * 1024**2

Status = Literal["SUCCEEDED", "FAILED", "STOPPED", "LOST", "UNREACHABLE", "REFUSED", "TIMEOUT"]


class ClusterUnreachable(ConnectionError):
    """Nobody answers at the address, or not yet: may pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One troupe command, as it is sent to a cluster."""

    run: str
    command: str
    """`begin`, `stage`, `train`, ..."""
    arguments: tuple[str, ...] = ()
    label: str
    """What tells it from other work of the run: `it3-train-solver`, `begin-4f2a`."""

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
    """`troupe begin` for a claim; a claim's job is not another claim's."""
    arguments = ("--run", run, "--claim", claim, *(("--force",) if is_forced else ()))
    return Work(run=run, command="begin", arguments=arguments, label=f"begin-{sha256(claim.encode()).hexdigest()[:8]}")


def loop_work(config: RunConfig) -> Work:
    """`troupe train`: all iterations in one job; with more iterations it is other work."""
    return Work(run=config.run, command="train", arguments=(config.run,), label=f"to-it{config.iterations}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job as the cluster knows it."""

    submission_id: str
    status: str
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    message: str
    exit_code: int | None
    entrypoint: str
    run: str
    """Of which run; empty for a job that is not Troupe's."""
    config_sha256: str
    """Identity of the run config that it was submitted with; empty for a job that is not Troupe's."""
    started_at: float | None
    """Unix seconds."""
    ended_at: float | None

    @property
    def has_ended(self) -> bool:
        """True once its status is final."""
        return self.status in ENDED


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
        """Plain data."""
        return asdict(self)


@dataclass
class JobApi:
    """Ray's job API at one address. Raises ValueError for what is wrong with the address, ClusterUnreachable for silence."""

    address: str
    timeout_s: float = REQUEST_TIMEOUT_S
    _opener: OpenerDirector = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.address = check_address(self.address)
        self._opener = build_opener(*([ProxyHandler({})] if is_on_this_machine(self.address) else []))

    @property
    def _host(self) -> str:
        return urlsplit(self.address).hostname or ""

    def job(self, submission_id: str) -> Job | None:
        """A job; None if the cluster does not know it (any more)."""
        code, body = self._send("GET", f"/api/jobs/{submission_id}")
        return None if code == 404 else _job(self._parsed(code, body))

    def jobs(self) -> list[Job]:
        """Every job that was submitted to the cluster, newest first."""
        rows = [row for row in self._json("GET", "/api/jobs/") if row.get("type") == "SUBMISSION"]
        return sorted(map(_job, rows), key=lambda job: job.started_at or 0.0, reverse=True)

    def log(self, submission_id: str) -> str:
        """All that a job has printed so far; empty where it has not begun, or its log is out of reach."""
        code, body = self._send("GET", f"/api/jobs/{submission_id}/logs")
        return str(self._parsed(code, body).get("logs") or "") if code == 200 else ""

    def submit(self, request: Mapping[str, Any]) -> bool:
        """Starts a job; False if its submission id exists already."""
        code, body = self._send("POST", "/api/jobs/", dict(request))
        if code != 200 and "already exists" in body:
            return False
        self._parsed(code, body)
        return True

    def stop(self, submission_id: str) -> bool:
        """Asks a job to end; False where the cluster does not know it. Harmless for one that has ended."""
        code, body = self._send("POST", f"/api/jobs/{submission_id}/stop")
        if code == 404:
            return False
        self._parsed(code, body)
        return True

    def upload(self, name: str, content: bytes) -> str:
        """Keeps a package on the cluster unless it is there; returns its URI."""
        if self._send("GET", f"/api/packages/gcs/{name}")[0] == 404:
            code, body = self._send("PUT", f"/api/packages/gcs/{name}", content)
            if code != 200:
                raise ClusterUnreachable(f"{self.address} did not take the working directory: HTTP {code}, {body}")
        return f"gcs://{name}"

    def _json(self, method: str, path: str) -> Any:
        return self._parsed(*self._send(method, path))

    def _parsed(self, code: int, body: str) -> Any:
        if code in (401, 403):
            raise ValueError(self._refusal(code))
        if code == 404:
            raise ValueError(
                f"{self.address} answers, but it is no Ray dashboard (HTTP 404): give http://HOST:8265 of the cluster"
            )
        if code != 200:
            raise ClusterUnreachable(f"{self.address} answered HTTP {code}: {_last_lines(body, 5)}")
        try:
            return json.loads(body)
        except json.JSONDecodeError:
            raise ValueError(f"{self.address} answers, but not as Ray's job API: is it http://HOST:8265?") from None

    def _send(self, method: str, path: str, data: Any = None) -> tuple[int, str]:
        headers = {"Content-Type": "application/octet-stream" if isinstance(data, bytes) else "application/json"}
        if token := self._token():
            headers["Authorization"] = f"Bearer {token}"
        content = data if data is None or isinstance(data, bytes) else json.dumps(data).encode()
        request = Request(self.address + path, data=content, headers=headers, method=method)
        try:
            with self._opener.open(request, timeout=self.timeout_s) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except http.client.BadStatusLine as error:
            if isinstance(error, http.client.RemoteDisconnected):  # it is just going down, or coming up
                raise ClusterUnreachable(f"{self.address} hung up without an answer") from None
            raise ValueError(
                f"{self.address} answers, but not in HTTP ({error!r}): is it the port of the cluster itself? "
                f"Jobs go to the dashboard, e.g. http://{self._host}:8265"
            ) from None
        except (URLError, OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ClusterUnreachable(
                f"no Ray cluster answers at {self.address} ({reason}): is it up, and is that its dashboard's address "
                "(cluster.address, RAY_API_SERVER_ADDRESS)?"
            ) from None

    def _token(self) -> str:
        """Ray's token; on this machine also without RAY_AUTH_MODE."""
        is_wanted = os.environ.get("RAY_AUTH_MODE", "") == "token" or is_on_this_machine(self.address)
        return auth_token() if is_wanted else ""

    def _refusal(self, code: int) -> str:
        if self._token():
            where = "RAY_AUTH_TOKEN" if os.environ.get("RAY_AUTH_TOKEN") else str(token_path())
            return (
                f"{self.address} refuses the token of {where} (HTTP {code}): it has expired or belongs to another "
                "cluster; put the cluster's token there (on its head: `ray get-auth-token`)"
            )
        return (
            f"{self.address} wants a token (HTTP {code}): set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or the file "
            f"{token_path()} (RAY_AUTH_TOKEN_PATH) to what `ray get-auth-token` says on the cluster's head"
        )


def address_of(cluster: ClusterConfig) -> str:
    """Where jobs are sent."""
    return cluster.address or check_address(os.environ.get("RAY_API_SERVER_ADDRESS") or DEFAULT_ADDRESS)


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
) -> Attached:
    """The job that does the work: one that is pending or running, one that has handed back its result, else a new attempt.

    Args:
        folder: where the job starts on the cluster, if the run config says neither a folder nor a working directory.
        links: environment variables that say where the job was started from, for MLflow and logs.
        since: unix seconds when the run was begun; what was done before was for a removed run of the same name.
        takes_done: False where nobody can say that (`troupe submit`): what is done then says so itself, in a new job.

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
        if job.status == "SUCCEEDED" and takes_done and is_of_this_run and REF_PREFIX in api.log(submission_id):
            return Attached(submission_id, is_new=False)
        attempt += 1


class Follower:
    """A job's new log text, and how it ends. Out of reach for a while is borne; every wait has its end."""

    def __init__(self, api: JobApi, submission_id: str, *, deadline: float) -> None:
        """Args: deadline: unix seconds after which the job is stopped."""
        self._api, self.submission_id, self._deadline = api, submission_id, deadline
        self._num_seen = 0
        self._silent_since: float | None = None

    def poll(self) -> tuple[str, Outcome | None]:
        """Whole lines that are new, and the outcome once there is one."""
        try:
            job = self._api.job(self.submission_id)
            text = self._api.log(self.submission_id) if job else ""
        except ClusterUnreachable as error:
            now = time.monotonic()
            self._silent_since = self._silent_since or now
            if now - self._silent_since < PATIENCE_S:
                return "", None
            return "", self._outcome("UNREACHABLE", f"{error}; waited {PATIENCE_S:g} s")
        except ValueError as error:
            return "", self._outcome("REFUSED", str(error))
        self._silent_since = None
        if job is None:
            return "", self._outcome("LOST", f"{self._api.address} no longer knows this job: the cluster was restarted")
        new = self._new(text, job.has_ended)
        if job.has_ended:
            return new, outcome(job, text)
        if time.time() > self._deadline:
            self._api.stop(self.submission_id)
            last = _last_lines(text, 5) or f"nothing printed yet, {job.status}: {job.message}"
            return new, self._outcome(
                "TIMEOUT", f"not done at its deadline (schedule.stage_timeout_s), stopped: {last}"
            )
        return new, None

    def _new(self, text: str, is_whole: bool) -> str:
        end = len(text) if is_whole else text.rfind("\n") + 1
        new, self._num_seen = text[self._num_seen : end], max(end, self._num_seen)
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


def outcome(job: Job, log: str) -> Outcome:
    """What an ended job handed back, or the last lines that say why it failed."""
    ref = next((json.loads(line.removeprefix(REF_PREFIX)) for line in _backwards(log, REF_PREFIX)), None)
    error = ""
    if job.status == "FAILED":
        error = failure(log) or job.message
        if job.exit_code == 127:
            error += (
                ": the job found no `troupe` on the cluster: start Ray from an activated environment that has it, "
                "put its bin folder on the PATH of `ray start`, or name an image (cluster.runtime_env)"
            )
        elif job.exit_code in KILLED:
            error += "\nended by kill -9: by hand, or by the system for want of memory (its log, dmesg, says which)"
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
    lines = [line for line in log.splitlines() if line.strip() and not any(words in line for words in RAYS_OWN)]
    for place in range(len(lines) - 1, -1, -1):
        if lines[place].startswith("troupe: "):
            return "\n".join(lines[place : place + 20])
    return "\n".join(lines[-12:])


def _backwards(log: str, prefix: str) -> Iterator[str]:
    return (line for line in reversed(log.splitlines()) if line.startswith(prefix))


def _last_lines(text: str, count: int) -> str:
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])


def _request(
    api: JobApi, config: RunConfig, work: Work, submission_id: str, folder: str, links: Mapping[str, str]
) -> dict[str, Any]:
    cluster = config.cluster
    place = "" if cluster.working_dir else cluster.folder or folder
    given = dict(cluster.runtime_env)
    variables = {**given.pop("env_vars", {}), **links, RUN_CONFIG_VARIABLE: config.model_dump_json()}
    if place:  # replicas and collectors find the user's modules where the driver does
        variables["PYTHONPATH"] = os.pathsep.join(p for p in (place, variables.get("PYTHONPATH", "")) if p)
    if cluster.working_dir:
        given["working_dir"] = api.upload(*package(Path(cluster.working_dir)))
    return {
        "entrypoint": work.entrypoint(place),
        "submission_id": submission_id,
        "runtime_env": {**given, "env_vars": variables},
        "metadata": {
            "troupe_run": work.run,
            "troupe_work": work.label,
            "troupe_config": config.sha256,
            "dag_run": links.get("TROUPE_DAG_RUN_URL", ""),
        },
        **({"entrypoint_num_cpus": cluster.num_cpus} if cluster.num_cpus is not None else {}),
        **({"entrypoint_num_gpus": cluster.num_gpus} if cluster.num_gpus is not None else {}),
        **({"entrypoint_memory": int(cluster.memory_gib * 1024**3)} if cluster.memory_gib is not None else {}),
        **({"entrypoint_resources": dict(cluster.resources)} if cluster.resources else {}),
    }


def package(folder: Path) -> tuple[str, bytes]:
    """Name (by content) and bytes of a zip of a folder: what git tracks or would, else everything.

    Raises ValueError where there is no such folder, or it is too large to send with every job.
    """
    if not folder.is_dir():
        raise ValueError(f"cluster.working_dir {str(folder)!r} is no folder")
    files = [folder / name for name in _known_to_git(folder)] or list(folder.rglob("*"))
    files = sorted(path for path in files if path.is_file())
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


def _known_to_git(folder: Path) -> list[str]:
    """Files that git tracks or would; none where the folder is no checkout, or there is no git."""
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."]
    try:
        listed = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return []
    return [name for name in listed.stdout.decode().split("\0") if name] if listed.returncode == 0 else []


def _job(row: Mapping[str, Any]) -> Job:
    started, ended, metadata = row.get("start_time"), row.get("end_time"), row.get("metadata") or {}
    return Job(
        submission_id=row["submission_id"],
        status=row["status"],
        message=row.get("message") or "",
        exit_code=row.get("driver_exit_code"),
        entrypoint=row.get("entrypoint") or "",
        run=metadata.get("troupe_run", ""),
        config_sha256=metadata.get("troupe_config", ""),
        started_at=started / 1000 if started else None,
        ended_at=ended / 1000 if ended else None,
    )


def _plain(name: str) -> str:
    """A name without what has a meaning in addresses; one that had to be changed stays apart from its like."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
    return plain if plain == name else f"{plain}-{sha256(name.encode()).hexdigest()[:6]}"

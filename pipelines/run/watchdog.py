"""watchdog: logs every 30 s what a stage waits for, and ends the stage at its deadline instead of letting it hang.

    stage (this thread) ── waiting("...") / progress ──> watchdog (own thread) ──> a line every `LOG_INTERVAL_S`
         │                                                   │ at `<stage>.stage_timeout_s`, or the caller's key
         │                                                   ├─ stacks of all its processes -> <run folder>/stacks/
         │ <── interrupt: KeyboardInterrupt, here StageHung ─┤
         └─ ends: error names what it waited for             └─ still there after `GRACE_S`? lease marked failed,
                                                                process and what it started ended, exit code 1

An interrupt reaches a main thread in `ray.get` or `sleep` at once (a signal), other threads when they next run Python.
What does neither, a call stuck in C, is what the last step is for. Inner deadlines end before the stage's, and when one
of them raises TimeoutError the stacks are written as well.
"""

from __future__ import annotations

import contextvars
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from pipelines.cluster.connect import is_answering, memory_deaths
from pipelines.cluster.faults import ClusterLost, OutOfMemory, diagnose
from pipelines.cluster.owner_links import stage_owner
from stores.extensions import ask
from stores.journal.waiting import Wait, collected
from stores.logs import bound

if TYPE_CHECKING:
    from pipelines.run.run import Run
    from stores.journal.journal import Lease, StageKey

logger = logging.getLogger(__name__)

T = TypeVar("T")

SIGNAL = signal.SIGUSR1
MAX_MEMORY_DEATHS = 3
"""How many processes of one stage may die; Ray starts them again, and without a limit would do so until the deadline."""
STACKS_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 10.0
"""For what asks a cluster or a database that may be what hangs."""


LOG_INTERVAL_S = 30.0
"""The time between two log lines about what a stage waits for."""
GRACE_S = 30.0
"""The time that an interrupted stage has to end by itself before its process is ended."""


class StageHung(TimeoutError):
    """A stage, or something in it, was not done at its deadline; names what it waited for and the file of the stacks."""


class GivenUp(KeyboardInterrupt):
    """Interrupts the stage. A KeyboardInterrupt, because Ray passes on no other class from a signal handler."""


class Watchdog:
    """Watches one stage. `reporting` and `once` are called by the thread that does the stage."""

    def __init__(
        self,
        run: Run,
        key: StageKey,
        *,
        timeout_s: float,
        timeout_key: str = "",
        recover: Callable[[], None] = lambda: None,
        log_interval_s: float = LOG_INTERVAL_S,
        grace_s: float = GRACE_S,
    ) -> None:
        """Nothing is watched before `once`.

        Args:
            timeout_s: the stage's deadline, from when it begins to work.
            timeout_key: the config key that the deadline comes from, for messages; by default `<stage>.stage_timeout_s`.
            recover: ends what hangs and would still hang when the stage is repeated; called after the stacks are written.
        """
        self._run, self._key, self._timeout_s, self._recover = run, key, timeout_s, recover
        self._timeout_key = timeout_key or f"{key.stage}.stage_timeout_s"
        self._log_interval_s, self._grace_s = log_interval_s, grace_s
        self._waits: list[Wait] = []
        self._progress = ""
        self._thread = threading.current_thread()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._lease: Lease | None = None
        self._began, self._is_timed = time.monotonic(), False
        self._fault: Exception | None = None
        self._is_interrupted = False
        self._num_memory_deaths = 0

    @classmethod
    def of_section(
        cls,
        run: Run,
        name: str,
        section: str,
        *,
        iteration: int = 0,
        times: int = 1,
        recover: Callable[[], None] = lambda: None,
    ) -> Watchdog:
        """Watches work that may take `times` as long as the stage of a section of the run config."""
        timeout_s = times * getattr(run.config, section).stage_timeout_s
        key = run.key(iteration, name)
        return cls(run, key, timeout_s=timeout_s, timeout_key=f"{section}.stage_timeout_s", recover=recover)

    def reporting(self, progress: Callable[..., None] | None) -> Callable[..., None]:
        """A function that calls `progress` and lets the watchdog know how far the stage is."""

        def report(done: int, total: int, word: str | float = "") -> None:
            self._progress = f"{done}/{total} done" + (f", {word}" if word and isinstance(word, str) else "")
            if progress is not None:
                progress(done, total, word)

        return report

    def once(
        self,
        work: Callable[[Lease], dict[str, Any]],
        *,
        alone: AbstractContextManager[Any] | None = None,
    ) -> dict[str, Any]:
        """Calls `Journal.once` for the stage and watches it; another process that does the stage has a deadline of its own.

        Args: alone: entered before the work, e.g. a lock; the time that takes does not count.

        Raises StageHung at the deadline, and in place of a TimeoutError of `work`; OutOfMemory where processes were
        ended because memory ran out.
        """

        def begin(lease: Lease) -> dict[str, Any]:
            self._lease = lease
            with alone or nullcontext():
                return self._timed(lambda: work(lease))  # inside, so that the journal records what is raised

        wait_s = self._timeout_s + self._grace_s + 60 + (self._run.engines_wait_s if alone else 0.0)
        with self._watching():
            return self._run.journal.once(self._key, begin, owner=stage_owner(), wait_s=wait_s)

    def watch(self, work: Callable[[], T], *, alone: AbstractContextManager[Any] | None = None) -> T:
        """Does and watches work that is no stage; takes and raises what `once` does."""
        with self._watching(), alone or nullcontext():
            return self._timed(work)

    def describe(self) -> str:
        """What the stage waits for now."""
        waits = " > ".join(wait if isinstance(wait, str) else wait() for wait in list(self._waits))
        return ", ".join(part for part in (self._progress, f"waits for {waits}" if waits else "") if part) or "at work"

    def _timed(self, work: Callable[[], T]) -> T:
        self._began, self._is_timed = time.monotonic(), True
        try:
            return work()
        except BaseException as error:
            cause = self._cause_of(error)
            if cause is error:
                raise
            raise cause from error

    @contextmanager
    def _watching(self) -> Iterator[None]:
        key = self._key
        fields = {"run": key.run_id, "iteration": key.iteration, "stage": key.stage, "model_group": key.model_group}
        with bound(**fields), collected(self._waits), self._interrupting():
            yield

    @contextmanager
    def _interrupting(self) -> Iterator[None]:
        is_main = self._thread is threading.main_thread()
        before = signal.signal(SIGNAL, self._on_signal) if is_main else None
        context = contextvars.copy_context()  # so that its lines say which stage they are of
        watch = threading.Thread(target=context.run, args=(self._watch,), daemon=True, name=f"watchdog {self._key}")
        watch.start()
        try:
            yield
        except GivenUp:  # outside the work: while its end was recorded
            raise self._fault or StageHung(f"{self._key}: given up") from None
        finally:
            # What was sent and has not been raised yet is raised here, also while the lock is awaited, and not in the thread's next work.
            with suppress(GivenUp), self._lock:
                self._is_over.set()
                if self._is_interrupted:
                    interrupt_thread(self._thread, GivenUp)
            self._is_over.set()
            if is_main:
                signal.signal(SIGNAL, before or signal.SIG_DFL)

    def _watch(self) -> None:
        """Watches the stage until it ends; runs in a thread of its own."""
        logged_at = answered_at = time.monotonic()
        while not self._is_over.wait(min(1.0, self._log_interval_s)):
            away_s = time.monotonic() - answered_at
            if away_s > head_timeout_s() / 10 and _cluster_answers():
                answered_at = time.monotonic()
            elif away_s > head_timeout_s():
                self._end(ClusterLost(f"{self._key}: the head of the Ray cluster is gone; {self.describe()}"))
                return
            if self._is_timed and self._elapsed() > self._timeout_s:
                self._end(self._hung(f"not done after {self._timeout_s:g} s ({self._timeout_key})"))
                return
            if time.monotonic() - logged_at < self._log_interval_s:
                continue
            logged_at = time.monotonic()
            logger.info("%s: %.0f s, %s", self._key, self._elapsed(), self.describe())
            deaths = self._memory_deaths()
            if len(deaths) > self._num_memory_deaths:
                self._num_memory_deaths = len(deaths)
                last = deaths[-1].splitlines()[0]
                logger.warning("%s: %d processes were ended because memory ran out: %s", self._key, len(deaths), last)
            if len(deaths) >= MAX_MEMORY_DEATHS:
                self._end(OutOfMemory(deaths[-1]))
                return

    def _memory_deaths(self) -> list[str]:
        """`cluster.memory_deaths` of this stage's processes, none where this process is connected to no cluster."""
        if not _is_connected():
            return []
        deaths: list[str] = []
        run_id, within_s = self._key.run_id, self._elapsed()
        stage = self._key.stage if self._run.config.loop.max_lag else ""
        _bounded(lambda: deaths.extend(memory_deaths(run_id, within_s, stage=stage)), ANSWER_TIMEOUT_S)
        return deaths

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _hung(self, why: str) -> StageHung:
        """The error, after the stacks were written."""
        what = self.describe()
        path = self._dump_stacks(why, what)
        return StageHung(f"{self._key}: {why}; {what}; stacks of its processes: {path}")

    def _dump_stacks(self, why: str, what: str) -> Path:
        group = f"-{self._key.model_group}" if self._key.model_group else ""
        path = stacks_file(self._run.folder, f"{self._key.stage}-{self._key.iteration}{group}")
        _bounded(lambda: write_stacks(path, title=f"{self._key}: {why}; {what}"), STACKS_TIMEOUT_S)
        return path

    def _end_what_hangs(self) -> None:
        _bounded(self._recover, ANSWER_TIMEOUT_S)

    def _cause_of(self, error: BaseException) -> BaseException:
        """The error that is raised in place of one of the work: why the watchdog ended it, or its cause."""
        if self._fault is not None:
            return self._fault
        if isinstance(error, TimeoutError):
            hung = self._hung(str(error))
            self._end_what_hangs()
            return hung
        if isinstance(error, Exception) and not isinstance(error, ValueError):
            deaths = self._memory_deaths()
            return OutOfMemory(deaths[-1]) if deaths else error
        return error

    def _end(self, fault: Exception) -> None:
        """Interrupts the stage; where that has no effect, ends the process."""
        self._fault = fault
        lease = self._lease
        if not isinstance(fault, ClusterLost):
            self._end_what_hangs()
        with self._lock:
            if self._is_over.is_set():
                return
            if self._thread is threading.main_thread():
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
            else:
                self._is_interrupted = True
                interrupt_thread(self._thread, GivenUp)
        grace_s = self._grace_s
        if isinstance(fault, ClusterLost):  # before Ray ends the process with its own exit code
            grace_s = min(grace_s, head_timeout_s() / 4)
        if self._is_over.wait(grace_s):
            return
        message = f"{fault}; it did not react to an interrupt for {grace_s:g} s: this process ends"
        if lease is not None:
            # The database may be what hangs; a dead owner's lease is free anyway.
            _bounded(lambda: self._run.journal.fail(lease, message), ANSWER_TIMEOUT_S)
        with self._lock:  # without which the stage cannot end
            if self._is_over.is_set():
                return
            print(f"troupe: {message}", file=sys.stderr, flush=True)
            end_process(diagnose(fault).exit_code)

    def _on_signal(self, *_: Any) -> None:
        if not self._is_over.is_set():
            raise GivenUp


def stacks_file(folder: str, name: str) -> Path:
    """`<folder>/stacks/<name>-<time>.txt`; where `folder` is a URI, below the folder for temporary files."""
    root = Path(tempfile.gettempdir()) / f"troupe-{os.getuid()}" if "://" in folder else Path(folder)
    return root / "stacks" / f"{name}-{time.strftime('%Y%m%dT%H%M%S')}.txt"


def write_stacks(path: Path, *, title: str) -> None:
    """Writes what this process is doing, and what extensions know of the other processes of its stage."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.write(f"{title}\n\n== this process, {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        faulthandler.dump_traceback(file=file, all_threads=True)
    ask("stacks", path)


def end_process(code: int) -> None:
    """Ends this process and what it started, a local Ray head included, without another line of Python."""
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    sys.stderr.flush()
    os._exit(code)


def interrupt_thread(thread: threading.Thread, error: type[BaseException]) -> None:
    """Has `thread` raise `error` when it next runs Python."""
    # Never take it back by None: Python 3.11 would note for good that something is to be raised, and with that note no thread that is
    # traced (a debugger, coverage, cProfile, hypothesis) gets past the beginning of a function.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))


def head_timeout_s() -> float:
    """How long a head may be away: it may come back, and Ray ends this process itself somewhat later."""
    return float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60")) * 2 / 3  # noqa: SIM112 - Ray's spelling


def _cluster_answers() -> bool:
    """`cluster.is_answering`, True where this process is connected to no cluster."""
    return not _is_connected() or is_answering()


def _is_connected() -> bool:
    # The stage's thread may be in the middle of `import ray`: the module is there then, and its functions are not.
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def _bounded(work: Callable[[], Any], timeout_s: float) -> None:
    """Does `work` in a thread of its own and leaves it there after `timeout_s`."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=timeout_s)

"""workers: an environment -> processes that hold its worlds, each with a thread that writes requests and reads answers.

    World ── slot ──> WorldWorkers ──> the worker with the fewest worlds ── lines of JSON ──> world_worker.py

A worker that hangs, dies, says nothing that can be read, or grows beyond its limit is killed with all its worlds, and the next
world starts another one. The workers end with this process, since their standard input does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from serve_apps.authoring.agent import AuthorError, ToolFault, ToolRaised
from serve_apps.authoring.environment import Environment
from serve_apps.episode_clock import EpisodeClock, current_clock
from serve_apps.process_log import ProcessLog
from stores.types import Cause

logger = logging.getLogger(__name__)

SCRIPT = Path(__file__).with_name("world_worker.py")
CHECK_S = 1.0
"""Between two looks at a worker's memory."""
CLOSE_S = 10.0
WAIT_S = 0.02
"""Between two looks for a free worker."""
MAX_ANSWER = 32 * 2**20
"""Bytes of one answer."""


class WorldWorker:
    """A worker process, started with its first world and again after it was lost. It may be asked from any event loop."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="world-worker")
        self._process: subprocess.Popen[bytes] | None = None
        self._log = ProcessLog()
        self._rest = b""
        """Bytes of answers that were read and not taken yet."""
        self._checked_at = 0.0
        self.num_worlds = 0
        self._killing = threading.Lock()
        self.life = 0
        """How often the process was started: worlds of an earlier life are lost."""

    @property
    def pid(self) -> int | None:
        """The process that runs now."""
        return None if self._process is None else self._process.pid

    async def begin(self, world: int, settings: Mapping[str, Any]) -> tuple[int, Any]:
        """Begins a world; returns the worker's life and what the world shows.

        Raises AuthorError where the class cannot be imported or refuses its settings, and ToolFault where the worker fails.
        """
        return await self._in_thread(self._begin, world, dict(settings))

    async def step(self, world: int, life: int, action: str) -> Any:
        """Returns what the world shows after an action.

        Raises ToolRaised where the world does, AuthorError where its answer is none, ToolFault where the worker fails or has
        lost the world.
        """
        return await self._in_thread(self._step, world, life, action)

    def close(self, world: int) -> None:
        """Closes a world, without waiting; one that is about to begin, too. A worker that does not do it is killed."""
        with suppress(RuntimeError):  # its thread has ended, and so has the worker
            self._thread.submit(self._close, world)

    def end(self) -> None:
        """Ends the process, its children and the thread."""
        self._kill()
        self._thread.shutdown(wait=False)
        self._log.close()

    async def _in_thread(self, work: Any, *arguments: Any) -> Any:
        # A caller that gives up does not stop an exchange that has begun: its answer is read, and nobody gets it.
        loop, clock, place = asyncio.get_running_loop(), current_clock(), object()

        def begun() -> Any:
            if clock is not None:
                with suppress(RuntimeError):  # the loop of a caller that gave up may be closed
                    loop.call_soon_threadsafe(clock.has_begun, place)
            return work(*arguments)

        with _in_line(clock, place):
            return await loop.run_in_executor(self._thread, begun)

    def _begin(self, world: int, settings: dict[str, Any]) -> tuple[int, Any]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            answer = self._exchange(
                {"world": world, "verb": "reset", "argument": settings}, self._environment.reset_timeout_s
            )
        except ToolRaised as raised:
            # Whatever a model wrote, a world begins with its settings.
            raise AuthorError(f"the world {self._environment.name} does not begin with {settings}: {raised}") from None
        return self.life, answer

    def _step(self, world: int, life: int, action: str) -> Any:
        self._check_life(life)
        return self._exchange({"world": world, "verb": "step", "argument": action}, self._environment.step_timeout_s)

    def _close(self, world: int) -> None:
        if self._process is not None:
            with suppress(ToolFault, ToolRaised):
                self._exchange({"world": world, "verb": "close"}, CLOSE_S)

    def _check_life(self, life: int) -> None:
        if life != self.life or self._process is None:
            raise ToolFault(
                f"the world {self._environment.name} was lost with its worker, in the step of another world"
            )

    def _start(self) -> None:
        self._kill()
        kind = self._environment
        # Troupe's own interpreter finds what this process finds; another one has modules of its own.
        paths = [*kind.paths, *(() if kind.python else filter(None, sys.path))]
        command = [kind.python or sys.executable, str(SCRIPT), kind.factory, *paths]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log.file,
                start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        except OSError as error:
            raise AuthorError(f"the interpreter of the world {kind.name} does not start: {error}") from None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._rest = b""
        self.life += 1
        hello = self._answer(kind.reset_timeout_s, "its start")
        if "broken" in hello:
            self._kill()
            raise AuthorError(f"the world {kind.name} cannot be imported by {command[0]}:\n{hello['broken']}")

    def _exchange(self, request: Mapping[str, Any], timeout_s: float) -> Any:
        """Returns the answer to one request.

        Raises ToolFault as `_answer` and where the world says so, ToolRaised for what it raised, and AuthorError for an answer that is no JSON.
        """
        stdin = self._running().stdin
        assert stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it is gone or closed: then no answer comes, and that says why
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        answer = self._answer(timeout_s, request["verb"])
        if "failed" in answer:
            raise ToolFault(answer["failed"])
        if "raised" in answer:
            raise ToolRaised(answer["raised"])
        if "invalid" in answer:
            raise AuthorError(
                f"the world {self._environment.name} returned what is no JSON in {request['verb']}: {answer['invalid']}"
            )
        return answer["answer"]

    def _answer(self, timeout_s: float, verb: str) -> Mapping[str, Any]:
        """Returns the next line; kills the worker and raises ToolFault where none comes in time, or it grows too large.

        A step that comes too late is ToolRaised where the environment says that this is its policy's fault.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0:
                is_policys = verb == "step" and self._environment.timeout_cause == Cause.POLICY
                lost = self._lost(f"gave no answer to {verb} within {timeout_s:g} s")
                raise ToolRaised(str(lost)) if is_policys else lost
            if len(self._rest) > MAX_ANSWER:
                raise self._lost(f"answered {verb} with more than {MAX_ANSWER >> 20} MiB")
            if (more := self._read(min(left, CHECK_S))) is not None:
                if not more:
                    raise self._lost(f"ended in {verb}")
                self._rest += more
            self._check_memory()
        line, _, self._rest = self._rest.partition(b"\n")
        answer: Mapping[str, Any] = json.loads(line)
        return answer

    def _read(self, timeout_s: float) -> bytes | None:
        """Returns the next bytes of the worker, nothing at its end, and None where none came in time."""
        stdout = self._running().stdout
        assert stdout is not None
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(stdout, selectors.EVENT_READ)
                if not selector.select(timeout_s):
                    return None
            return os.read(stdout.fileno(), 2**20)
        except ValueError:  # it was closed meanwhile
            return b""

    def _check_memory(self) -> None:
        if time.monotonic() < self._checked_at + CHECK_S:
            return
        self._checked_at = time.monotonic()
        self._log.shorten()
        mib = 0
        pid = self._running().pid
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            mib = sum(_rss(p) for p in (process, *process.children(recursive=True))) >> 20
        if mib > self._environment.memory_mib:
            raise self._lost(f"took {mib} MiB of memory, more than memory_mib = {self._environment.memory_mib}")

    def _lost(self, why: str) -> ToolFault:
        """Kills the worker and returns the fault."""
        fault = f"the worker of the world {self._environment.name} {why}{self._log.tail()}"
        logger.warning("%s; its %d worlds are lost", fault, self.num_worlds)
        self._kill()
        return ToolFault(fault)

    def _kill(self) -> None:
        with self._killing:  # whoever ends the worker may meet its thread, which finds it dead
            process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for stream in (process.stdin, process.stdout):
            with suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]
        process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        """Returns the process; ToolFault where it was ended meanwhile."""
        if (process := self._process) is None:
            raise ToolFault(f"the worker of the world {self._environment.name} was ended")
        return process


class WorkerSession:
    """One world in a worker."""

    def __init__(self, worker: WorldWorker, world: int) -> None:
        self._worker, self._world, self._life = worker, world, 0

    async def reset(self, settings: Mapping[str, Any]) -> Any:
        """Begins the world, see `WorldWorker.begin`."""
        self._life, answer = await self._worker.begin(self._world, settings)
        return answer

    async def step(self, action: str) -> Any:
        """Returns what the world shows after an action, see `WorldWorker.step`."""
        return await self._worker.step(self._world, self._life, action)

    def close(self) -> None:
        """Closes the world, without waiting."""
        self._worker.close(self._world)


class WorldWorkers:
    """The workers of an environment in this process."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.workers = [WorldWorker(environment) for _ in range(environment.workers)]
        self._numbers = count()
        self._lock = threading.Lock()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[WorkerSession]:
        """Gives a world in the worker with the fewest worlds; waits for a free one where they are isolated."""
        if (worker := self._take()) is None:
            with _in_line(current_clock(), object()):
                while (worker := self._take()) is None:
                    await asyncio.sleep(WAIT_S)
        session = WorkerSession(worker, next(self._numbers))
        try:
            yield session
        finally:
            session.close()
            with self._lock:
                worker.num_worlds -= 1

    def _take(self) -> WorldWorker | None:
        with self._lock:
            worker = min(self.workers, key=lambda one: one.num_worlds)
            if self._environment.is_isolated and worker.num_worlds:
                return None
            worker.num_worlds += 1
            return worker

    def end(self) -> None:
        """Ends all processes, with what they have started."""
        for worker in self.workers:
            worker.end()


@contextmanager
def _in_line(clock: EpisodeClock | None, place: object) -> Iterator[None]:
    """Stops an episode's clock while it stands in line behind the worlds of others, until `has_begun` or the end of the block."""
    if clock is not None:
        clock.starts_waiting(place)
    try:
        yield
    finally:
        if clock is not None:
            clock.has_begun(place)


@cache
def workers_of(environment: Environment) -> WorldWorkers:
    """Returns the workers that all episodes of this process share. They end with it."""
    return WorldWorkers(environment)


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0

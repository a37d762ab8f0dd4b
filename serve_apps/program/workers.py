"""workers: processes that play one episode at a time and stay for the next: imports are paid once, and a deadline ends a process.

    episode {"id", "prompt", "task_id", "task", "base_url", "api_key", "agents"} ──> a line of standard input
    {"id", "answer", "score", "metadata"} or {"id", "error"}                      <── a line of standard output

There are as many processes as episodes at a time. They outlive the workflow object that asked for them: each stage builds it anew. One
whose episode is given up is killed, one that waits for `IDLE_S` is ended, and all end with their standard input, also where the process
that started them was killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from serve_apps.program.process import MAX_OUTPUT, TAIL, ProgramError, ended, started

IDLE_S = 60.0


@dataclass(eq=False, kw_only=True)
class Worker:
    """One process and the end of its standard error."""

    process: asyncio.subprocess.Process
    errors: deque[bytes] = field(default_factory=lambda: deque(maxlen=64))
    reading: asyncio.Task[None] | None = None
    retiring: asyncio.TimerHandle | None = None

    @property
    def error_tail(self) -> str:
        """The end of what it wrote to standard error."""
        return b"".join(self.errors).decode(errors="replace")[-TAIL:].strip()

    async def read_errors(self) -> None:
        """Keeps the end of standard error until it closes."""
        assert self.process.stderr is not None, "`Workers` opens it"
        while block := await self.process.stderr.read(4096):
            self.errors.append(block)

    def kill(self) -> None:
        """Ends the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Workers:
    """The processes of one command. It lives in one event loop."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], folder: str | None) -> None:
        """Starts nothing yet. Args: environment: all variables that they get, beside PATH and HOME."""
        self._command, self._environment, self._folder = list(command), dict(environment), folder
        self._idle: list[Worker] = []

    async def play(self, episode: Mapping[str, Any]) -> dict[str, Any]:
        """Plays one episode; cancelling kills its process. ProgramError where it did not answer, or not by a JSON object."""
        worker = self._idle_worker() or await self._start()
        if worker.retiring is not None:
            worker.retiring.cancel()
        worker.errors.clear()
        is_whole = False
        try:
            reply = await self._ask(worker, episode)
            is_whole = True
        finally:
            if is_whole:
                worker.retiring = asyncio.get_running_loop().call_later(IDLE_S, self._retire, worker)
                self._idle.append(worker)
            else:
                worker.kill()
        if reply.get("error") is not None:
            raise ProgramError(str(reply["error"]))
        return reply

    def _idle_worker(self) -> Worker | None:
        """Returns a process that waits for an episode; None where there is none, or all have ended meanwhile."""
        while self._idle:
            worker = self._idle.pop()
            assert worker.process.stdout is not None, "`_start` opens it"
            if worker.process.returncode is None and not worker.process.stdout.at_eof():
                return worker
            worker.kill()
        return None

    async def _start(self) -> Worker:
        process = await started(self._command, environment=self._environment, folder=self._folder)
        worker = Worker(process=process)
        worker.reading = asyncio.ensure_future(worker.read_errors())
        return worker

    async def _ask(self, worker: Worker, episode: Mapping[str, Any]) -> dict[str, Any]:
        process = worker.process
        assert process.stdin is not None and process.stdout is not None, "`_start` opens them"
        with suppress(BrokenPipeError, ConnectionResetError):  # its answer, which is none, says more
            process.stdin.write(json.dumps(episode).encode() + b"\n")
            await process.stdin.drain()
        try:
            line = await process.stdout.readline()
        except ValueError:
            raise ProgramError(f"the program wrote a line of more than {MAX_OUTPUT} bytes") from None
        if not line.endswith(b"\n"):
            code = await ended(process)
            if worker.reading is not None:  # what its children hold open is not waited for
                await asyncio.wait({worker.reading}, timeout=1)
            raise ProgramError(
                f"the program ended with exit code {code} instead of an answer; "
                f"{worker.error_tail or 'nothing on standard error'}"
            )
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError):
            reply = None
        if not isinstance(reply, dict) or reply.get("id") != episode["id"]:
            raise ProgramError(
                f"the program wrote {line[:80]!r}: a line of its standard output is the JSON object of an answer, with the id "
                "of its episode; print everything else to standard error"
            )
        return reply

    def _retire(self, worker: Worker) -> None:
        if worker in self._idle:
            self._idle.remove(worker)
            worker.kill()


_workers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Workers]] = WeakKeyDictionary()


def workers_of_loop(
    command: Sequence[str], *, environment: Mapping[str, str], folder: str | None, identity: str
) -> Workers:
    """Returns the processes of a command in this event loop, the same ones at every call.

    Args: identity: of the program's source: a program that was changed has processes of its own.
    """
    key = json.dumps([*command, sorted(environment.items()), folder, identity])
    of_loop = _workers.setdefault(asyncio.get_running_loop(), {})
    if key not in of_loop:
        of_loop[key] = Workers(command, environment=environment, folder=folder)
    return of_loop[key]

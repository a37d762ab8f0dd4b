"""process: a command, its environment -> its output and exit code. All that it started ends with it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

MAX_OUTPUT = 1_000_000
"""The number of bytes of output that are kept, the last ones: there stand the answer, and what a program failed with."""
END_S = 5.0
"""Seconds that a killed program may take to end."""
LOOK_S = 0.2
"""Seconds between two looks at whether a program has ended."""
REST_LOOKS = 5
"""Looks at a program that has ended in which the rest of its output is read, where another process holds that open."""
TAIL = 2_000
"""The number of characters of standard error that an error quotes."""


class ProgramError(Exception):
    """Raised where the program failed by itself; the message holds the end of its standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Describes a program that has ended."""

    exit_code: int
    output: str
    error_tail: str


def inherited() -> dict[str, str]:
    """Returns the variables that every program gets."""
    return {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}


async def started(
    command: Sequence[str], *, environment: Mapping[str, str], folder: str | None = None, has_stdin: bool = True
) -> asyncio.subprocess.Process:
    """Starts a command in a process group of its own, with pipes. ProgramError where it does not start.

    Args: environment: all variables that it gets, beside PATH and HOME.
    """
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            env=inherited() | dict(environment),
            cwd=folder,
            stdin=asyncio.subprocess.PIPE if has_stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_OUTPUT,
            start_new_session=True,
        )
    except OSError as error:
        where = f"{command[0]!r} did not start"
        if folder is not None and error.filename == folder:
            where = f"{command[0]!r} did not start in the folder {folder!r}"
        raise ProgramError(f"{where}: {error.strerror or error}") from None


async def run_process(
    command: Sequence[str], *, environment: Mapping[str, str], stdin: str | None, folder: str | None
) -> Ended:
    """Runs a command to its end; cancelling kills it and its process group. ProgramError where it does not start.

    Args: environment: all variables that it gets, beside PATH and HOME.
    """
    process = await started(command, environment=environment, folder=folder, has_stdin=stdin is not None)
    assert process.stdout is not None and process.stderr is not None
    output, errors = deque[bytes](), deque[bytes]()
    reading = asyncio.gather(_read(process.stdout, output), _read(process.stderr, errors), _feed(process, stdin))
    ending = asyncio.ensure_future(_end_leftovers(process))
    either: set[asyncio.Future[Any]] = {reading, ending}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()
        exit_code = await ended(process)
    finally:
        reading.cancel()
        ending.cancel()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(TimeoutError):
            await asyncio.wait_for(ended(process), timeout=END_S)
        await asyncio.gather(reading, ending, return_exceptions=True)
    return Ended(exit_code=exit_code, output=_text(output), error_tail=_text(errors)[-TAIL:])


async def ended(process: asyncio.subprocess.Process) -> int:
    """Returns the exit code of a process when it has ended: `wait` would wait for its output, too, which its children may hold open."""
    while process.returncode is None:
        await asyncio.sleep(LOOK_S)
    return process.returncode


async def _end_leftovers(process: asyncio.subprocess.Process) -> None:
    """Kills what a program left running when it ended, and waits until what it wrote is read.

    A process that left the group stays, and holds the output open as long as it likes: that is not waited for.
    """
    await ended(process)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for _ in range(REST_LOOKS):  # not one long look: an event loop that stood still meanwhile has read nothing in it
        await asyncio.sleep(LOOK_S)


async def _read(stream: asyncio.StreamReader, kept: deque[bytes]) -> None:
    """Reads to the end, and keeps the blocks in which the last `MAX_OUTPUT` bytes stand."""
    size = 0
    while block := await stream.read(65_536):
        kept.append(block)
        size += len(block)
        while size - len(kept[0]) >= MAX_OUTPUT:
            size -= len(kept.popleft())


def _text(kept: deque[bytes]) -> str:
    return b"".join(kept)[-MAX_OUTPUT:].decode(errors="replace")


async def _feed(process: asyncio.subprocess.Process, text: str | None) -> None:
    if text is None or process.stdin is None:
        return
    with suppress(BrokenPipeError, ConnectionResetError):  # it may end without having read
        process.stdin.write(text.encode())
        await process.stdin.drain()
    process.stdin.close()

"""process: a command, its environment -> its output and exit code. All that it started ends with it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

MAX_OUTPUT = 1_000_000
"""The number of bytes of output that are kept; further output is read and dropped."""
END_S = 5.0
"""Seconds that a killed program may take to end."""
LOOK_S = 0.5
"""Seconds between two looks at whether a program has ended."""
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
        raise ProgramError(f"{command[0]!r} did not start: {error.strerror or error}") from None


async def run_process(
    command: Sequence[str], *, environment: Mapping[str, str], stdin: str | None, folder: str | None
) -> Ended:
    """Runs a command to its end; cancelling kills it and its process group. ProgramError where it does not start.

    Args: environment: all variables that it gets, beside PATH and HOME.
    """
    process = await started(command, environment=environment, folder=folder, has_stdin=stdin is not None)
    assert process.stdout is not None and process.stderr is not None
    leftovers = asyncio.create_task(_end_leftovers(process))
    try:
        output, errors, _ = await asyncio.gather(
            _read(process.stdout, MAX_OUTPUT), _read(process.stderr, MAX_OUTPUT), _feed(process, stdin)
        )
        exit_code = await process.wait()
    finally:
        leftovers.cancel()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process that left the group may hold the output open, for which `wait` waits as well.
        with suppress(ProcessLookupError, TimeoutError):
            await asyncio.wait_for(process.wait(), timeout=END_S)
    return Ended(exit_code=exit_code, output=output, error_tail=errors[-TAIL:])


async def _end_leftovers(process: asyncio.subprocess.Process) -> None:
    """Kills what a program left running when it ended: that may hold the output open, whose end is waited for."""
    while process.returncode is None:  # `wait` would wait for the output, too
        await asyncio.sleep(LOOK_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def _read(stream: asyncio.StreamReader, limit: int) -> str:
    """Returns the first `limit` bytes as text, and reads the rest."""
    blocks, size = [], 0
    while block := await stream.read(65_536):
        if size < limit:
            blocks.append(block[: limit - size])
            size += len(blocks[-1])
    return b"".join(blocks).decode(errors="replace")


async def _feed(process: asyncio.subprocess.Process, text: str | None) -> None:
    if text is None or process.stdin is None:
        return
    with suppress(BrokenPipeError, ConnectionResetError):  # it may end without having read
        process.stdin.write(text.encode())
        await process.stdin.drain()
    process.stdin.close()

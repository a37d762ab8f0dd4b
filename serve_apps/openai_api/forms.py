"""forms: what a request says its answer must look like -> the text of its constraint, made and tried in another process.

    event loop ──> a thread that waits ──> form process: vLLM's parsers make the form ──> a fork of it compiles the form, and is killed
                                           after TRIAL_CPU_S of processor or TRIAL_BYTES of memory

An engine compiles a form in the process that answers everybody, and has no limit of time for most of them: a schema of four lines can take
years. Whoever sends one gets status 400, and no engine sees it. What a form turned out to be is remembered.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from typing import Any

from serve_apps.openai_api.protocol import ApiError

MAX_CHARACTERS = 200_000
"""Characters of a form with all tools that may be called."""
MAX_WAITING = 32
"""Forms that wait to be tried; a known one does not wait."""
MAX_REMEMBERED = 256
ANSWER_S = 120.0
"""Seconds in which the form process must answer: the first form waits for it to start, and imports take seconds."""


class FormProcess:
    """The form process of this process, and what it said. It starts with the first form; `ask` may be called from any thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forms")
        self._num_waiting = 0
        atexit.register(self.close)

    async def constraint(self, asked: Mapping[str, Any]) -> str:
        """Returns the constraint that is asked for, see `form_process.constraint_for`; ApiError 400 where an engine should not see it."""
        line = json.dumps(asked)
        if len(line) > MAX_CHARACTERS:
            raise _refusal(
                f"the form and its tools have {len(line)} characters, and at most {MAX_CHARACTERS} are accepted"
            )
        key = sha256(line.encode()).hexdigest()
        answer = self._known.get(key)
        if answer is None:
            answer = await self._asked_in_turn(line)
            self._known[key] = answer
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        if "error" in answer:
            raise ApiError(400, answer["error"], code=answer["code"], param=answer["param"])
        return str(answer["constraint"])

    async def _asked_in_turn(self, line: str) -> Mapping[str, Any]:
        if self._num_waiting >= MAX_WAITING:
            raise ApiError(429, "too many forms are being tried: try again later", code="overloaded", retry_after_s=2)
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self.ask, line)
        finally:
            self._num_waiting -= 1

    def ask(self, line: str) -> Mapping[str, Any]:
        """Returns what the process says of a form; ApiError 400 where it says nothing, and then it is killed."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = _started()
            answered = _answer(self._process, line)
            if answered is None:
                self.close()
                raise _refusal(f"the form could not be made within {ANSWER_S:g} s")
            return answered

    def close(self) -> None:
        """Ends the process; the next form starts another one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@cache
def form_process() -> FormProcess:
    """Returns the one that all requests of this process share."""
    return FormProcess()


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value")


def _started() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "serve_apps.openai_api.form_process"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _answer(process: subprocess.Popen[bytes], line: str) -> Mapping[str, Any] | None:
    """Returns the next line of a process; None where none comes in time, or it has ended."""
    assert process.stdin is not None and process.stdout is not None, "`_started` opens both"
    try:
        process.stdin.write(line.encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(ANSWER_S):
            return None
    got = process.stdout.readline()
    answer: Mapping[str, Any] | None = json.loads(got) if got else None
    return answer

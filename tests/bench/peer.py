"""peer: a program that answers one JSON line per JSON line, and the handle of whoever asks it.

A peer runs in a process (or environment) of its own, is started once, and waits idle while Troupe's turn is measured.
Large inputs pass through files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MARK = "@@peer "
"""Begins the lines that are answers; everything else that a peer prints is passed on."""


class Peer:
    """A running peer; use as a context manager."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        """Starts it without waiting; the first `ask` waits until it is ready."""
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | dict(env or {}),
        )

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one question; RuntimeError if the peer ends instead."""
        self.send(question)
        return self.read()

    def send(self, question: Mapping[str, Any]) -> None:
        """One question, without waiting."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: `read` says so, after what it printed

    def read(self) -> dict[str, Any]:
        """The next answer; RuntimeError if the peer ends instead."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
            print(line, end="", flush=True)
        raise RuntimeError(f"peer {self._process.args} ended with code {self._process.wait()}: see its output above")

    def close(self) -> None:
        """Ends its input and waits until it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def answer_questions(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A peer's main loop: until its input ends."""
    for line in sys.stdin:
        print(MARK + json.dumps(answer(json.loads(line))), flush=True)

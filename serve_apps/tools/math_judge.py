"""math_judge: two texts in LaTeX -> whether math-verify finds that they state the same value.

It runs in a child process, because a deadline must hold in any thread and against code that no signal handler can interrupt
(`9^{9^{9^9}}` is one C call): a timer of the child kills it. The timer counts the child's own processor time: on a busy machine a
right answer takes seconds more, and is right all the same.

Run as a script, this file is that child: one JSON request per line in, one verdict per line out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

DEADLINE_S = 5
"""Seconds of processor time that math-verify may take for one pair of answers."""
_START_DEADLINE_S = 120
_MEMORY_BYTES = 4 << 30


class MathJudge:
    """Owns the child process: it is started when first needed, and replaced when it dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._owner_pid = 0

    def is_same(self, stated: str, reference: str) -> bool:
        """Returns math-verify's verdict; False where the child died of its deadline, or twice of anything else.

        Raises RuntimeError if math-verify cannot be started.
        """
        with self._lock:
            for _ in range(2):
                child = self._alive()
                assert child.stdin is not None and child.stdout is not None, "the child has pipes"
                try:
                    child.stdin.write(json.dumps([stated, reference]) + "\n")
                    child.stdin.flush()
                    line = child.stdout.readline()
                except BrokenPipeError:
                    line = ""
                except BaseException:  # Ctrl-C: a verdict that was not read would be taken for the next pair's
                    child.kill()
                    self._child = None
                    raise
                if line:
                    return line.strip() == "1"
                self._child = None
                if child.wait() == -signal.SIGPROF:
                    return False
            return False

    def _alive(self) -> subprocess.Popen[str]:
        """Returns the running child; a fork of this process starts its own."""
        if self._child is not None and self._owner_pid == os.getpid() and self._child.poll() is None:
            return self._child
        child = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent; the child ends when its stdin does
        )
        assert child.stdout is not None, "the child has pipes"
        if child.stdout.readline().strip() != "ready":
            raise RuntimeError(
                f"math-verify does not start (exit code {child.wait()}): try `{sys.executable} -c 'import math_verify'`"
            )
        self._child, self._owner_pid = child, os.getpid()
        return child


def _serve() -> None:
    """Runs as the child: writes verdicts until stdin ends.

    Alarm and timer keep their default action, so that the kernel enforces them.
    """
    import resource

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.alarm(_START_DEADLINE_S)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not a reply

    from latex2sympy2_extended import NormalizationConfig, normalize_latex
    from math_verify import verify
    from math_verify.parser import parse_latex_cached

    spelling = NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none", equations=False
    )

    def parsed(text: str) -> Any:
        """Returns the meaning of all of a text, or its spelling. `math_verify.parse` would go on with a part of it."""
        latex = normalize_latex(text, spelling)
        try:
            return parse_latex_cached(latex)
        except Exception:  # noqa: BLE001 - latex2sympy2 raises plain `Exception` for a syntax error: this is no formula
            return latex

    print("ready", file=replies, flush=True)
    signal.alarm(0)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, DEADLINE_S)
        stated, reference = json.loads(line)
        is_equal = verify(parsed(reference), parsed(stated), timeout_seconds=0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print("1" if is_equal else "0", file=replies, flush=True)


if __name__ == "__main__":
    _serve()

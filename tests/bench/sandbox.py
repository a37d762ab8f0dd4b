"""sandbox: what the walls around a judged program cost, beside a bare subprocess that runs the same program."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipelines.extensions.code_tasks.code_tests import Case, CodeTests
from pipelines.extensions.code_tasks.code_verifier import CodeVerifier
from serve_apps.extensions.sandbox import Sandbox
from serve_apps.extensions.sandbox.config import SandboxConfig
from tests.bench.figures import Figure, ratio

CODE = "print(sum(map(int, input().split())))"
NUM_TIMED, LANES = 40, 2


def measure(folder: Path) -> list[Figure]:
    """Alternating, so that both see the same machine."""
    judge = CodeVerifier(sandbox=Sandbox(SandboxConfig()))
    one, eight = _tests(1), _tests(8)
    _sandboxed(judge, one)
    bare, single, batch = [], [], []
    for _ in range(NUM_TIMED):
        bare.append(_timed(_bare))
        single.append(_timed(lambda: _sandboxed(judge, one)))
        batch.append(_timed(lambda: _sandboxed(judge, eight)) / 8)
    with ThreadPoolExecutor(LANES) as pool:
        bare_s = _timed(lambda: list(pool.map(lambda _: _bare(), range(4 * NUM_TIMED))))
        judged_s = _timed(lambda: list(pool.map(lambda _: _sandboxed(judge, eight), range(NUM_TIMED))))
    overhead = 1000 * (statistics.median(single) - statistics.median(bare))
    rates = 8 * NUM_TIMED / judged_s, 4 * NUM_TIMED / bare_s
    return [
        Figure("a program of one case", 1000 * statistics.median(single), "ms", note=judge.sandbox.wall),
        Figure("bare subprocess", 1000 * statistics.median(bare), "ms", note=f"median of {NUM_TIMED}"),
        Figure("overhead per case, one case", overhead, "ms", most=60),
        Figure("a case of eight", 1000 * statistics.median(batch), "ms", note="one sandbox, a child each"),
        Figure("cases/s, 8 per program", rates[0], "/s", note=f"{LANES} programs side by side"),
        Figure("bare subprocesses/s", rates[1], "/s", note=f"{LANES} side by side"),
        ratio("sandboxed / bare", *rates, least=None, note="cases per second"),
    ]


def _tests(count: int) -> CodeTests:
    return CodeTests(cases=tuple(Case(given=f"{i} 1", expected=str(i + 1)) for i in range(count)))


def _sandboxed(judge: CodeVerifier, tests: CodeTests) -> None:
    judged = judge.judge(CODE, tests, time_s=10)
    assert judged.verdict == "pass", judged


def _bare() -> None:
    done = subprocess.run([sys.executable, "-S", "-c", CODE], input="1 1", capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began

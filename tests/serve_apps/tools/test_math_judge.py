"""The child process that compares formulas, on a busy machine and where somebody stops it."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

import pytest

from serve_apps.tools.math_judge import DEADLINE_S, MathJudge

LIBRARIES = {
    "latex2sympy2_extended.py": "def NormalizationConfig(**_): ...\ndef normalize_latex(text, _): return text",
    "math_verify/__init__.py": "import time\ndef verify(a, b, timeout_seconds):\n    time.sleep(SECONDS)\n    return a == b",
    "math_verify/parser.py": "def parse_latex_cached(text): return text",
}


def slow_libraries(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Puts libraries in the place of math-verify's that wait, as on a machine whose processors are all busy."""
    (folder / "math_verify").mkdir()
    for name, text in LIBRARIES.items():
        (folder / name).write_text(text.replace("SECONDS", str(seconds)))
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.test
def test_a_right_answer_is_right_on_a_busy_machine_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_libraries(tmp_path, monkeypatch, DEADLINE_S + 1)
    assert MathJudge().is_same("x", "x")


@pytest.mark.test
def test_after_ctrl_c_no_verdict_is_taken_for_the_next_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the process goes on, and with it the child that has a verdict to give."""
    slow_libraries(tmp_path, monkeypatch, 1)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    judge, before = MathJudge(), signal.signal(signal.SIGALRM, interrupt)
    try:
        assert judge.is_same("x", "x")
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            judge.is_same("x", "x")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not judge.is_same("x", "y")

"""math_answer: an answer as a model wrote it, reference answers -> whether it is correct.

Numbers are compared here; everything else is judged by math-verify in a child process of its own, because a
deadline must hold in any thread and against code that no signal handler can interrupt (`9^{9^{9^9}}` is one C call).

    is_correct --- equal text, plain numbers ---------------------> verdict
         \\---- anything else --> child (math-verify, alarm, rlimit) --> verdict; killed by its alarm --> not correct

or, with `rules="strings"`, by the reference systems' own rules: numbers and spelling alone, for comparison with theirs.

Run as a script, this file is that child: one JSON request per line in, one verdict per line out.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from serve_apps.boxed import last_boxed

MAX_ANSWER_CHARS = 1000
"""The largest number of characters: a longer answer is not correct, unless it equals the reference."""
DEADLINE_S = 5
"""Seconds that math-verify may take for one pair of answers."""
_START_DEADLINE_S = 120
_MEMORY_BYTES = 4 << 30

_TAG = re.compile(r"<(/?)(?:FINAL_)?ANSWER>", re.IGNORECASE)
_ANNOUNCED = re.compile(r"answer\s*(?:is\b\s*:?|:)(.*)", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|[+-]?\.\d+")
_FRACTION = re.compile(r"([+-]?)(?:\\[dt]?frac\{([+-]?\d+)\}\{(\d+)\}|(\d+)\s*/\s*(\d+))")
_SCIENTIFIC = re.compile(r"(?:\\times|\\cdot|[*x×·])\s*10\s*\^\s*(?:\{[+-]?\d+\}|[+-]?\d+)")
_UNEVALUATED = re.compile(
    r"[\w)}\]]\s*(?:\+|-|\*|/|×|÷|·|\\times|\\cdot|\\div)\s*[\w(\\{]"  # infix
    r"|\^(?!\s*\{?\s*\\circ)|!|\\[dt]?frac|\\(?:sqrt|log|ln|exp|sin|cos|tan|sum|prod|int|binom|lfloor|lceil)\b"
)


def extract_answer(text: str) -> str:
    r"""The answer stated last: in answer tags, in `\boxed{}`, after "answer:" or "answer is"; else all of `text`."""
    tagged = _last_tagged(text)
    if tagged is not None:
        text = tagged
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    announced = _ANNOUNCED.findall(text)
    return (announced[-1] if announced and announced[-1].strip() else text).strip()


def is_correct(answer: str, references: Sequence[str], *, rules: Literal["verify", "strings"] = "verify") -> bool:
    """Returns whether `answer` means the same as any of `references`. Never raises on what a model wrote.

    Where the reference is a plain number only a number is right: an expression that has yet to be evaluated is not an answer.
    (math-verify alone takes `7+6*8` for 55, so that a model would learn to copy the question.) Against symbolic
    references math-verify's notion of equality holds. What it cannot judge within `DEADLINE_S` is not correct.

    With `rules="strings"`: equal numbers, fractions included, or the same spelling but for case, space and how LaTeX
    writes fractions, roots, text, degrees and large brackets (UnityMAS-O, arXiv 2605.26646).

    Raises RuntimeError only if math-verify itself cannot be started.
    """
    if rules == "strings":
        return _is_same_string(answer, references)
    return _is_correct(answer, tuple(references))


@lru_cache(maxsize=65536)
def _is_correct(answer: str, references: tuple[str, ...]) -> bool:
    stated = _clean(extract_answer(answer))
    return bool(stated) and any(_matches(stated, _clean(extract_answer(reference))) for reference in references)


def _last_tagged(text: str) -> str | None:
    last, start = None, -1
    for tag in _TAG.finditer(text):
        if not tag[1]:
            start = start if start >= 0 else tag.end()
        elif start >= 0:
            last, start = text[start : tag.start()], -1
    return last


def _is_same_string(answer: str, references: Sequence[str]) -> bool:
    stated = _canonical(extract_answer(answer))
    number = _plain_number(stated.replace(",", ""))
    for reference in references:
        expected = _canonical(extract_answer(reference))
        if stated and stated == expected:
            return True
        if number is not None and number == _plain_number(expected.replace(",", "")):
            return True
    return False


def _canonical(text: str) -> str:
    """Returns one spelling for `\\dfrac{X}{2}` and `x/2`, `\\sqrt2` and `\\sqrt{2}`, `90^\\circ` and `90`, `\\text{
    cm}` and `cm`."""
    text = _clean(text)
    if len(text) > MAX_ANSWER_CHARS:
        return text
    text = re.sub(r"\s|\^\s*\{?\s*\\circ\s*\}?|\^?\\degree|°", "", text)
    text = re.sub(r"\\[dtc]?frac", r"\\frac", text)
    text = re.sub(r"\\frac(\w)(\w)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    before = ""
    while text != before:  # from the innermost braces outwards
        before = text
        text = re.sub(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\{([^{}]*)\}", r"\1", text)
        text = re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", text)
        text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", lambda f: f"{_bracketed(f[1])}/{_bracketed(f[2])}", text)
    return text.casefold()


def _bracketed(part: str) -> str:
    return part if re.fullmatch(r"-?[\w.]+", part) else f"({part})"


def _clean(text: str) -> str:
    r"""Returns an answer without dollar signs, spacing commands and the full stop at its end."""
    text = re.sub(r"\\[$]|[$]|\\left\b|\\right\b|\\[!,;: ]", "", text).strip()
    return text.removesuffix(".").strip()


def _matches(stated: str, reference: str) -> bool:
    if stated == reference:
        return True
    if len(stated) > MAX_ANSWER_CHARS or not reference:
        return False
    expected = _plain_number(reference)
    if expected is None:
        return _JUDGE.verdict(stated, reference)
    value = stated.rpartition("=")[2].strip()
    number = _plain_number(value)
    if number is not None:
        is_division = not _NUMBER.fullmatch(value)
        return number == expected and not (is_division and expected.denominator == 1)
    if _UNEVALUATED.search(_SCIENTIFIC.sub("", value)):
        return False
    return any(c.isdigit() for c in value) and _JUDGE.verdict(value, reference)


def _plain_number(text: str) -> Fraction | None:
    """Returns the value of an integer, decimal or fraction of integers; None for anything else."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    sign, *parts = match.groups()
    numerator, denominator = (int(p) for p in parts if p is not None)
    return Fraction(numerator, denominator) * (-1 if sign == "-" else 1) if denominator else None


class _Judge:
    """Owns the child process that runs math-verify: it is started when first needed, and replaced when it dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._owner_pid = 0

    def verdict(self, stated: str, reference: str) -> bool:
        """Returns math-verify's verdict; False where the child died of its deadline, or twice of anything else."""
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
                if line:
                    return line.strip() == "1"
                self._child = None
                if child.wait() == -signal.SIGALRM:
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


_JUDGE = _Judge()


def _serve() -> None:
    """Runs as the child: writes verdicts until stdin ends.

    The alarm keeps its default action, so that the kernel enforces it.
    """
    import resource

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_START_DEADLINE_S)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not a reply

    from math_verify import parse, verify

    def parsed(text: str) -> Any:
        return parse(f"${text}$", parsing_timeout=0)

    print("ready", file=replies, flush=True)
    signal.alarm(0)
    for line in sys.stdin:
        signal.alarm(DEADLINE_S)
        stated, reference = json.loads(line)
        is_equal = verify(parsed(reference), parsed(stated), timeout_seconds=0)
        signal.alarm(0)
        print("1" if is_equal else "0", file=replies, flush=True)


if __name__ == "__main__":
    _serve()

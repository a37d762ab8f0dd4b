"""guards: episodes of candidate and champion on the same tasks -> what must not get worse, whatever the outcome gains.

A team that learns to please its credit rule often pays for it elsewhere: twice the tokens, more tools, empty answers. Each
guard is a figure per episode, averaged per task, and compared on the same tasks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipelines.config.figures import FIGURES
from pipelines.config.sections import GuardsConfig
from pipelines.evaluation.statistics import Families, Interval, Outcomes, paired_bootstrap, paired_ratio
from serve_apps.authoring.thinking import after_thinking
from serve_apps.tools.plain_signs import in_plain_signs
from stores.traces.conventions import num_world_calls, num_world_steps
from stores.types import Cause, Trace, families

REFUSAL = re.compile(
    r"""\A\W*sorry\b(?!\s+(?:for|about|to)\b) | \bas\s+an\s+ai\b
    | \bi\s+(?:(?:\w+ly|so|very|just)\s+)?(?:can(?:\s*no|'?)t|won'?t|will\s+not)\b(?!\s+(?:wait|only|stress|emphasi[sz]e|help\s+but)\b)
    | \bi(?:\s*'?|\s+a)m\s+(?:(?:\w+ly|so|very|just)\s+)?(?:not\s+able|unable|sorry(?!\s+(?:for|about|to)\b))\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""Beginnings of a refusal in English, of which an answer's first sentence is searched.

Who is sorry for a mistake, or cannot wait to tell, answers.
"""


VALUES: Mapping[str, Callable[[Trace], float]] = {
    "format_share": lambda t: _format_share(t),
    "refusal_share": lambda t: float(is_refusal(t.answer)),
    "completion_tokens": lambda t: _num_tokens(t),
    "turns": lambda t: float(len(t.turns)),
    "tool_calls": lambda t: float(len(t.tool_calls) - num_world_calls(t)),
    "world_steps": lambda t: float(num_world_steps(t)),
    "latency_s": lambda t: math.nan if t.cause is Cause.INFRASTRUCTURE else t.duration_s,
}
"""The figures of `promote.guards`: the value of one episode, NaN where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """The result of one guard."""

    name: str
    found: Interval
    """Candidate minus champion, or candidate over champion."""
    limit: float
    """The limit of the allowed change, in the same unit."""
    state: Literal["holds", "broken", "unclear"]
    """By the whole interval: on the right side of the limit, on the wrong one, or over it."""

    def __str__(self) -> str:
        """`completion_tokens x1.98 [1.91, 2.05], at most x1.50`."""
        bound = "at least" if FIGURES[self.name].worse == "lower" else "at most"
        if FIGURES[self.name].compared_by == "ratio":
            span = f"x{self.found.mean:.2f} [{self.found.low:.2f}, {self.found.high:.2f}]"
            return f"{self.name} {span}, {bound} x{self.limit:.2f}"
        span = f"{self.found.mean:+.3f} [{self.found.low:+.3f}, {self.found.high:+.3f}]"
        return f"{self.name} {span}, {bound} {self.limit:+.3f}"


def check_guards(
    candidate: Sequence[Trace],
    champion: Sequence[Trace],
    *,
    config: GuardsConfig,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[Guarded]:
    """Checks every guard that is set and of which both sides have a figure, on the tasks that both played."""
    results = []
    family_of = families(trace.task for trace in champion)
    for name, value in VALUES.items():
        margin = getattr(config, name)
        if margin is None:
            continue
        new, old = _by_task(candidate, value), _by_task(champion, value)
        both = [task for task in new if task in old]
        if not both:
            continue
        pair = {task: new[task] for task in both}, {task: old[task] for task in both}
        figure = FIGURES[name]
        interval = _compared(*pair, by=figure.compared_by, families=family_of, confidence=confidence, seed=seed)
        if interval is None:
            continue
        limit = 1 + margin if figure.compared_by == "ratio" else margin if figure.worse == "higher" else -margin
        results.append(
            Guarded(name=name, found=interval, limit=limit, state=_state(interval, limit, worse=figure.worse))
        )
    return results


def is_refusal(answer: str) -> bool:
    """Returns whether an answer is empty, or its first sentence declines, however its apostrophes and emphasis are typed.

    Thoughts are no part of an answer.
    """
    spoken = after_thinking(answer).strip()
    plain = re.sub(r"[*_#>]", " ", in_plain_signs(spoken).replace("`", "'")).strip()
    return not spoken or REFUSAL.search(re.split(r"(?<=[.!?])\s", plain, maxsplit=1)[0]) is not None


def _compared(
    new: Outcomes,
    old: Outcomes,
    *,
    by: Literal["difference", "ratio"],
    families: Families,
    confidence: float,
    seed: int,
) -> Interval | None:
    """Compares the two teams; None where there is nothing to divide by: the champion calls no tool."""
    compare = paired_ratio if by == "ratio" else paired_bootstrap
    return compare(new, old, families=families, confidence=confidence, seed=seed)


def _state(interval: Interval, limit: float, *, worse: str) -> Literal["holds", "broken", "unclear"]:
    low, high, limit = (
        (interval.low, interval.high, limit) if worse == "higher" else (-interval.high, -interval.low, -limit)
    )
    if high <= limit:
        return "holds"
    return "broken" if low > limit else "unclear"


def _by_task(traces: Sequence[Trace], value: Callable[[Trace], float]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for trace in traces:
        of_episode = value(trace)
        if not math.isnan(of_episode):
            values.setdefault(trace.task.task_id, []).append(of_episode)
    return values


def _format_share(trace: Trace) -> float:
    return sum(turn.is_format_ok for turn in trace.turns) / len(trace.turns) if trace.turns else math.nan


def _num_tokens(trace: Trace) -> float:
    return float(sum(len(turn.completion_token_ids) for turn in trace.turns))

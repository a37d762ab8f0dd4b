"""figures: answers of one team version -> counts, sums and squares, which can be added over replicas and subtracted over time.

They hold no text and no user: they are what a traffic decision needs, and nothing that a log must not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from stores.types import SOUND, Cause

NAMES = ("completion_tokens", "latency_s", "cut_share", "empty_share", "format_share", "failure_share")
"""Sampled tokens and seconds of an answer; whether it was cut off by a limit, was empty, had well-formed turns (workflows
only), or failed: because the engines did, or because of what a model wrote in the episode of a workflow."""

Sums = dict[str, list[float]]
"""By figure: [number of values, their sum, the sum of their squares]."""


class Tally:
    """Adds up the figures of one team version since the gateway replica started."""

    def __init__(self) -> None:
        self.sums: Sums = {name: [0, 0.0, 0.0] for name in NAMES}

    def add(self, values: Mapping[str, float]) -> None:
        """Adds the figures of one answer; an answer may lack some of them."""
        for name, value in values.items():
            sums = self.sums[name]
            sums[0] += 1
            sums[1] += value
            sums[2] += value * value

    def mean(self, name: str) -> float:
        """Returns the mean of a figure, 0 before its first value."""
        num, whole, _ = self.sums[name]
        return whole / num if num else 0.0


def chat_figures(answer: Mapping[str, Any]) -> dict[str, float]:
    """Returns the figures of a chat completion, from the reply as its caller got it; averages over its choices."""
    choices = answer["choices"]
    contents = [c["message"].get("content") or c["message"].get("tool_calls") for c in choices]
    return {
        "completion_tokens": answer["usage"]["completion_tokens"] / len(choices),
        "cut_share": sum(c["finish_reason"] == "length" for c in choices) / len(choices),
        "empty_share": sum(not content for content in contents) / len(choices),
    }


def run_figures(answer: Mapping[str, Any]) -> dict[str, float] | None:
    """Returns the figures of a workflow run, from the reply as its caller got it.

    None where the run says nothing of a team: the task did not fit into the context, so that no agent said anything, or no model and no
    engine caused the failure, but the task or the workflow that was to play it.
    """
    turns = answer["turns"]
    if (not turns and answer["status"] == "truncated") or answer["cause"] == Cause.AUTHOR:
        return None
    formats = {"format_share": sum(turn["is_format_ok"] for turn in turns) / len(turns)} if turns else {}
    return {
        "completion_tokens": answer["usage"]["completion_tokens"],
        "cut_share": float(answer["status"] == "truncated"),
        "empty_share": float(not answer["answer"].strip()),
        "failure_share": float(answer["status"] not in SOUND),
        **formats,
    }


def difference(now: Sums, before: Sums) -> Sums:
    """Returns what one replica has added since `before`."""
    return {
        name: [new - old for new, old in zip(sums, before.get(name, [0, 0.0, 0.0]), strict=True)]
        for name, sums in now.items()
    }


Counted = Literal["sums", "copies", "shadowed"]
COUNTED: tuple[Counted, ...] = get_args(Counted)
"""What the figures are of: see `Service.figures`."""


def by_version(team: str, statuses: Sequence[Mapping[str, Any]], *, of: Counted = "sums") -> dict[int, Sums]:
    """Returns the sums of each version of a team over all replicas.

    Args: statuses: `Service.status` of each replica.
    """
    parts: dict[int, list[Sums]] = {}
    for status in statuses:
        for entry in status["figures"]:
            if entry["team"] == team:
                parts.setdefault(entry["team_version"], []).append(entry.get(of, {}))
    return {version: total(sums) for version, sums in parts.items()}


def added(
    team: str, now: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], *, of: Counted = "sums"
) -> dict[int, Sums]:
    """Returns `by_version` of what was added between two lists of statuses.

    The subtraction is done replica by replica. The figures of a replica that has ended are gone with it: subtracting them
    from those of the others could leave a negative number of failures. A new replica counts from its start.
    """
    past = {status["replica"]: by_version(team, [status], of=of) for status in before}
    parts: dict[int, list[Sums]] = {}
    for status in now:
        known = past.get(status["replica"], {})
        for version, sums in by_version(team, [status], of=of).items():
            parts.setdefault(version, []).append(difference(sums, known.get(version, {})))
    return {version: total(sums) for version, sums in parts.items()}


class Since:
    """Tells what the versions of a team have answered since a first look, replica by replica.

    A replica that was in no list at the first look (serve_apps/policy/replicas.py: this happens just when a canary begins)
    counts from when it is first seen. Otherwise all that it ever answered would count as answers of this canary. What one that has
    ended had answered when it was last seen goes on to count, so that no number falls.
    """

    def __init__(self, team: str, first: Sequence[Mapping[str, Any]]) -> None:
        self._team = team
        self._past = {status["replica"]: status for status in first}
        self._latest = dict(self._past)

    def added(self, now: Sequence[Mapping[str, Any]], *, of: Counted = "sums") -> dict[int, Sums]:
        """Returns the sums of each version since the first look.

        Args: now: `Service.status` of each replica.
        """
        self._latest |= {status["replica"]: status for status in now}
        self._past = self._latest | self._past
        return added(self._team, self.latest, list(self._past.values()), of=of)

    @property
    def latest(self) -> list[Mapping[str, Any]]:
        """Returns the last status of each replica that was ever seen."""
        return list(self._latest.values())


def total(parts: list[Sums]) -> Sums:
    """Adds sums up, e.g. those of all replicas."""
    whole = Tally().sums
    for sums in parts:
        for name, values in sums.items():
            whole[name] = [a + b for a, b in zip(whole[name], values, strict=True)]
    return whole

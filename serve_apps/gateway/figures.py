"""figures: answers of one team version -> counts, sums and squares, which can be added over replicas and subtracted over time.

They hold no text and no user: what a traffic decision needs, and nothing that a log must not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NAMES = ("completion_tokens", "seconds", "cut_share", "empty_share", "format_share", "failure_share")
"""Sampled tokens and seconds of an answer; whether it was cut short, was empty, had well-formed turns (workflows only), or was
none because the engines failed."""

Sums = dict[str, list[float]]
"""By name: number, sum, sum of squares."""


class Tally:
    """What one team version has answered since the gateway replica started."""

    def __init__(self) -> None:
        self.sums: Sums = {name: [0, 0.0, 0.0] for name in NAMES}

    def add(self, values: Mapping[str, float]) -> None:
        """The figures of one answer, those it has."""
        for name, value in values.items():
            of = self.sums[name]
            of[0] += 1
            of[1] += value
            of[2] += value * value


def chat_figures(answer: Mapping[str, Any]) -> dict[str, float]:
    """Of a chat completion as the caller got it."""
    choices = answer["choices"]
    said = [c["message"].get("content") or c["message"].get("tool_calls") for c in choices]
    return {
        "completion_tokens": answer["usage"]["completion_tokens"] / len(choices),
        "cut_share": sum(c["finish_reason"] == "length" for c in choices) / len(choices),
        "empty_share": sum(not words for words in said) / len(choices),
    }


def run_figures(answer: Mapping[str, Any]) -> dict[str, float]:
    """Of a workflow run as the caller got it."""
    turns = answer["turns"]
    formats = {"format_share": sum(turn["is_format_ok"] for turn in turns) / len(turns)} if turns else {}
    return {
        "completion_tokens": answer["usage"]["completion_tokens"],
        "cut_share": float(answer["status"] == "truncated"),
        "empty_share": float(not answer["answer"].strip()),
        **formats,
    }


def difference(now: Sums, before: Sums) -> Sums:
    """What was added since `before`, of the same replica."""
    return {name: [a - b for a, b in zip(of, before.get(name, [0, 0.0, 0.0]), strict=True)] for name, of in now.items()}


def by_version(team: str, statuses: Sequence[Mapping[str, Any]]) -> dict[int, Sums]:
    """Of each version of a team, over the replicas whose `Service.status` these are."""
    parts: dict[int, list[Sums]] = {}
    for status in statuses:
        for one in status["figures"]:
            if one["team"] == team:
                parts.setdefault(one["team_version"], []).append(one["sums"])
    return {version: total(sums) for version, sums in parts.items()}


def added(team: str, now: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> dict[int, Sums]:
    """`by_version` of what was added between two lists of statuses.

    Replica by replica: one that has ended takes its figures along, which subtracted from those of the others would leave
    fewer failures than none; a new one counts from its start.
    """
    past = {status["replica"]: by_version(team, [status]) for status in before}
    parts: dict[int, list[Sums]] = {}
    for status in now:
        known = past.get(status["replica"], {})
        for version, sums in by_version(team, [status]).items():
            parts.setdefault(version, []).append(difference(sums, known.get(version, {})))
    return {version: total(sums) for version, sums in parts.items()}


class Since:
    """What a team's versions have answered since a first look, replica by replica.

    A replica that was on nobody's list at that look (serve_apps/policy/replicas.py: just when a canary begins) counts from when it
    is first seen; otherwise all that it ever answered would be taken for answers of this canary.
    """

    def __init__(self, team: str, first: Sequence[Mapping[str, Any]]) -> None:
        self._team = team
        self._past = {status["replica"]: status for status in first}

    def added(self, now: Sequence[Mapping[str, Any]]) -> dict[int, Sums]:
        """Of each version, over the replicas whose `Service.status` these are."""
        self._past = {status["replica"]: status for status in now} | self._past
        return added(self._team, now, list(self._past.values()))


def total(parts: list[Sums]) -> Sums:
    """Over replicas."""
    whole = Tally().sums
    for sums in parts:
        for name, of in sums.items():
            whole[name] = [a + b for a, b in zip(whole[name], of, strict=True)]
    return whole

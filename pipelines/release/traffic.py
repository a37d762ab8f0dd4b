"""traffic: figures of the answers of two team versions -> whether a canary advances, is promoted, or is sent back.

    gateway's figures of both ──> judge ──> hold | broken | holds ──> production: another share, promotion, the way back

A check of the figures costs nothing, so it is done often; the chance that a sound team is sent back at any check stays below
1 - `traffic.confidence`. The gateway only counts and routes; decisions are made here, by a command, an Airflow task or a program of
your own, and are kept in the journal.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from pipelines.config.sections import TrafficConfig
from pipelines.figures.figure import State
from pipelines.figures.registry import FIGURES
from pipelines.release import production
from pipelines.run.champions import hold_promotion, set_champion
from pipelines.run.run import Run
from serve_apps.gateway.traffic.figures import Since, Sums, by_version, total
from stores.journal.run_values import RunValue
from stores.journal.waiting import waiting
from stores.registry.team import Team

logger = logging.getLogger(__name__)

ENDED = "somebody else has ended this canary"
GROWTH = 1.3
"""The factor by which the number of answers must have grown before the next check counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The result of the comparison of one figure."""

    name: str
    mean: float
    """Canary over champion, or canary minus champion."""
    low: float
    high: float
    limit: float
    state: State

    def __str__(self) -> str:
        """`completion_tokens x1.98 [1.91, 2.05], at most x1.50`."""
        return FIGURES[self.name].words(self.mean, self.low, self.high, self.limit)


class Watch:
    """Checks the figures of two teams, again and again.

    A check counts when the fewer of both answers have grown by `GROWTH`, or the new team's where the old one answers no more; the k-th
    spends alpha / (k (k + 1)) of alpha = 1 - confidence, divided among the guards, and all of them together alpha (a union bound).
    Intervals are normal: for shares Agresti and Caffo's (2000, one success and one failure added), for ratios Fieller's (1954).
    """

    def __init__(
        self, config: TrafficConfig, *, parts: int = 1, without: Sequence[str] = (), is_old_over: bool = False
    ) -> None:
        """Args: parts: watches that alpha is divided among. without: figures that say nothing here. is_old_over: the old team answers
        no more."""
        self._config, self._parts, self._is_old_over = config, parts, is_old_over
        margins = config.guards.model_dump()
        self.limits = {name: m for name, m in margins.items() if m is not None and name not in without}
        """By how much each figure that is compared may be worse."""
        self._num_checks = 0
        self._next_at = float(config.min_answers)

    def check(self, new: Sums, old: Sums) -> list[Compared] | None:
        """The result per figure; None while there are too few answers for another check."""
        fewest = min(map(_num_requests, (new, old)))
        grown = _num_requests(new) if self._is_old_over else fewest
        if fewest < self._config.min_answers or grown < self._next_at:
            return None
        self._num_checks += 1
        self._next_at = grown * GROWTH
        alpha = (
            (1 - self._config.confidence)
            / (self._num_checks * (self._num_checks + 1))
            / max(1, len(self.limits))
            / self._parts
        )
        z = NormalDist().inv_cdf(1 - alpha)
        return [
            compared
            for name, margin in self.limits.items()
            if (compared := _compare(name, new[name], old[name], margin, z)) is not None
        ]


def _compare(name: str, new: list[float], old: list[float], margin: float, z: float) -> Compared | None:
    """Compares one figure; None where one side does not have it."""
    if new[0] < 2 or old[0] < 2:
        return None
    figure = FIGURES[name]
    if figure.compared_by == "ratio":
        if (ratio := _ratio(new, old, least=figure.least, z=z)) is None:
            return None
        centre, low, high = ratio
    else:
        centre, spread = _share_difference(new, old)
        low, high = centre - z * spread, centre + z * spread
    limit = figure.limit(margin)
    return Compared(name=name, mean=centre, low=low, high=high, limit=limit, state=figure.state(low, high, limit))


def _ratio(new: list[float], old: list[float], *, least: float, z: float) -> tuple[float, float, float] | None:
    """Returns the ratio of means and its bounds (Fieller 1954), infinite above where the old mean may be 0; None where a mean is not positive.

    No side has less variance than both have together: what is rare and large is often missing among a few answers, whose own variance
    would then be far too small.

    Args: least: a mean of the old team's below it counts as this, with the same difference.
    """
    means = [side[1] / side[0] for side in (new, old)]
    own = [max(0.0, side[2] / side[0] - mean**2) for side, mean in zip((new, old), means, strict=True)]
    pooled = (new[0] * own[0] + old[0] * own[1]) / (new[0] + old[0])
    of_new, of_old = (z**2 * max(variance, pooled) / side[0] for side, variance in zip((new, old), own, strict=True))
    now, before = (mean + max(0.0, least - means[1]) for mean in means)
    if min(now, before) <= 0:
        return None
    a, b, c = before**2 - of_old, now * before, now**2 - of_new
    root = math.sqrt(max(0.0, b**2 - a * c))
    return now / before, max(0.0, c / (b + root)), (b + root) / a if a > 0 else math.inf


def _share_difference(new: list[float], old: list[float]) -> tuple[float, float]:
    """Returns the difference of two shares and its standard error."""
    shares = [(side[1] + 1) / (side[0] + 2) for side in (new, old)]
    spread = math.sqrt(sum(s * (1 - s) / (side[0] + 2) for s, side in zip(shares, (new, old), strict=True)))
    return new[1] / new[0] - old[1] / old[0], spread


def roll_out(run: Run, version: int, team: Team) -> dict[str, Any]:
    """Lets a team version answer ever more of the requests, until it is promoted, sent back, or too little is known.

    Returns {"verdict": "promoted" | "sent_back" | "undecided", "reason", "team_version", "share", "steps"}. A guard that is
    certainly broken sends it back at any time. Raises as `production.canary`.
    """
    config, steps = run.config.traffic, []
    plan = [(0.0, config.shadow_share)] * bool(config.shadow_share) + [(share, 0.0) for share in config.shares]
    for number, (share, shadow) in enumerate(plan, 1):
        begun = production.canary(run, version, team, share=share, shadow=shadow, goes_on=number > 1)
        watch = Watch(config, parts=len(plan), without=("latency_s",) if shadow else ())
        ended = _step(run, version, begun["beside"], watch, is_shadow=shadow > 0, is_last=number == len(plan))
        steps.append({"share": share, "shadow": shadow, **ended})
        _note(run, {"team_version": version, **steps[-1]})
        if ended["state"] == "broken":
            production.go_back(run, version)
            return _decided(run, "sent_back", ended["reason"], version=version, share=share, steps=steps)
        if ended["state"] == "undecided":
            return _decided(run, "undecided", ended["reason"], version=version, share=share, steps=steps)
    reason = f"canary: {steps[-1]['reason']}"
    with hold_promotion(run):  # who promotes another team has it for minutes
        if not production.is_beside(production.deployed_route(run), version):
            return _decided(run, "undecided", ENDED, version=version, share=share, steps=steps)
        production.move_champion_alone(run, version, team, reason=reason)
    return _decided(run, "promoted", reason, version=version, share=1.0, steps=steps)


def guard_deployed(run: Run, *, seconds: float) -> dict[str, Any]:
    """Compares the deployed team with the one before it, and goes back to that one where a guard is certainly broken.

    Returns {"verdict": "kept" | "sent_back" | "undecided", "reason", "team_version", "ended"}. The two teams answered at
    different times: what changed with the hour shows as well.
    """
    route_now = production.deployed_route(run)
    if route_now is None or route_now.previous is None:
        raise ValueError(
            f"team {run.team_name!r}: nothing to compare the deployed team with: the one before it is not loaded any more"
        )
    new, old = route_now.champion.team_version, route_now.previous.team_version
    since = Since(run.team_name, production.gateway_answers(run))
    watch = Watch(run.config.traffic, is_old_over=True)
    deadline = time.monotonic() + seconds
    latest: list[Compared] | None = None
    while time.monotonic() < deadline:
        answered = _of(since.added(production.gateway_answers(run)), new)
        checked = watch.check(answered, _of(by_version(run.team_name, since.latest), old))
        latest = latest if checked is None else checked
        if broken := [str(s) for s in checked or () if s.state == "broken"]:
            with hold_promotion(run):
                ended = production.go_back(run, new)
                _return_to_champion(run, ended["ended"], ended["team_version"], reason="; ".join(broken))
            return _decided(run, "sent_back", "; ".join(broken), version=ended["team_version"], ended=ended["ended"])
        with waiting(f"answers of {run.team_name}@{new}"):
            time.sleep(run.config.traffic.poll_s)
    if latest is None:
        return _decided(run, "undecided", "too few answers of one of the two teams", version=new, ended=None)
    return _decided(run, "kept", "; ".join(str(s) for s in latest), version=new, ended=None)


def _step(run: Run, new: int, old: int, watch: Watch, *, is_shadow: bool = False, is_last: bool) -> dict[str, Any]:
    """Returns {"state": "advance" | "broken" | "undecided", "reason", "num_answers"}.

    Args: is_shadow: `new` only gets copies of requests that `old` has answered, and is compared with these answers.
    """
    config = run.config.traffic
    since, deadline = Since(run.team_name, production.gateway_answers(run)), time.monotonic() + config.step_timeout_s
    compared: list[Compared] = []
    num = 0.0
    while time.monotonic() < deadline:
        if not production.is_beside(production.deployed_route(run), new):
            return {"state": "undecided", "reason": ENDED, "num_answers": num}
        now = production.gateway_answers(run)
        candidate = _of(since.added(now, of="copies" if is_shadow else "sums"), new)
        champion = _of(since.added(now), old)
        if is_shadow:  # what was copied had been answered: failures are compared with all that the champion failed
            champion = _of(since.added(now, of="shadowed"), new) | {"failure_share": champion["failure_share"]}
        num = candidate["failure_share"][0]
        compared = watch.check(candidate, champion) or compared
        if broken := [str(s) for s in compared if s.state == "broken"]:
            return {"state": "broken", "reason": "; ".join(broken), "num_answers": num}
        is_sure = all(s.state == "holds" for s in compared)
        if (compared or not watch.limits) and num >= config.answers_per_step and (is_sure or not is_last):
            reason = "; ".join(map(str, compared)) or "no figure of traffic.guards has a limit"
            return {"state": "advance", "reason": reason, "num_answers": num}
        with waiting(f"answers of {run.team_name}@{new}: {num:g} of {config.answers_per_step}"):
            time.sleep(config.poll_s)
    unsure = "; ".join(str(s) for s in compared if s.state != "holds") or f"{num:g} answers"
    return {"state": "undecided", "reason": f"after {config.step_timeout_s:g} s: {unsure}", "num_answers": num}


def _num_requests(sums: Sums) -> float:
    """Answers and failures; where nearly all callers left before, those who left late."""
    return max(sums["failure_share"][0], sums["latency_s"][0])


def _of(figures: Mapping[int, Sums], version: int) -> Sums:
    return figures.get(version, total([]))


def _return_to_champion(run: Run, ended: int, version: int, *, reason: str) -> None:
    """Moves the champion's alias, too, where it names the team that was sent back."""
    if run.registry.alias(run.team_name, "champion") == ended:
        _, team = run.registry.load(run.team_name, version)
        set_champion(run, team.models, version, reason=f"sent back: {reason}", is_rollback=True)


def _decided(run: Run, verdict: str, reason: str, *, version: int, **more: Any) -> dict[str, Any]:
    decision = {"verdict": verdict, "reason": reason, "team_version": version, **more}
    logger.log(logging.WARNING if verdict == "sent_back" else logging.INFO, "traffic: %s, %s", verdict, reason)
    _note(run, decision)
    return decision


def _note(run: Run, event: Mapping[str, Any]) -> None:
    """Keeps an event in the journal, with the latest hundred."""
    past = (run.journal.value(run.run_id, RunValue.TRAFFIC) or {}).get("events", [])
    run.journal.put_value(run.run_id, RunValue.TRAFFIC, {"events": [*past, {"at": time.time(), **event}][-100:]})

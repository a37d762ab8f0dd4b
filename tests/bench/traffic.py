"""traffic: two teams behind one gateway: switches, canaries and shadow traffic under load, and what shadow traffic costs the champion."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from pipelines.cluster.connect import connect
from serve_apps.config import GatewayConfig
from serve_apps.gateway.routes import route
from serve_apps.gateway.traffic.teams import DeployedTeam, TeamRoute
from serve_apps.policy.deployment import ensure_apps
from serve_apps.policy.live_settings import set_low_priority
from stores.weights.store import WeightStore
from tests.bench.figures import Figure
from tests.bench.gateway_load import (
    CLIENTS,
    MAX_TOKENS,
    Load,
    app_specs,
    build_tiny,
    closed_load,
    commit,
    deployed_team,
    open_load,
)
from tests.servers import free_port

NUM_SWITCHES = 20
NUM_WORKFLOWS = 4
"""Of the callers, who run the whole workflow; the others chat."""
STAY_S = 0.5
"""Between two switches."""
LOAD = 0.25
"""Share of the gateway's capacity at which the cost of shadow traffic is measured."""
ROUNDS = 60
"""Many and short, so that other load on this machine disturbs all settings alike."""
OTHERS_EVERY = 5
"""Every so many rounds the other settings are measured as well; odd, so that they come first in one and last in the next."""
BLOCK_S, CAPACITY_S = 5.0, 8.0
SETTINGS = {
    "none": (0.0, True),
    "low priority": (1.0, True),
    "normal priority": (1.0, False),
    "busy loops": (0.0, True),
}
"""Share of the requests that are copied to the candidate, and whether its engines run at low priority."""
BUSY_LOOP = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"
"""One per core and no shadow traffic: what work at low priority that never ends costs with this kernel, whoever does it."""
PHRASES = {
    "low priority": "with shadow traffic at low priority",
    "normal priority": "with shadow traffic at normal priority",
    "busy loops": "beside busy loops at low priority",
}
RESAMPLES = 4000


def measure(folder: Path) -> list[Figure]:
    """Both, on tiny models."""
    connect()
    stage = _Stage(folder)
    return _switches(stage) + _shadows(stage)


class _Stage:
    """Team 1 on set blue and team 2 on set green, of two model groups each, behind a gateway; version = team."""

    def __init__(self, folder: Path) -> None:
        store, self._state_file = WeightStore(str(folder / "weights")), folder / "apps.json"
        self.config = GatewayConfig(port=free_port(), max_in_flight=2 * CLIENTS, max_queued=CLIENTS)
        self.deployed: dict[int, DeployedTeam] = {}
        specs = []
        for version, set_name in ((1, "blue"), (2, "green")):
            model = build_tiny(folder / f"tiny{version}", seed=version)
            refs = {group: commit(model, store, model_group=group, version=version) for group in ("g", "h")}
            specs += app_specs(f"traffic-{set_name}", refs)
            self.deployed[version] = deployed_team(f"traffic-{set_name}", refs, team_version=version, set_name=set_name)
        ensure_apps(specs, state_file=self._state_file, timeout_s=400)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.port}/v1"

    def route(self, champion: int, candidate: int | None = None, **shares: float) -> float:
        """Seconds until every replica routes so."""
        candidate_team = None if candidate is None else self.deployed[candidate]
        team_route = TeamRoute(champion=self.deployed[champion], candidate=candidate_team, **shares)
        began = time.perf_counter()
        route(self.config, "team", team_route, state_file=self._state_file, timeout_s=120)
        return time.perf_counter() - began


@dataclass
class _Seen:
    """What callers saw while teams were switched."""

    statuses: Counter[int] = field(default_factory=Counter)
    teams: Counter[str] = field(default_factory=Counter)
    num_mixed: int = 0
    """Answers that say another team than their header, or were sampled by another team's weights."""


def _switches(stage: _Stage) -> list[Figure]:
    stage.route(1)
    seen, is_over, seconds = _Seen(), threading.Event(), []
    callers = [threading.Thread(target=_keep_asking, args=(stage, i, seen, is_over)) for i in range(CLIENTS)]
    for caller in callers:
        caller.start()
    changes: list[dict[str, Any]] = [
        {"champion": 2},
        {"champion": 1},
        {"champion": 1, "candidate": 2, "share": 0.5},
        {"champion": 1, "candidate": 2, "shadow": 0.5},
    ]
    for number in range(NUM_SWITCHES):
        time.sleep(STAY_S)
        seconds.append(stage.route(**changes[number % len(changes)]))
    time.sleep(STAY_S)
    is_over.set()
    for caller in callers:
        caller.join()
    failed = seen.statuses.total() - seen.statuses[200]
    by_team = ", ".join(f"{num} by {team}" for team, num in sorted(seen.teams.items()))
    return [
        Figure(
            f"{NUM_SWITCHES} switches: requests that failed",
            float(failed),
            most=0.0,
            note=f"{seen.statuses.total()} requests of {CLIENTS} callers, {by_team}",
        ),
        Figure("answers that mix teams", float(seen.num_mixed), most=0.0, note="chats, workflows"),
        Figure(
            "seconds until a switch has taken effect, largest",
            max(seconds),
            "s",
            most=5.0,
            note=f"median {float(np.median(seconds)):.2f} s",
        ),
    ]


def _keep_asking(stage: _Stage, number: int, seen: _Seen, is_over: threading.Event) -> None:
    chat = {"model": "team/solver", "messages": [{"role": "user", "content": f"Compute {number}+2*3"}]}
    whole = number < NUM_WORKFLOWS
    url = f"{stage.url}/workflows/team/runs" if whole else f"{stage.url}/chat/completions"
    body: dict[str, Any] = {"prompt": f"{number}+2*3"} if whole else chat | {"max_tokens": MAX_TOKENS}
    with httpx.Client(timeout=60) as http:
        while not is_over.is_set():
            answer = http.post(url, json=body)
            seen.statuses[answer.status_code] += 1
            if answer.status_code != 200:
                continue
            reply, team = answer.json(), answer.headers["x-troupe-team"]
            seen.teams[team] += 1
            version = reply["troupe"]["team_version"]
            sampled = [turn["policy_version"] for turn in reply["turns"]] if whole else reply["troupe"]["sampled_by"]
            seen.num_mixed += team != f"team@{version}" or set(sampled) != {version}


def _shadows(stage: _Stage) -> list[Figure]:
    """Latencies at a quarter of the load, in blocks that take turns; intervals by resampling rounds, each with its settings."""
    stage.route(1)
    url, model = f"{stage.url}/chat/completions", "team/solver"
    closed_load(url, model, CLIENTS, 3.0)  # warm
    capacity = closed_load(url, model, CLIENTS, CAPACITY_S)
    per_second = LOAD * len(capacity.latencies) / capacity.seconds
    rounds: list[dict[str, Load]] = []
    before = _num_shadowed(stage)
    for number in range(ROUNDS):
        order = list(SETTINGS) if number % OTHERS_EVERY == 0 else list(SETTINGS)[:2]
        order = order if number % 2 else order[::-1]
        rounds.append({name: _block(stage, name, url, model, per_second, seed=number) for name in order})
    num_shadowed = _num_shadowed(stage) - before
    plain = np.concatenate([np.asarray(r["none"].latencies) for r in rounds])
    p50, p99 = np.percentile(plain, (50, 99))
    note = (
        f"{per_second:.1f} requests/s of {per_second / LOAD:.0f}; {len(plain)} without, p50 {p50:.4f} s, p99 {p99:.4f} s; "
        f"{num_shadowed:.0f} shadow requests answered"
    )
    figures = []
    for name, phrase in PHRASES.items():
        limit = 1.1 if name == "low priority" else None
        for at in (50, 99):
            ratio, low, high = _ratio(rounds, name, at)
            figures.append(
                Figure(
                    f"champion's p{at} {phrase} / without",
                    ratio,
                    "x",
                    most=limit if at == 99 else None,
                    note=f"95% interval {low:.3f} to {high:.3f}; {note}",
                )
            )
    return figures


def _block(stage: _Stage, name: str, url: str, model: str, per_second: float, *, seed: int) -> Load:
    shadow, low_priority = SETTINGS[name]
    set_low_priority(stage.deployed[2].apps.values(), low_priority, timeout_s=300)
    stage.route(1, 2, shadow=shadow)
    closed_load(url, model, 2, STAY_S)  # the first after a switch are no part of it
    with _busy_loops() if name == "busy loops" else nullcontext():
        load = open_load(url, model, per_second, BLOCK_S, seed=seed)
    assert set(load.statuses) == {200}, load.statuses
    return load


@contextmanager
def _busy_loops() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _num_shadowed(stage: _Stage) -> float:
    text = httpx.get(f"http://127.0.0.1:{stage.config.port}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith('troupe_gateway_shadows_total{outcome="answered"')]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _ratio(rounds: list[dict[str, Load]], name: str, at: int) -> tuple[float, float, float]:
    """Of the percentiles, with its interval, over the rounds in which both were measured."""
    rng = np.random.default_rng(0)
    rounds = [r for r in rounds if name in r]

    def ratio(chosen: Any) -> float:
        both = [np.concatenate([rounds[i][of].latencies for i in chosen]) for of in (name, "none")]
        return float(np.percentile(both[0], at) / np.percentile(both[1], at))

    drawn = [ratio(rng.integers(0, len(rounds), len(rounds))) for _ in range(RESAMPLES)]
    low, high = np.percentile(drawn, (2.5, 97.5))
    return ratio(range(len(rounds))), float(low), float(high)

"""hostile: the gateway under every attack of the hostile set: how late it is to tell that it lives, and what it costs others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from tests.bench.figures import Figure
from tests.bench.gateway_load import build_tiny
from tests.serve_apps.gateway.hostile_run import play


def measure(folder: Path) -> list[Figure]:
    """Plays the set once."""
    model = build_tiny(folder / "tiny")
    seen = asyncio.run(play(model, folder))
    name = max(seen.slowest, key=lambda attack: seen.slowest[attack])
    late = float(np.percentile(seen.health_s, 99))
    failures = sum(team["figures"]["failure_share"]["mean"] for team in seen.figures)
    num_lost = sum(num for status, num in seen.honest.items() if status != 200)
    errors = sum(sum(of.values()) for of in seen.server_errors.values())
    mib = {what: (rss - seen.rss_before) / 2**20 for what, rss in (("peak", seen.rss_peak), ("end", seen.rss_after))}
    asked = f"{len(seen.health_s)} times during {len(seen.statuses)} attacks, p99 {late:.3f} s; slowest: {name}"
    return [
        Figure("/health, slowest answer (s)", max(seen.health_s), most=0.5, note=asked),
        Figure("event loop, longest stretch (s of processor)", seen.loop_s, most=0.5),
        Figure("memory, growth at its peak (MiB)", mib["peak"], most=200.0),
        Figure("memory, growth at the end (MiB)", mib["end"], most=200.0),
        Figure("requests of honest callers that failed", float(num_lost), most=0.0, note=str(dict(seen.honest))),
        Figure("attacks with a server error", float(errors), most=0.0),
        Figure("failure share of the teams", failures, most=0.0),
    ]

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
        Figure(name="/health, slowest answer (s)", value=max(seen.health_s), limit=0.5, is_upper=True, note=asked),
        Figure(name="event loop, longest stretch (s of processor)", value=seen.loop_s, limit=0.5, is_upper=True),
        Figure(name="memory, growth at its peak (MiB)", value=mib["peak"], limit=200.0, is_upper=True),
        Figure(name="memory, growth at the end (MiB)", value=mib["end"], limit=200.0, is_upper=True),
        Figure(
            name="requests of honest callers that failed",
            value=float(num_lost),
            limit=0.0,
            is_upper=True,
            note=str(dict(seen.honest)),
        ),
        Figure(name="attacks with a server error", value=float(errors), limit=0.0, is_upper=True),
        Figure(name="failure share of the teams", value=failures, limit=0.0, is_upper=True),
    ]

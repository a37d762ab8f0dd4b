"""A gateway process under every attack of the hostile set: honest callers lose nothing, and no team is blamed.

How late /health is meanwhile, and how much memory it takes, `python -m tests.bench --only hostile` measures.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.serve_apps.gateway.hostile_bodies import BODIES
from tests.serve_apps.gateway.hostile_callers import CALLERS
from tests.serve_apps.gateway.hostile_connections import REQUESTS
from tests.serve_apps.gateway.hostile_run import play

pytestmark = [pytest.mark.nightly, pytest.mark.anyio]

REFUSED = {400, 401, 403, 404, 405, 408, 413, 415, 429, 431}
SILENT = {"a head of ten megabytes", "a path of ten megabytes", "HTTP 0.9"}
"""Attacks after which the connection is closed while the caller still writes, so that it may see no answer."""


async def test_no_attack_costs_honest_callers_an_answer_or_a_team_its_name(tiny_model: Path, tmp_path: Path) -> None:
    seen = await play(tiny_model, tmp_path)
    assert len(BODIES) + len(REQUESTS) + len(CALLERS) > 200
    assert not seen.server_errors, seen.server_errors
    statuses = {status for of in seen.statuses.values() for status in of}
    assert statuses - {100, 200, 503, 504} <= REFUSED and {200, 400, 401, 404, 408, 413, 415, 429} <= statuses, statuses
    assert {name for name, of in seen.statuses.items() if not of} <= SILENT
    assert set(seen.honest) == {200} and seen.honest[200] > 100, seen.honest
    assert all(map(math.isfinite, seen.health_s)) and len(seen.health_s) > 200
    for team in seen.figures:
        assert team["figures"]["failure_share"]["mean"] == 0.0, team

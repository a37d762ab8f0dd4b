"""What ending a canary leaves in service."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from pipelines.release import production
from serve_apps.gateway.teams import Arm, TeamInService


def arm(version: int, set_name: str) -> Arm:
    return Arm(team_version=version, set_name=set_name, apps={}, cast={})


def test_ending_a_canary_where_there_is_none_leaves_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = TeamInService(champion=arm(5, "green"), previous=arm(4, "blue"))
    routed: list[TeamInService] = []
    run: Any = object()
    monkeypatch.setattr(production, "hold", lambda run: nullcontext())
    monkeypatch.setattr(production, "in_service", lambda run: before)
    monkeypatch.setattr(production, "switch", lambda run, wanted: routed.append(wanted))
    assert production.end_canary(run) == {"team_version": 5, "ended": None}
    assert routed == [before]

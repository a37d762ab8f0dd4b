"""What ending a canary leaves in service."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from pipelines.release import production
from serve_apps.gateway.teams import DeployedTeam, TeamRoute

pytestmark = pytest.mark.fast


def deployed(version: int, set_name: str) -> DeployedTeam:
    return DeployedTeam(team_version=version, set_name=set_name, apps={}, team_spec={})


def test_ending_a_canary_where_there_is_none_leaves_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = TeamRoute(champion=deployed(5, "green"), previous=deployed(4, "blue"))
    routed: list[TeamRoute] = []
    run: Any = object()
    monkeypatch.setattr(production, "hold", lambda run: nullcontext())
    monkeypatch.setattr(production, "deployed_route", lambda run: before)
    monkeypatch.setattr(production, "switch", lambda run, wanted: routed.append(wanted))
    assert production.end_canary(run) == {"team_version": 5, "ended": None}
    assert routed == [before]

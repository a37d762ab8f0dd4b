"""What ending a canary or shadow traffic leaves in service."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.release import production
from pipelines.run.run import Run
from serve_apps.gateway.traffic.teams import DeployedTeam, TeamRoute

pytestmark = pytest.mark.fast


def deployed(version: int, set_name: str) -> DeployedTeam:
    return DeployedTeam(team_version=version, set_name=set_name, apps={}, team_spec={})


RUN: Any = SimpleNamespace(team_name="demo")


def follow(monkeypatch: pytest.MonkeyPatch, before: TeamRoute) -> list[TeamRoute]:
    """Requests are answered by the route `before`; returns the list of routes that follow it."""
    routed: list[TeamRoute] = []
    monkeypatch.setattr(production, "hold", lambda run: nullcontext())
    monkeypatch.setattr(production, "deployed_route", lambda run: before)
    monkeypatch.setattr(production, "switch", lambda run, wanted: routed.append(wanted))
    return routed


@pytest.mark.parametrize("end", [production.end_canary, production.end_shadow])
def test_ending_a_canary_where_there_is_none_leaves_the_way_back(
    end: Callable[[Run], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = TeamRoute(champion=deployed(5, "green"), previous=deployed(4, "blue"))
    routed = follow(monkeypatch, before)
    assert end(RUN) == {"team_version": 5, "ended": None}
    assert routed == [before]


def test_only_shadow_traffic_ends_as_such_and_only_a_canary_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    champion, candidate = deployed(5, "green"), deployed(6, "blue")
    routed = follow(monkeypatch, TeamRoute(champion=champion, candidate=candidate, share=0.25))
    with pytest.raises(ValueError, match=r"version 6 is a canary that answers 0\.25 .*`troupe canary demo --end`"):
        production.end_shadow(RUN)
    assert routed == []
    assert production.end_canary(RUN) == {"team_version": 5, "ended": 6}
    routed = follow(monkeypatch, TeamRoute(champion=champion, candidate=candidate, shadow=0.5))
    with pytest.raises(ValueError, match=r"version 6 only gets copies of requests: .*`troupe shadow demo --end`"):
        production.end_canary(RUN)
    assert routed == []
    assert production.end_shadow(RUN) == {"team_version": 5, "ended": 6}
    follow(monkeypatch, TeamRoute(champion=champion, candidate=candidate))
    assert production.end_canary(RUN) == {"team_version": 5, "ended": 6}, "a canary whose share is 0"


def test_users_keep_their_team_while_the_share_grows_whatever_salt_they_were_dealt_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    champion, candidate = deployed(5, "green"), deployed(6, "blue")
    routed = follow(monkeypatch, TeamRoute(champion=champion, candidate=candidate, share=0.1, salt="x"))
    monkeypatch.setattr(production, "_load", lambda *_, **__: (candidate, [], 0.0))
    team: Any = None
    production.canary(RUN, 6, team, share=0.5)
    production.canary(RUN, 6, team, share=0.5, salt="y")
    assert [(route.share, route.salt) for route in routed] == [(0.5, "x"), (0.5, "y")]


def test_a_next_step_begins_no_canary_that_somebody_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    routed = follow(monkeypatch, TeamRoute(champion=deployed(5, "green")))
    monkeypatch.setattr(production, "_load", lambda *_, **__: (deployed(6, "blue"), [], 0.0))
    team: Any = None
    with pytest.raises(ValueError, match="somebody else has ended the canary of version 6: begin it anew"):
        production.canary(RUN, 6, team, share=0.5, goes_on=True)
    assert routed == []

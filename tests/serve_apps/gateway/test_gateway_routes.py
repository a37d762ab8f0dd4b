"""Routes are kept in one list of apps that several teams share: a change of one team leaves the others alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import deployed_team

from serve_apps.config import GatewayConfig
from serve_apps.gateway import routes
from serve_apps.gateway.routes import RouteError, route
from serve_apps.gateway.teams import TeamRoute
from serve_apps.policy.app_list import Apps

pytestmark = pytest.mark.test

CONFIG = GatewayConfig()


class Cluster:
    """One list of applications, and a gateway replica that follows it, or `refuses` a team."""

    def __init__(self) -> None:
        self.apps: Apps = {}
        self.refuses = ""
        self.meanwhile: list[Callable[[], None]] = []

    def change(self, _: Any, edit: Callable[[Apps], Apps]) -> Apps:
        self.apps = edit(dict(self.apps))
        return self.apps

    def statuses(self, _: GatewayConfig) -> list[dict[str, Any]]:
        while self.meanwhile:
            self.meanwhile.pop()()
        entry = self.apps["gateway-8000"]
        teams = entry["deployments"][0]["user_config"]["teams"]
        accepted = {name: config for name, config in teams.items() if name != self.refuses}
        refused = {"error": self.refuses, "refused": teams if self.refuses else {}}
        return [{"port": entry["args"], "teams": accepted, "keys_faults": {}, "replica_id": "r", **refused}]

    def versions(self) -> dict[str, int]:
        teams = self.apps["gateway-8000"]["deployments"][0]["user_config"]["teams"]
        return {name: config["champion"]["team_version"] for name, config in teams.items()}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(routes, "open_list", lambda *_: None)
    monkeypatch.setattr(routes, "change_list", made.change)
    monkeypatch.setattr(routes, "gateway_statuses", made.statuses)
    monkeypatch.setattr(routes.serve, "status", lambda: type("Status", (), {"applications": {}}))
    return made


def put(model: Path, name: str, version: int, *, shadow: float = 0.0) -> None:
    candidate = deployed_team(model, version + 1, "green") if shadow else None
    team_route = TeamRoute(champion=deployed_team(model, version, "blue"), candidate=candidate, shadow=shadow)
    route(CONFIG, name, team_route, state_file="", timeout_s=0.2)


def test_two_teams_can_switch_at_the_same_time(cluster: Cluster, tiny_model: Path) -> None:
    cluster.meanwhile = [lambda: put(tiny_model, "other", 7)]
    put(tiny_model, "demo", 3)
    assert cluster.versions() == {"demo": 3, "other": 7}


def test_undoing_a_change_keeps_what_another_team_changed_meanwhile(cluster: Cluster, tiny_model: Path) -> None:
    put(tiny_model, "demo", 3)
    put(tiny_model, "other", 6)
    cluster.meanwhile, cluster.refuses = [lambda: put(tiny_model, "other", 7)], "demo"
    with pytest.raises(RouteError, match="gateway replica r refuses: demo"):
        put(tiny_model, "demo", 4)
    assert cluster.versions() == {"demo": 3, "other": 7}


def test_a_gateway_that_never_started_is_removed_from_the_list(cluster: Cluster, tiny_model: Path) -> None:
    cluster.refuses = "demo"
    with pytest.raises(RouteError):
        put(tiny_model, "demo", 3)
    assert cluster.apps == {}


def test_the_shadows_app_starts_with_the_first_shadow_traffic_and_has_the_gateways_teams(
    cluster: Cluster, tiny_model: Path
) -> None:
    def teams_of(app: str) -> object:
        return cluster.apps[app]["deployments"][0]["user_config"]

    put(tiny_model, "demo", 3)
    assert [*cluster.apps] == ["gateway-8000"], "without shadow traffic the process is not needed"
    put(tiny_model, "demo", 3, shadow=0.5)
    put(tiny_model, "demo", 4)
    assert teams_of("shadows-8000") == teams_of("gateway-8000"), "it stays for later shadow traffic"
    cluster.refuses = "demo"
    with pytest.raises(RouteError):
        put(tiny_model, "demo", 6, shadow=0.5)
    assert teams_of("shadows-8000") == teams_of("gateway-8000") and cluster.versions() == {"demo": 4}


def test_the_shadows_app_is_removed_with_a_gateway_that_never_started(cluster: Cluster, tiny_model: Path) -> None:
    cluster.refuses = "demo"
    with pytest.raises(RouteError):
        put(tiny_model, "demo", 3, shadow=0.5)
    assert cluster.apps == {}

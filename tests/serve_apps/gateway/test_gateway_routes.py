"""Routes are kept in one list of apps that several teams share: a change of one team leaves the others alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_scene import deployed_team

from serve_apps.config import CaptureConfig, GatewayConfig
from serve_apps.gateway import routes
from serve_apps.gateway.routes import RouteError, route
from serve_apps.gateway.traffic.teams import TeamRoute
from serve_apps.policy.app_list import Apps

pytestmark = pytest.mark.test

CONFIG = GatewayConfig()


class Cluster:
    """One list of applications, and a gateway replica that follows it, or `refuses` a team."""

    def __init__(self) -> None:
        self.apps: Apps = {}
        self.refuses = ""
        self.meanwhile: list[Callable[[], None]] = []
        self.keys_faults: dict[str, str] = {}
        self.states = [{"RUNNING": 1}]
        """Of the replicas, at each question; the last stays."""

    def change(self, _: Any, edit: Callable[[Apps], Apps]) -> Apps:
        self.apps = edit(dict(self.apps))
        return self.apps

    def statuses(self, _: GatewayConfig) -> list[dict[str, Any]]:
        while self.meanwhile:
            self.meanwhile.pop()()
        entry = self.apps["gateway-8000"]
        teams = entry["deployments"][0]["user_config"]["teams"]
        accepted = {name: config for name, config in teams.items() if name != self.refuses}
        refused = {"error": self.refuses, "refused": {n: config for n, config in teams.items() if n == self.refuses}}
        return [
            {"port": entry["args"], "teams": accepted, "keys_faults": self.keys_faults, "replica_id": "r", **refused}
        ]

    def status(self) -> Any:
        states = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        deployment = SimpleNamespace(replica_states=states, message="")
        app = SimpleNamespace(status=SimpleNamespace(value="RUNNING"), deployments={"Gateway": deployment})
        return SimpleNamespace(applications={"gateway-8000": app})

    def versions(self) -> dict[str, int]:
        teams = self.apps["gateway-8000"]["deployments"][0]["user_config"]["teams"]
        return {name: config["champion"]["team_version"] for name, config in teams.items()}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(routes, "open_list", lambda *_: None)
    monkeypatch.setattr(routes, "change_list", made.change)
    monkeypatch.setattr(routes, "gateway_statuses", made.statuses)
    monkeypatch.setattr(routes.serve, "status", made.status)
    return made


def put(
    model: Path, name: str, version: int, *, shadow: float = 0.0, config: GatewayConfig = CONFIG, **change: Any
) -> None:
    candidate = deployed_team(model, version + 1, "green") if shadow else None
    team_route = TeamRoute(champion=deployed_team(model, version, "blue"), candidate=candidate, shadow=shadow)
    route(config, name, team_route, state_file="", timeout_s=0.2, **change)


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


@pytest.mark.parametrize("shadow", [0.0, 0.5])
def test_a_gateway_that_never_started_is_removed_from_the_list(
    cluster: Cluster, tiny_model: Path, shadow: float
) -> None:
    cluster.refuses = "demo"
    with pytest.raises(RouteError):
        put(tiny_model, "demo", 3, shadow=shadow)
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


def test_a_team_beside_another_makes_no_new_version_of_the_deployment_and_leaves_the_others_route(
    cluster: Cluster, tiny_model: Path
) -> None:
    put(tiny_model, "demo", 3, config=GatewayConfig(keys_file="/demo.json", capture=CaptureConfig(redact={"a": "b"})))
    before = cluster.apps["gateway-8000"]
    put(tiny_model, "other", 7, config=GatewayConfig(allowed_origins=("*",)))
    after = cluster.apps["gateway-8000"]
    teams = [entry["deployments"][0].pop("user_config")["teams"] for entry in (before, after)]
    assert before == after, "what is not in user_config restarts replicas"
    assert teams[1]["demo"] == teams[0]["demo"] and teams[0]["demo"]["settings"]["keys_file"] == "/demo.json"
    assert teams[1]["other"]["settings"]["allowed_origins"] == ["*"]


def test_undoing_a_change_keeps_what_another_team_made_of_the_port_meanwhile(
    cluster: Cluster, tiny_model: Path
) -> None:
    keyed = {"host": "0.0.0.0", "keys_file": "/demo.json"}
    put(tiny_model, "demo", 3, config=GatewayConfig(**keyed))
    cluster.refuses = "demo"
    cluster.meanwhile = [lambda: put(tiny_model, "other", 7, change="any")]
    with pytest.raises(RouteError, match="refuses: demo"):
        put(tiny_model, "demo", 4, config=GatewayConfig(**keyed))
    assert cluster.versions() == {"demo": 3, "other": 7}
    assert cluster.apps["gateway-8000"]["args"]["host"] == "127.0.0.1", "a team without keys is there now"


def test_a_path_of_keys_is_read_from_the_folder_of_the_command(
    cluster: Cluster, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("demo", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        put(tiny_model, name, 3, config=GatewayConfig(keys_file="keys.json"))
    teams = cluster.apps["gateway-8000"]["deployments"][0]["user_config"]["teams"]
    assert {name: team["settings"]["keys_file"] for name, team in teams.items()} == {
        name: str(tmp_path / name / "keys.json") for name in ("demo", "other")
    }


def test_other_settings_of_the_port_hold_once_the_replicas_before_have_stopped(
    cluster: Cluster, tiny_model: Path
) -> None:
    put(tiny_model, "demo", 3)
    cluster.states = [{"RUNNING": 1, "STARTING": 1}, {"RUNNING": 1, "STOPPING": 1}, {"RUNNING": 1}]
    put(tiny_model, "demo", 3, config=GatewayConfig(max_in_flight=1))
    assert cluster.states == [{"RUNNING": 1}] and cluster.apps["gateway-8000"]["args"]["max_in_flight"] == 1


def test_keys_that_no_replica_can_read_are_not_in_force(cluster: Cluster, tiny_model: Path) -> None:
    put(tiny_model, "demo", 3)
    cluster.keys_faults = {"demo": "gateway.keys_file keys.json: no JSON"}
    with pytest.raises(RouteError, match=r"cannot read the keys of team 'demo': gateway\.keys_file"):
        put(tiny_model, "demo", 4)
    assert cluster.versions() == {"demo": 3}
    put(tiny_model, "demo", 4, config=GatewayConfig(max_in_flight=1), change="none")
    assert cluster.versions() == {"demo": 4}, "a promotion is not kept from its team"
    assert cluster.apps["gateway-8000"]["args"]["max_in_flight"] == 64, "nor does it change anything of the port"

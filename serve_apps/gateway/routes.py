"""routes: the route of a team -> a gateway whose every replica follows it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve

from serve_apps.config import GatewayConfig
from serve_apps.gateway.app import app_name, gateway_entry, shadows_name, user_config
from serve_apps.gateway.shadows_app import shadows_entry
from serve_apps.gateway.teams import TeamRoute, parse_teams
from serve_apps.policy.app_list import Apps, change, deployed_apps, open_list, with_user_config
from serve_apps.policy.replicas import statuses_of
from stores.waiting import waiting

POLL_S = 0.05
STATUS_TIMEOUT_S = 10.0


class RouteError(RuntimeError):
    """The gateway did not take a new route; it continues with the one it had."""


def gateway_apps(config: GatewayConfig) -> list[str]:
    """Returns the names of all apps that the gateway on this port may have."""
    return [app_name(config), shadows_name(config)]


def gateway_teams(config: GatewayConfig) -> dict[str, TeamRoute]:
    """Returns the routes that the gateway on this port is configured with; empty where there is no gateway."""
    entry = _entry(config)
    return {} if entry is None else _teams_of(entry)


def gateway_statuses(config: GatewayConfig) -> list[dict[str, Any]]:
    """Returns `Gateway.status` of every replica that answers; empty where there is no gateway."""
    return statuses_of(app_name(config), timeout_s=STATUS_TIMEOUT_S)


def route(
    config: GatewayConfig, name: str, team_route: TeamRoute | None, *, state_file: str | Path, timeout_s: float
) -> None:
    """Gives team `name` this route (None: takes the team off), and waits until every replica follows it.

    The other teams keep their routes, also those that change at the same time. Raises RouteError where a replica refuses the
    route or has not followed it within `timeout_s`; the team then gets its old route back.
    """
    before: list[Apps] = []

    def edit(apps: Apps) -> Apps:
        before[:] = [dict(apps)]
        entry = apps.get(app_name(config))
        teams = {} if entry is None else _teams_of(entry)
        teams = {other: other_route for other, other_route in teams.items() if other != name}
        teams |= {} if team_route is None else {name: team_route}
        edited = apps | {app_name(config): gateway_entry(app_name(config), config, teams)}
        player = shadows_name(config)
        if player in apps or any(
            team.shadow for team in teams.values()
        ):  # once started it stays for the next shadow traffic
            edited[player] = shadows_entry(player, config, user_config(teams))
        return edited

    change(open_list(state_file), edit)
    try:
        _wait_until_routed(config, name, team_route, timeout_s)
    except RouteError:
        old_entry = before[0].get(app_name(config))
        change(open_list(), lambda apps: _with_old_route(apps, config, name, old_entry))
        raise


def _with_old_route(apps: Apps, config: GatewayConfig, name: str, old_entry: dict[str, Any] | None) -> Apps:
    """Returns the list of apps with this team routed as in the gateway's old entry, and the other teams as they are now."""
    gateway, player = gateway_apps(config)
    if gateway not in apps:
        return apps
    teams = {other: other_route for other, other_route in _teams_of(apps[gateway]).items() if other != name}
    if old_entry is None and not teams:
        return {app: entry for app, entry in apps.items() if app not in (gateway, player)}
    if old_entry is not None and name in (old_teams := _teams_of(old_entry)):
        teams[name] = old_teams[name]
    edited = apps | {gateway: with_user_config(old_entry or apps[gateway], user_config(teams))}
    if player in apps:
        edited[player] = with_user_config(apps[player], user_config(teams))
    return edited


def _wait_until_routed(config: GatewayConfig, name: str, team_route: TeamRoute | None, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    expected = None if team_route is None else team_route.model_dump(mode="json")
    while True:
        try:
            statuses = gateway_statuses(config)
        except TimeoutError:  # a replica is too busy to answer: ask again until the deadline
            statuses = []
        late = [status for status in statuses if status["teams"].get(name) != expected]
        for status in late:
            if (
                status["error"] and status["refused"].get(name) == expected
            ):  # an error about this route, not an earlier one
                raise RouteError(f"gateway replica {status['replica_id']} refuses: {status['error']}")
        if len(statuses) >= config.num_replicas and not late:
            return
        app = serve.status().applications.get(app_name(config))
        messages = (
            "; ".join(_last_line(d.message) for d in app.deployments.values()) if app else "Serve has no such app"
        )
        if app and app.status.value == "DEPLOY_FAILED":
            raise RouteError(f"the gateway on port {config.port} did not start: {messages}")
        if time.monotonic() > deadline:
            raise RouteError(
                f"after {timeout_s:g} s {len(statuses)} of {config.num_replicas} gateway replicas answer, and not all of them "
                f"follow the new route: {messages}"
            )
        with waiting(f"the gateway on port {config.port} to follow its new route"):
            time.sleep(POLL_S)


def _last_line(message: str) -> str:
    """Returns the last line, which is where a traceback has its cause."""
    return message.strip().rpartition("\n")[2]


def _entry(config: GatewayConfig) -> dict[str, Any] | None:
    try:
        apps = deployed_apps()
    except ValueError:  # there is no list: nothing was ever deployed on this cluster
        return None
    return apps.get(app_name(config))


def _teams_of(entry: Mapping[str, Any]) -> dict[str, TeamRoute]:
    return parse_teams(entry["deployments"][0]["user_config"])

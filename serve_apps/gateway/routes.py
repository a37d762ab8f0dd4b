"""gateway_routes: who is in service -> a gateway whose every replica routes so."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve

from serve_apps.config import GatewayConfig
from serve_apps.gateway.app import app_name, gateway_entry, shadows_name, user_config
from serve_apps.gateway.shadows_app import shadows_entry
from serve_apps.gateway.teams import TeamRoute, teams_of
from serve_apps.policy.app_list import Apps, change, deployed_apps, open_list, with_user_config
from serve_apps.policy.replicas import statuses_of
from stores.waiting import waiting

POLL_S = 0.05
ANSWER_TIMEOUT_S = 10.0


class RouteError(RuntimeError):
    """The gateway did not take the teams that it was told to serve; it goes on with those it had."""


def gateway_apps(config: GatewayConfig) -> list[str]:
    """Every app of the gateway on this port that there may be."""
    return [app_name(config), shadows_name(config)]


def gateway_teams(config: GatewayConfig) -> dict[str, TeamRoute]:
    """What the gateway on this port was told to serve; empty where there is none."""
    entry = _entry(config)
    return {} if entry is None else _teams_of(entry)


def gateway_statuses(config: GatewayConfig) -> list[dict[str, Any]]:
    """`Gateway.status` of every replica that answers; empty where there is no gateway."""
    return statuses_of(app_name(config), timeout_s=ANSWER_TIMEOUT_S)


def route(
    config: GatewayConfig, name: str, wanted: TeamRoute | None, *, state_file: str | Path, timeout_s: float
) -> None:
    """Has the gateway answer for team `name` as wanted (None: not any more), and waits until every replica does.

    Other teams on it stay, also those that are changed meanwhile. Raises RouteError where a replica refuses, or has not
    followed in `timeout_s`; what was in service before under this name is routed to again then.
    """
    before: list[Apps] = []

    def edit(apps: Apps) -> Apps:
        before[:] = [dict(apps)]
        entry = apps.get(app_name(config))
        teams = {} if entry is None else _teams_of(entry)
        teams = {other: of for other, of in teams.items() if other != name}
        teams |= {} if wanted is None else {name: wanted}
        made = apps | {app_name(config): gateway_entry(app_name(config), config, teams)}
        player = shadows_name(config)
        if player in apps or any(team.shadow for team in teams.values()):  # it stays, for the next
            made[player] = shadows_entry(player, config, user_config(teams))
        return made

    change(open_list(state_file), edit)
    try:
        _wait_until_routed(config, name, wanted, timeout_s)
    except RouteError:
        old = before[0].get(app_name(config))
        change(open_list(), lambda apps: _taken_back(apps, config, name, old))
        raise


def _taken_back(apps: Apps, config: GatewayConfig, name: str, old: dict[str, Any] | None) -> Apps:
    """The list with this team routed as the gateway's old entry says, and the others as they are by now."""
    gateway, player = gateway_apps(config)
    if gateway not in apps:
        return apps
    teams = {other: of for other, of in _teams_of(apps[gateway]).items() if other != name}
    if old is None and not teams:
        return {app: entry for app, entry in apps.items() if app not in (gateway, player)}
    if old is not None and name in (before := _teams_of(old)):
        teams[name] = before[name]
    made = apps | {gateway: with_user_config(old or apps[gateway], user_config(teams))}
    if player in apps:
        made[player] = with_user_config(apps[player], user_config(teams))
    return made


def _wait_until_routed(config: GatewayConfig, name: str, wanted: TeamRoute | None, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    expected = None if wanted is None else wanted.model_dump(mode="json")
    while True:
        try:
            statuses = gateway_statuses(config)
        except TimeoutError:  # a replica is too busy to say: the deadline decides
            statuses = []
        late = [status for status in statuses if status["teams"].get(name) != expected]
        for status in late:
            if status["error"] and status["refused"].get(name) == expected:  # of what it was told now, not before
                raise RouteError(f"gateway replica {status['replica_id']} refuses: {status['error']}")
        if len(statuses) >= config.num_replicas and not late:
            return
        live = serve.status().applications.get(app_name(config))
        said = "; ".join(_end(d.message) for d in live.deployments.values()) if live else "Serve does not know it"
        if live and live.status.value == "DEPLOY_FAILED":
            raise RouteError(f"the gateway on port {config.port} did not start: {said}")
        if time.monotonic() > deadline:
            raise RouteError(
                f"after {timeout_s:g} s {len(statuses)} of {config.num_replicas} gateway replicas answer and not all route "
                f"as they were told: {said}"
            )
        with waiting(f"the gateway on port {config.port} to route"):
            time.sleep(POLL_S)


def _end(message: str) -> str:
    """The last line, where a traceback has its cause."""
    return message.strip().rpartition("\n")[2]


def _entry(config: GatewayConfig) -> dict[str, Any] | None:
    try:
        apps = deployed_apps()
    except ValueError:  # no list: nothing was ever deployed on this cluster
        return None
    return apps.get(app_name(config))


def _teams_of(entry: Mapping[str, Any]) -> dict[str, TeamRoute]:
    return teams_of(entry["deployments"][0]["user_config"])

"""routes: the route of a team -> a gateway whose every replica follows it.

    gateway section of a run config ─┬─ of_team ──> travels with the team's route, and concerns no other team
                                     └─ of_port ──> the port's, as long as no other team is on it; then it must be the same

What a port has is decided here, in `settled`. No team loses a protection because another one was deployed, or because its own next
config says nothing of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from ray import serve

from serve_apps.config import GatewayConfig, GatewayPortConfig, GatewayTeamConfig
from serve_apps.gateway.app import app_name, gateway_entry, shadows_name, user_config
from serve_apps.gateway.shadow.shadows_app import shadows_entry
from serve_apps.gateway.traffic.teams import TeamRoute, parse_teams
from serve_apps.policy.app_list import Apps, deployed_apps, open_list, with_user_config
from serve_apps.policy.app_list import change as change_list
from serve_apps.policy.replicas import statuses_of
from stores.files import local_path
from stores.journal.waiting import waiting

logger = logging.getLogger(__name__)

Change = Literal["none", "compatible", "any"]
"""What a new route may change of the gateway's settings. `none`: a team that is there keeps its own and the port's, as for a promotion.
`compatible`: what takes nothing from anybody. `any`: what was asked for by name, with `troupe serve --replace-gateway`."""
OPTION = "--replace-gateway"
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
    """Returns `Gateway.status` of every replica; empty where there is no gateway. Raises TimeoutError where one is too busy to answer."""
    return statuses_of(app_name(config), timeout_s=STATUS_TIMEOUT_S)


def check_settings(config: GatewayConfig, name: str, *, change: Change) -> None:
    """Raises ValueError where team `name` may not be deployed with this config: see `settled`."""
    _settled(_entry(config), config, name, change)


def route(
    config: GatewayConfig,
    name: str,
    team_route: TeamRoute | None,
    *,
    state_file: str | Path,
    timeout_s: float,
    change: Change = "compatible",
) -> None:
    """Gives team `name` this route (None: takes the team off), and waits until every replica follows it.

    The other teams keep their routes, also those that change at the same time. Raises RouteError where a replica refuses the
    route or has not followed it within `timeout_s`; the team then gets its old route back.

    Args: change: what may change of the gateway's settings; ValueError where `config` asks for more.
    """
    before: list[Apps] = []
    expected: list[_Expected] = []

    def edit(apps: Apps) -> Apps:
        entry = apps.get(app_name(config))
        port, settings = _settled(entry, config, name, "none" if team_route is None else change)
        own = {} if team_route is None else {name: team_route.model_copy(update={"settings": settings})}
        teams = {} if entry is None else _teams_of(entry)
        teams = {other: other_route for other, other_route in teams.items() if other != name} | own
        before[:] = [dict(apps)]
        expected[:] = [
            _Expected(
                name=name,
                route=own.get(name),
                port=port,
                is_moved=entry is not None and _port_of(entry) != port,
                changes_settings=change != "none",
            )
        ]
        edited = apps | {app_name(config): gateway_entry(app_name(config), port, teams)}
        player = shadows_name(config)
        if player in apps or any(
            team.shadow for team in teams.values()
        ):  # once started it stays for the next shadow traffic
            edited[player] = shadows_entry(player, port, user_config(teams))
        return edited

    change_list(open_list(state_file), edit)
    try:
        _wait_until_routed(config, expected[0], timeout_s)
    except RouteError:
        old_entry = before[0].get(app_name(config))
        change_list(open_list(), lambda apps: _with_old_route(apps, config, expected[0], old_entry))
        raise


@dataclass(frozen=True, kw_only=True)
class _Expected:
    """What every replica must say before a route is in force."""

    name: str
    route: TeamRoute | None
    port: GatewayPortConfig
    is_moved: bool
    """Whether replicas with other settings of the port are replaced: they must have stopped."""
    changes_settings: bool


def _with_old_route(apps: Apps, config: GatewayConfig, refused: _Expected, old_entry: dict[str, Any] | None) -> Apps:
    """Returns the list of apps with this team routed as in the gateway's old entry, and the other teams as they are now.

    The settings of the port are the old ones, unless somebody else has changed them since.
    """
    gateway, player = gateway_apps(config)
    name = refused.name
    if gateway not in apps:
        return apps
    teams = {other: other_route for other, other_route in _teams_of(apps[gateway]).items() if other != name}
    if old_entry is None and not teams:
        return {app: entry for app, entry in apps.items() if app not in (gateway, player)}
    if old_entry is not None and name in (old_teams := _teams_of(old_entry)):
        teams[name] = old_teams[name]
    is_untouched = _port_of(apps[gateway]) == refused.port
    entry = old_entry if old_entry is not None and is_untouched else apps[gateway]
    edited = apps | {gateway: with_user_config(entry, user_config(teams))}
    if player in apps:
        edited[player] = with_user_config(apps[player], user_config(teams))
    return edited


def _wait_until_routed(config: GatewayConfig, expected: _Expected, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    name, num_replicas = expected.name, expected.port.num_replicas
    team_route = None if expected.route is None else expected.route.model_dump(mode="json")
    port = expected.port.model_dump(mode="json")
    while True:
        try:
            statuses = gateway_statuses(config)
        except TimeoutError:  # a replica is too busy to answer: ask again until the deadline
            statuses = []
        late = [status for status in statuses if status["teams"].get(name) != team_route or status["port"] != port]
        for status in late:
            # An error about this route, not about an earlier one or another team.
            if name in status["refused"] and status["refused"][name] == team_route:
                raise RouteError(f"gateway replica {status['replica_id']} refuses: {status['error']}")
        app = serve.status().applications.get(app_name(config))
        if len(statuses) >= num_replicas and not late and not (expected.is_moved and _is_changing(app)):
            break
        # The last line of a traceback has its cause.
        causes = [d.message.strip().rpartition("\n")[2] for d in app.deployments.values()] if app else []
        messages = "; ".join(causes) if app else "Serve has no such app"
        if app and app.status.value == "DEPLOY_FAILED":
            raise RouteError(f"the gateway on port {config.port} did not start: {messages}")
        if time.monotonic() > deadline:
            raise RouteError(
                f"after {timeout_s:g} s {len(statuses)} of {num_replicas} gateway replicas answer, and not all of them "
                f"follow the new route: {messages}"
            )
        with waiting(f"the gateway on port {config.port} to follow its new route"):
            time.sleep(POLL_S)
    if fault := next(filter(None, (status["keys_faults"].get(name) for status in statuses)), None):
        if expected.changes_settings:
            raise RouteError(f"the gateway on port {config.port} cannot read the keys of team {name!r}: {fault}")
        logger.warning("team %r: the keys of before stay in force: %s", name, fault)


def _is_changing(app: Any) -> bool:
    """Whether a replica of an app is about to start or to stop."""
    return app is None or any(set(d.replica_states) - {"RUNNING"} for d in app.deployments.values())


def _entry(config: GatewayConfig) -> dict[str, Any] | None:
    try:
        apps = deployed_apps()
    except ValueError:  # there is no list: nothing was ever deployed on this cluster
        return None
    return apps.get(app_name(config))


def _teams_of(entry: Mapping[str, Any]) -> dict[str, TeamRoute]:
    return parse_teams(entry["deployments"][0]["user_config"])


def _port_of(entry: Mapping[str, Any]) -> GatewayPortConfig:
    return GatewayPortConfig.model_validate(entry["args"])


def _settled(
    entry: Mapping[str, Any] | None, config: GatewayConfig, name: str, change: Change
) -> tuple[GatewayPortConfig, GatewayTeamConfig]:
    if config.keys_file:  # replicas run in other folders than commands
        config = config.model_copy(update={"keys_file": str(local_path(config.keys_file))})
    running = None if entry is None else _port_of(entry)
    teams = {} if entry is None else {other: team_route.settings for other, team_route in _teams_of(entry).items()}
    return settled(config, name, running=running, teams=teams, change=change)


def settled(
    config: GatewayConfig,
    name: str,
    *,
    running: GatewayPortConfig | None,
    teams: Mapping[str, GatewayTeamConfig],
    change: Change,
) -> tuple[GatewayPortConfig, GatewayTeamConfig]:
    """Returns the settings of the port and of team `name` on it; ValueError where the team's config may not have them.

    Args:
        config: of the team.
        running: the settings of the port now; None: nobody is on it.
        teams: the settings of all teams that are on it now, perhaps of this one, too.
    """
    if running is None:
        return config.of_port, config.of_team
    before, others = teams.get(name), {other: settings for other, settings in teams.items() if other != name}
    if change == "none" and before is not None:
        return running, before
    if change != "any":
        _refuse_other_port(config, name, running, others)
        _refuse_lost_protection(name, before or GatewayTeamConfig(), config.of_team)
    for other, settings in others.items():
        try:
            GatewayConfig(**_fields(config.of_port), **_fields(settings))
        except ValidationError as error:
            reason = str(error.errors()[0]["msg"])
            raise ValueError(
                f"team {other!r} shares gateway.port = {config.port}, and cannot stay there with the settings of team {name!r}: {reason}"
            ) from None
    return config.of_port, config.of_team


def _refuse_other_port(
    config: GatewayConfig, name: str, running: GatewayPortConfig, others: Mapping[str, GatewayTeamConfig]
) -> None:
    now = _fields(running)
    different = {field: value for field, value in _fields(config.of_port).items() if value != now[field]}
    if others and different:
        shown = "; ".join(
            f"gateway.{field} = {asked!r}, and {now[field]!r} there" for field, asked in different.items()
        )
        raise ValueError(
            f"team {name!r} would share gateway.port = {config.port} with {', '.join(map(repr, sorted(others)))}, and asks for other "
            f"settings of the port: {shown}. Set the same, take another gateway.port, or replace them for all teams with {OPTION}"
        )


def _refuse_lost_protection(name: str, before: GatewayTeamConfig, after: GatewayTeamConfig) -> None:
    if before.keys_file and not after.keys_file:
        raise ValueError(
            f"team {name!r} is served with gateway.keys_file = {before.keys_file}, and this config has none: everybody could ask it. "
            f"Set gateway.keys_file, or say {OPTION}"
        )
    if before.capture.redact and not after.capture.redact:
        raise ValueError(
            f"team {name!r} is served with gateway.capture.redact ({', '.join(before.capture.redact)}), and this config has none: what it "
            f"replaces would be stored. Set gateway.capture.redact, or say {OPTION}"
        )


def _fields(settings: GatewayPortConfig | GatewayTeamConfig) -> dict[str, Any]:
    return {field: getattr(settings, field) for field in type(settings).model_fields}

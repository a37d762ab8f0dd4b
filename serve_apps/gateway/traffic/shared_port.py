"""shared_port: what a team asks of a port that others may be on -> what holds there, or a refusal that names the fix.

    gateway section of a run config ─┬─ of_team ──> travels with the team's route, and concerns no other team
                                     └─ of_port ──> the port's, as long as no other team is on it; then it must be the same

No team loses a protection because another one was deployed, or because its own next config says nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError

from serve_apps.config import GatewayConfig, GatewayPortConfig, GatewayTeamConfig

Change = Literal["none", "compatible", "any"]
"""What a new route may change of the gateway's settings. `none`: a team that is there keeps its own and the port's, as for a promotion.
`compatible`: what takes nothing from anybody. `any`: what was asked for by name, with `troupe serve --replace-gateway`."""
OPTION = "--replace-gateway"


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
    is_shared = bool(others) and change != "any"
    if is_shared and (different := _differences(config.of_port, running)):
        raise ValueError(_refusal(name, different, others, config.port))
    if before is not None and change != "any":
        _refuse_lost_protection(name, before, config.of_team)
    for other, settings in others.items():
        try:
            GatewayConfig(**_fields(config.of_port), **_fields(settings))
        except ValidationError as error:
            reason = str(error.errors()[0]["msg"])
            raise ValueError(
                f"team {other!r} shares gateway.port = {config.port}, and cannot stay there with the settings of team {name!r}: {reason}"
            ) from None
    return config.of_port, config.of_team


def _differences(asked: GatewayPortConfig, running: GatewayPortConfig) -> dict[str, tuple[Any, Any]]:
    """Returns what is asked and what holds, by name, where they differ."""
    now = _fields(running)
    return {field: (value, now[field]) for field, value in _fields(asked).items() if value != now[field]}


def _refusal(
    name: str, different: Mapping[str, tuple[Any, Any]], others: Mapping[str, GatewayTeamConfig], port: int
) -> str:
    differences = "; ".join(
        f"gateway.{field} = {asked!r}, and {now!r} there" for field, (asked, now) in different.items()
    )
    return (
        f"team {name!r} would share gateway.port = {port} with {', '.join(map(repr, sorted(others)))}, and asks for other settings of "
        f"the port: {differences}. Set the same, take another gateway.port, or replace them for all teams with {OPTION}"
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

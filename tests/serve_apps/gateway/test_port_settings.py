"""What a team may ask of a port that others are on: nothing that they would notice, and nothing that it would lose itself."""

from __future__ import annotations

from typing import Any

import pytest

from serve_apps.config import GatewayConfig, GatewayPortConfig, GatewayTeamConfig
from serve_apps.gateway.routes import settled

pytestmark = pytest.mark.fast

KEYED = GatewayTeamConfig(keys_file="/a/keys.json")
OPEN = GatewayTeamConfig()
PORT = GatewayPortConfig()


def asked(change: Any = "compatible", *, running: Any = PORT, teams: Any = None, **settings: Any) -> Any:
    return settled(GatewayConfig(**settings), "b", running=running, teams=teams or {}, change=change)


def test_every_setting_is_of_the_team_or_of_the_port() -> None:
    of_team, of_port = set(GatewayTeamConfig.model_fields), set(GatewayPortConfig.model_fields)
    assert not of_team & of_port and of_team | of_port == set(GatewayConfig.model_fields)


def test_a_team_brings_its_own_settings_and_leaves_the_port_as_it_is() -> None:
    config = {"keys_file": "/b/keys.json", "allowed_origins": ("https://b.example",), "capture": {"share": 1.0}}
    port, team = asked(teams={"a": KEYED}, **config)
    assert port == PORT and team == GatewayConfig(**config).of_team


def test_who_is_first_or_alone_sets_the_port() -> None:
    for running, teams in ((None, {}), (PORT, {"b": OPEN}), (PORT, {})):
        port, _ = asked(running=running, teams=teams, max_in_flight=3)
        assert port.max_in_flight == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"num_replicas": 2},
        {"max_body_bytes": 10},
        {"host": "0.0.0.0", "keys_file": "/b/keys.json"},
        {"telemetry": {"endpoint": "http://collector:4318"}},
    ],
)
@pytest.mark.parametrize("teams", [{"a": KEYED}, {"a": KEYED, "b": OPEN}])
def test_other_settings_of_the_port_are_refused_with_both_values_and_the_fix(
    settings: dict[str, Any], teams: dict[str, GatewayTeamConfig]
) -> None:
    name, value = next(iter(settings.items()))
    with pytest.raises(ValueError, match=rf"'b' .*'a', .*gateway\.{name} = .* there.*--replace-gateway"):
        asked(teams=teams, **settings)
    port, _ = asked("any", teams=teams, **settings)
    assert getattr(port, name) == getattr(GatewayConfig(**settings), name) != getattr(PORT, name), value


def test_extensions_that_are_not_there_are_refused_and_the_setting_before_them_says_where_it_is() -> None:
    with pytest.raises(ValueError, match=r"there is no extension 'nothing' of the gateway; there are"):
        GatewayConfig(extensions=("nothing",))
    with pytest.raises(ValueError, match=r"is a name in gateway\.extensions now: write extensions: \[messages\]"):
        GatewayConfig.model_validate({"messages_api": True})
    assert GatewayPortConfig.model_validate({"messages_api": False}) == PORT, "as a gateway that runs may have it"


def test_a_default_that_is_not_what_holds_is_refused_too() -> None:
    with pytest.raises(ValueError, match="max_in_flight = 64, and 3 there"):
        asked(running=GatewayPortConfig(max_in_flight=3), teams={"a": KEYED})


def test_a_promotion_changes_nothing_whatever_its_config_says() -> None:
    teams = {"a": KEYED, "b": KEYED}
    assert asked("none", teams=teams, max_in_flight=3) == (PORT, KEYED)
    assert asked("none", teams={"a": KEYED}) == (PORT, OPEN), "a team that is not there yet brings its own"
    with pytest.raises(ValueError, match="max_in_flight"):
        asked("none", teams={"a": KEYED}, max_in_flight=3)


@pytest.mark.parametrize(
    ("before", "lost"),
    [
        (KEYED, "everybody could ask it"),
        (GatewayTeamConfig(capture={"redact": {"a": "b"}}), "would be stored"),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("others", [{}, {"a": KEYED}])
def test_a_team_loses_no_protection_because_its_next_config_says_nothing_of_it(
    before: GatewayTeamConfig, lost: str, others: dict[str, GatewayTeamConfig]
) -> None:
    with pytest.raises(ValueError, match=lost):
        asked(teams={"b": before, **others})
    assert asked("any", teams={"b": before, **others}) == (PORT, OPEN)


def test_nobody_opens_the_port_of_a_team_without_keys_to_other_machines() -> None:
    with pytest.raises(ValueError, match=r"team 'a' shares .* cannot stay there .*keys_file"):
        asked("any", teams={"a": OPEN}, host="0.0.0.0", keys_file="/b/keys.json")


def test_nobody_sends_texts_to_a_collector_that_another_team_redacts() -> None:
    redacted = GatewayTeamConfig(capture={"redact": {"a": "b"}})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="redact keeps out of the store"):
        asked("any", teams={"a": redacted}, telemetry={"endpoint": "http://c:4318", "texts": True})

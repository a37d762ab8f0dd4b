"""Which doors a request opens: those of the teams whose keys, hosts and pages it fits, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve_apps.config import GatewayTeamConfig
from serve_apps.gateway.traffic.callers import ApiKey, Callers, KeyRing, make_key, read_keys, write_keys
from serve_apps.openai_api.protocol import ApiError

pytestmark = pytest.mark.fast


def key_of(name: str) -> tuple[str, ApiKey]:
    return make_key(name)


class Port:
    """Teams a and b with keys of their own, one of which is in both files, and team c with none."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        (self.of_a, a), (self.of_b, b), (self.of_both, both) = key_of("web"), key_of("web"), key_of("both")
        write_keys(folder / "a.json", [a, both])
        write_keys(folder / "b.json", [b, both])
        self.settings: dict[str, dict[str, Any]] = {
            "a": {"keys_file": str(folder / "a.json")},
            "b": {"keys_file": str(folder / "b.json")},
            "c": {},
        }
        self.callers = Callers(host="127.0.0.1")
        self.admit(**settings)

    def admit(self, **settings: Any) -> None:
        merged = {name: {**own, **settings.get(name, {})} for name, own in self.settings.items()}
        self.callers.admit_to({name: GatewayTeamConfig(**own) for name, own in merged.items()})

    def opened(self, secret: str = "", *, host: str = "localhost:8000", **headers: str) -> set[str]:
        said = {"host": host, **headers} | ({"authorization": f"Bearer {secret}"} if secret else {})
        return set(self.callers.keys(said))


def test_a_key_opens_its_teams_and_those_that_need_none(tmp_path: Path) -> None:
    port = Port(tmp_path)
    assert port.opened(port.of_a) == {"a", "c"} and port.opened(port.of_b) == {"b", "c"}
    assert port.opened(port.of_both) == {"a", "b", "c"} and port.opened() == port.opened("troupe-guess") == {"c"}


def test_keys_of_one_name_in_two_files_have_two_holders_and_one_in_both_is_two(tmp_path: Path) -> None:
    port = Port(tmp_path)
    a = port.callers.keys({"host": "localhost", "authorization": f"Bearer {port.of_a}"})["a"]
    b = port.callers.keys({"host": "localhost", "authorization": f"Bearer {port.of_b}"})["b"]
    assert a.name == b.name and a.holder != b.holder
    assert port.callers.num == 2 + 2 + 1, "all callers without a key are one"


def test_an_expired_key_is_no_caller_and_a_time_that_is_none_is_refused(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.json", [key_of("web")[1], make_key("old", expires_at=1.0)[1]])
    assert KeyRing(tmp_path / "keys.json").num_callers == 1
    text = (tmp_path / "keys.json").read_text()
    (tmp_path / "keys.json").write_text(text.replace("1.0", "NaN"))
    with pytest.raises(ValueError, match="expires_at"):
        read_keys(tmp_path / "keys.json")


def test_keys_are_readable_by_their_owner_only_whatever_a_killed_write_left(tmp_path: Path) -> None:
    (tmp_path / ".keys.json.new").touch(mode=0o644)
    write_keys(tmp_path / "keys.json", [key_of("web")[1]])
    assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o600


def test_another_site_that_takes_this_machines_address_opens_no_team_without_keys(tmp_path: Path) -> None:
    port = Port(tmp_path, c={"allowed_hosts": ("Gateway.Internal",)})
    assert port.opened(port.of_a, host="evil.example:8000") == {"a"}
    assert port.opened(host="Gateway.Internal:8000") == port.opened(host="gateway.internal") == {"c"}
    with pytest.raises(ApiError, match="no API key"):
        port.opened(host="evil.example")


def test_a_callers_own_key_comes_before_none(tmp_path: Path) -> None:
    port = Port(tmp_path)
    port.settings = dict(reversed(port.settings.items()))
    port.admit()
    keys = port.callers.keys({"host": "localhost", "authorization": f"Bearer {port.of_a}"})
    assert [key.name for key in keys.values()] == ["web", "anyone"]


def test_a_page_reaches_the_teams_that_let_it_in(tmp_path: Path) -> None:
    port = Port(tmp_path, a={"allowed_origins": ("https://a.example",)}, b={"allowed_origins": ("*",)})
    assert port.opened(port.of_both, origin="https://a.example") == {"a", "b"}
    assert port.opened(port.of_both, origin="https://x.example") == {"b"}
    with pytest.raises(ApiError, match="may not call"):
        port.opened(port.of_a, origin="https://x.example")
    with pytest.raises(ApiError, match="no API key"):
        port.opened("", origin="https://x.example", host="evil.example")
    assert port.opened(port.of_a, origin="http://localhost:8000") == {"a", "c"}, "the dashboard's own"
    assert port.callers.let_in("https://x.example")


def test_a_page_that_nobody_lets_in_is_stopped_by_its_browser_as_ever(tmp_path: Path) -> None:
    port = Port(tmp_path)
    assert not port.callers.let_in("https://a.example") and port.opened(port.of_a, origin="https://a.example")


def test_keys_that_cannot_be_read_are_refused_and_all_doors_stay_as_they_are(tmp_path: Path) -> None:
    port = Port(tmp_path)
    with pytest.raises(ValueError, match=r"none\.json"):
        port.admit(b={"keys_file": str(tmp_path / "none.json")}, a={"keys_file": ""})
    assert port.opened() == {"c"} and port.opened(port.of_b) == {"b", "c"}


@pytest.mark.parametrize("is_below_a_file", [False, True])
def test_a_replica_that_begins_keeps_only_the_team_closed_whose_keys_cannot_be_read(
    tmp_path: Path, is_below_a_file: bool
) -> None:
    callers = Callers(host="127.0.0.1")
    file = tmp_path / "folder" / "keys.json"
    if is_below_a_file:
        file.parent.touch()
    callers.admit_to({"a": GatewayTeamConfig(keys_file=str(file)), "c": GatewayTeamConfig()})
    secret, key = key_of("web")
    headers = {"host": "localhost", "authorization": f"Bearer {secret}"}
    assert set(callers.keys(headers)) == {"c"} and "keys.json" in callers.refresh()["a"]
    if is_below_a_file:
        file.parent.unlink()
    write_keys(file, [key])
    assert callers.refresh() == {} and set(callers.keys(headers)) == {"a", "c"}


def test_keys_that_are_back_as_they_were_are_no_fault(tmp_path: Path) -> None:
    port = Port(tmp_path)
    (tmp_path / "a.json").rename(tmp_path / "away.json")
    assert "No such file" in port.callers.refresh()["a"] and port.opened(port.of_a) == {"a", "c"}
    (tmp_path / "away.json").rename(tmp_path / "a.json")
    assert port.callers.refresh() == {} and port.opened(port.of_a) == {"a", "c"}


def test_a_revoked_key_and_a_removed_team_are_out_at_once(tmp_path: Path) -> None:
    port = Port(tmp_path)
    write_keys(tmp_path / "a.json", [])
    port.callers.refresh()
    assert port.opened(port.of_a) == {"c"}
    del port.settings["c"], port.settings["b"]
    port.admit()
    with pytest.raises(ApiError, match="not known"):
        port.opened(port.of_b)
    port.callers.admit_to({})
    with pytest.raises(ApiError, match="no team is deployed"):
        port.opened(port.of_b)


def test_files_of_keys_whose_names_begin_alike_leave_each_other_alone(tmp_path: Path) -> None:
    names = ("keys.new", "keys.json", "keys")
    for name in names:
        write_keys(tmp_path / name, [key_of(name)[1]])
    assert [key.name for name in names for key in read_keys(tmp_path / name)] == list(names)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names)

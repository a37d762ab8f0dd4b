"""Two teams on one port of a real gateway: what one brings with it holds for it alone, from the command's end on, and disturbs nobody."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_scene import deployed_team
from servers import free_port
from waits import wait_until

from serve_apps.chat.tokenizer import load_tokenizer
from serve_apps.config import CaptureConfig, GatewayConfig
from serve_apps.gateway.routes import gateway_apps, gateway_statuses, route
from serve_apps.gateway.traffic.callers import ApiKey, make_key, write_keys
from serve_apps.gateway.traffic.teams import TeamRoute, TeamStores
from serve_apps.policy.app_list import change, open_list
from stores.traces.served import ServedStore
from tests.serve_apps.deployed_apps import remove_apps
from tests.serve_apps.speaking_app import speaker_entry

pytestmark = pytest.mark.nightly

SPEAKER = "speaker"
REDACT = {r"[\w.]+@[\w.]+": "<email>"}
MAIL: list[Any] = [{"role": "user", "content": "mail bob@example.com"}]


@pytest.fixture(scope="module")
def speaker(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, ray_local: None) -> Iterator[Path]:
    """The file of the list of apps, one of which speaks."""
    state_file = tmp_path_factory.mktemp("shared") / "apps.json"
    words = load_tokenizer(str(tiny_model)).encode("It is 42. ")
    change(open_list(state_file), lambda apps: apps | {SPEAKER: speaker_entry(SPEAKER, words)})
    yield state_file
    remove_apps([SPEAKER])


@dataclass
class Team:
    """A team, its config, and those who may ask it."""

    name: str
    model: Path
    folder: Path
    port: int
    settings: dict[str, Any] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir()

    @property
    def keys_file(self) -> Path:
        return self.folder / "keys.json"

    def give_keys(self, *names: str) -> None:
        made: list[ApiKey] = []
        for name in names:
            secret, key = make_key(name, scopes=("call", "feedback", "metrics", "admin"))
            self.secrets[name] = secret
            made.append(key)
        write_keys(self.keys_file, made)
        self.settings["keys_file"] = str(self.keys_file)

    def deploy(self, state_file: Path, **changes: Any) -> None:
        capture = CaptureConfig(share=1.0, flush_s=0.05, **self.settings.get("capture", {}))
        config = GatewayConfig(**{**self.settings, "port": self.port, "capture": capture})
        champion = deployed_team(self.model, 3, "blue", max_model_len=2048).model_copy(
            update={"apps": {"shared": SPEAKER}}
        )
        stores = TeamStores(run_id=self.name, traces=str(self.folder / "traces"), served=str(self.folder / "served"))
        team_route = TeamRoute(champion=champion, stores=stores)
        route(config, self.name, team_route, state_file=state_file, timeout_s=120, **changes)

    def chat(self, **more: Any) -> dict[str, Any]:
        return {"model": f"{self.name}/solver", "messages": MAIL, "max_tokens": 4, **more}

    def stored_prompts(self) -> set[str]:
        store = ServedStore(str(self.folder / "served"))
        return {trace.task.prompt for trace in store.find_traces()} if store.is_there() else set()


@contextmanager
def traffic(url: str, *asked: tuple[str, str, dict[str, Any]]) -> Iterator[dict[str, Counter[Any]]]:
    """Asks all the time, on new connections; yields how often each named question had which outcome."""
    outcomes: dict[str, Counter[Any]] = {name: Counter() for name, _, _ in asked}
    is_over = threading.Event()

    def ask(name: str, secret: str, body: dict[str, Any]) -> None:
        while not is_over.is_set():
            try:
                outcome: Any = httpx.post(f"{url}/v1/chat/completions", json=body, headers=bearer(secret), timeout=60)
                outcomes[name][outcome.status_code] += 1
            except httpx.HTTPError as error:
                outcomes[name][repr(error)] += 1

    threads = [threading.Thread(target=ask, args=question) for question in asked]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: all(outcomes.values()))
        yield outcomes
        before = {name: counter.total() for name, counter in outcomes.items()}
        wait_until(lambda: all(counter.total() > before[name] + 1 for name, counter in outcomes.items()))
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def statuses_at_each_replica(port: int, body: dict[str, Any], **headers: str) -> set[int]:
    """Asks every replica by itself."""
    addresses = [status["address"] for status in gateway_statuses(GatewayConfig(port=port))]
    return {
        httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code
        for address in addresses
    }


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"} if secret else {}


@pytest.fixture
def teams(tiny_model: Path, tmp_path: Path, speaker: Path) -> Iterator[dict[str, Team]]:
    port = free_port()
    guarded = Team("guarded", tiny_model, tmp_path / "guarded", port)
    guarded.settings = {"allowed_origins": ("https://a.example",), "num_replicas": 2}
    guarded.settings |= {"capture": {"redact": REDACT, "consent": "given"}}
    guarded.give_keys("web", "app")
    frank = Team("frank", tiny_model, tmp_path / "frank", port)
    frank.settings = {"allowed_origins": ("*",), "capture": {"consent": "given"}, "num_replicas": 2}
    frank.give_keys("web")
    yield {"guarded": guarded, "frank": frank}
    remove_apps(gateway_apps(GatewayConfig(port=port)))


@pytest.mark.parametrize("names", list(itertools.permutations(("guarded", "frank"))))
def test_a_team_is_deployed_beside_another_under_its_traffic(
    teams: dict[str, Team], names: tuple[str, str], speaker: Path
) -> None:
    first, second = (teams[name] for name in names)
    first.deploy(speaker)
    url = f"http://127.0.0.1:{first.port}"
    pids = {status["pid"] for status in gateway_statuses(GatewayConfig(port=first.port))}
    own, other = first.secrets["web"], second.secrets["web"]
    (address, _) = [status["address"] for status in gateway_statuses(GatewayConfig(port=first.port))]
    kept = httpx.post(
        f"{address}/v1/responses",
        json={"model": f"{first.name}/solver", "input": "hi"},
        headers=bearer(own),
        timeout=60,
    ).json()
    episode = httpx.post(f"{address}/v1/episodes", json={"team": first.name, "prompt": "7"}, headers=bearer(own)).json()
    asked = (
        ("own", own, first.chat()),
        ("nobody", "", first.chat()),
        ("other", other, first.chat()),
        ("second", other, second.chat()),
    )
    stream = httpx.Client(timeout=60).stream(
        "POST", f"{url}/v1/chat/completions", json=first.chat(stream=True, max_tokens=400), headers=bearer(own)
    )
    with traffic(url, *asked) as outcomes, stream as events:
        lines = events.iter_lines()
        assert next(lines).startswith("data: ")
        second.deploy(speaker)
        for secret, body, expected in (
            (other, second.chat(), {200}),
            (own, second.chat(), {404}),
            (other, first.chat(), {404}),
            ("", second.chat(), {401}),
            ("", first.chat(), {401}),
        ):
            assert statuses_at_each_replica(first.port, body, **bearer(secret)) == expected
        assert [line for line in lines if line][-1] == "data: [DONE]", "a stream that had begun was not cut"
    assert set(outcomes["own"]) == {200} and set(outcomes["nobody"]) == {401}, outcomes
    assert set(outcomes["other"]) == {401, 404}, "404 once the key opens another team"
    assert set(outcomes["second"]) == {401, 200}, outcomes
    assert {status["pid"] for status in gateway_statuses(GatewayConfig(port=first.port))} == pids
    more = {"model": f"{first.name}/solver", "input": "and?", "previous_response_id": kept["id"]}
    assert httpx.post(f"{address}/v1/responses", json=more, headers=bearer(own), timeout=60).status_code == 200
    assert httpx.get(f"{url}{episode['base_url']}/models", headers=bearer(own)).status_code == 200
    wait_until(lambda: "mail bob@example.com" in teams["frank"].stored_prompts())
    wait_until(lambda: "mail <email>" in teams["guarded"].stored_prompts())
    assert not [text for text in teams["guarded"].stored_prompts() if "bob@" in text]
    for page, team, is_let_in in (("https://b.example", "guarded", False), ("https://b.example", "frank", True)):
        asked_of = teams[team]
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json=asked_of.chat(),
            headers={**bearer(asked_of.secrets["web"]), "Origin": page},
            timeout=60,
        )
        assert (answer.status_code == 200) is is_let_in, answer.text


def test_what_a_team_changes_of_itself_is_in_force_when_the_command_ends(teams: dict[str, Team], speaker: Path) -> None:
    guarded, frank = teams["guarded"], teams["frank"]
    guarded.deploy(speaker)
    frank.deploy(speaker)
    revoked, url = guarded.secrets["app"], f"http://127.0.0.1:{guarded.port}"
    with traffic(
        url, ("frank", frank.secrets["web"], frank.chat()), ("guarded", guarded.secrets["web"], guarded.chat())
    ) as outcomes:
        keys = json.loads(guarded.keys_file.read_text())
        guarded.keys_file.write_text(json.dumps([key for key in keys if key["name"] != "app"]))
        guarded.deploy(speaker)
        assert statuses_at_each_replica(guarded.port, guarded.chat(), **bearer(revoked)) == {401}
        guarded.settings["allowed_origins"] = ()
        guarded.deploy(speaker)
        page = {"Origin": "https://a.example"}
        assert statuses_at_each_replica(guarded.port, guarded.chat(), **bearer(guarded.secrets["web"]), **page) == {403}
        frank.settings["keys_file"] = ""
        with pytest.raises(ValueError, match="everybody could ask it"):
            frank.deploy(speaker)
        frank.deploy(speaker, change="any")
        assert statuses_at_each_replica(guarded.port, frank.chat()) == {200}
        assert statuses_at_each_replica(guarded.port, guarded.chat()) == {401}
        frank.keys_file.write_text("no keys")
        frank.settings["keys_file"] = str(frank.keys_file)
        with pytest.raises(Exception, match=r"refuses: gateway\.keys_file"):
            frank.deploy(speaker)
        assert statuses_at_each_replica(guarded.port, frank.chat()) == {200}, "it stays as it was"
    assert all(set(outcome) == {200} for outcome in outcomes.values()), outcomes


def test_other_settings_of_the_port_are_refused_or_replaced_by_name_without_a_gap(
    teams: dict[str, Team], speaker: Path
) -> None:
    guarded, frank = teams["guarded"], teams["frank"]
    guarded.deploy(speaker)
    frank.settings["max_body_bytes"] = 3000
    with pytest.raises(ValueError, match=r"'guarded'.*max_body_bytes = 3000, and 2000000 there.*--replace-gateway"):
        frank.deploy(speaker)
    url, before = f"http://127.0.0.1:{guarded.port}", gateway_statuses(GatewayConfig(port=guarded.port))
    with traffic(url, ("guarded", guarded.secrets["web"], guarded.chat())) as outcomes:
        frank.deploy(speaker, change="any")
        long = guarded.chat(user="x" * 4000)
        assert statuses_at_each_replica(guarded.port, long, **bearer(guarded.secrets["web"])) == {413}
    after = gateway_statuses(GatewayConfig(port=guarded.port))
    assert {status["pid"] for status in after}.isdisjoint(status["pid"] for status in before) and len(after) == 2
    assert set(outcomes["guarded"]) == {200}, "a replica listens before the one that it replaces stops"

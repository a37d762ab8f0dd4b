"""This machine is asked directly where HTTP_PROXY is set for every process and NO_PROXY is not."""

from __future__ import annotations

import os
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from pipelines.config.run_config import load_config
from stores.urls import ask_directly, direct_hosts, direct_mounts, is_loopback, without_secrets

pytestmark = pytest.mark.fast

NOWHERE = "http://127.0.0.1:9"
NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
DEMO = Path(__file__).parents[2] / "infra/runs/demo.yaml"


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> str:
    """A proxy for everything, at an address where none answers."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, NOWHERE if "ttp" in name.lower() else "")
    return NOWHERE


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"here")

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def served() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("addresses", "is_own"),
    [
        (["127.0.0.1:1", "127.1.2.3", "http://127.0.0.1:8265", "localhost:1", "http://[::1]:5/x", "[::1]:5"], True),
        (
            ["", "head:1", "10.0.0.1:1", "http://127.0.0.1.example.org", "http://a@b", "sqlite:////m.db", "http://[x"],
            False,
        ),
    ],
)
def test_the_loopback_interface_is_known(addresses: list[str], is_own: bool) -> None:
    assert {address: is_loopback(address) for address in addresses} == dict.fromkeys(addresses, is_own)


def test_what_is_excluded_already_stays_so() -> None:
    assert direct_hosts({"NO_PROXY": "a"}) == {}
    both = direct_hosts({"HTTPS_PROXY": "x", "NO_PROXY": "a, b", "no_proxy": "c"}, "10.0.0.7")
    assert both == dict.fromkeys(("no_proxy", "NO_PROXY"), "c,a,b,127.0.0.1,localhost,::1,10.0.0.7")
    assert direct_hosts({"http_proxy": "x", **both}, "10.0.0.7") == both


@pytest.mark.test
def test_libraries_that_read_the_environment_ask_this_machine_directly(proxy: str, served: str) -> None:
    import requests

    # `urlopen` keeps the proxies of its first call in a process, which a test before this one may have made
    with pytest.raises(OSError):
        urllib.request.build_opener().open(served, timeout=5)
    ask_directly("http://10.0.0.7:8265")
    assert "10.0.0.7" in os.environ["NO_PROXY"].split(",")
    assert urllib.request.build_opener().open(served, timeout=5).read() == b"here"
    assert requests.get(served, timeout=5).text == "here"  # Ray's and MLflow's clients
    assert httpx.get(served, timeout=5).text == "here"
    with pytest.raises(OSError):
        requests.get("http://example.invalid", timeout=5)


@pytest.mark.test
def test_a_client_asks_this_machine_directly_and_others_by_the_proxy(proxy: str, served: str) -> None:
    with httpx.Client(mounts=direct_mounts([served, "http://example.invalid/x", "http://[::1]:1"])) as http:
        assert http.get(served).text == "here"
        with pytest.raises(httpx.ConnectError, match=r"\[Errno 111\]"):  # of the proxy, not of a name that is not known
            http.get("http://example.invalid/x")


@pytest.mark.parametrize("name", ["no_proxy", "NO_PROXY"])
@pytest.mark.parametrize("value", ["*", " * ", "*,internal"])
def test_what_excludes_everything_goes_on_excluding_everything(
    name: str, value: str, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = direct_hosts({"HTTP_PROXY": proxy, name: value}, "10.0.0.1")
    assert changed == {"no_proxy": "*", "NO_PROXY": "*"}
    monkeypatch.setenv(name, value)
    ask_directly("http://10.0.0.1:8265")
    assert urllib.request.proxy_bypass("elsewhere.example")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql+psycopg://troupe:s3cret@host/troupe", "postgresql+psycopg://troupe:...@host/troupe"),
        (
            "postgresql://troupe@host/d?password=s3cret&sslmode=require",
            "postgresql://troupe@host/d?password=...&sslmode=require",
        ),
        ("s3://key:s3cret/x@bucket", "s3://key:s3cret/x@bucket"),
        ("s3://key:s3cret@bucket/a", "s3://key:...@bucket/a"),
        ("https://h/a?X-Amz-Security-Token=s3cret", "https://h/a?X-Amz-Security-Token=..."),
        ("mongodb://u:p@s3cret@host/d", "mongodb://u:...@host/d"),
        ("redis://:s3cret@host", "redis://:...@host"),
        ("two http://a:s3cret@b and http://c:s3cret@d", "two http://a:...@b and http://c:...@d"),
        ("sqlite:///a/b.db", "sqlite:///a/b.db"),
        ("http://127.0.0.1:5000/a?token_count=3", "http://127.0.0.1:5000/a?token_count=3"),
        ("mail a:b@c", "mail a:b@c"),
    ],
)
def test_a_password_is_replaced_and_nothing_else(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("storage.journal", "postgresql+psycopg://troupe:s3cret@host/troupe"),
        ("storage.journal", "postgresql+psycopg://troupe@host/troupe?password=s3cret"),
        ("storage.mlflow", "http://me:s3cret@mlflow:5000"),
        ("model_groups.solver_verifier.model", "s3://key:s3cret@bucket/model"),
        ("workflow.settings", {"environment": {"DATABASE_URL": "postgresql://a:s3cret@h/d"}}),
        ("cluster.address", "http://me:s3cret@head:8265"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_run_config_with_a_password_is_refused_and_does_not_show_it(key: str, value: object) -> None:
    with pytest.raises(ValueError, match="holds a password, and a run config is stored and shown") as refused:
        load_config(DEMO, {key: value})
    assert "s3cret" not in str(refused.value) and key.split(".")[0] in str(refused.value)

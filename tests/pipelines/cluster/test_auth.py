"""Whose token a command gives to which cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.cluster.auth import auth_token
from stores.proxies import is_loopback

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    "address", ["127.0.0.1:6399", "localhost:1", "[::1]:6399", "http://127.0.0.1:8265", "http://localhost"]
)
def test_the_loopback_interface_is_this_machine(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["", "auto", "head:6379", "http://head:8265", "http://127.0.0.1.example.org:8265"])
def test_another_host_gets_no_token_unasked(address: str) -> None:
    assert not is_loopback(address)


def test_the_variable_goes_before_the_file_and_disabled_before_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert auth_token() == ""
    (tmp_path / "token").write_text("of the file\n")
    assert auth_token() == "of the file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the variable")
    assert auth_token() == "of the variable"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert auth_token() == ""

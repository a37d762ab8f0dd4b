"""Whose token a command gives to which cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.cluster.auth import auth_token, keep_token_private
from stores.urls import is_loopback

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


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a token, and an environment without one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_new_token_is_its_owners_alone_whatever_the_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        keep_token_private()
    finally:
        os.umask(before)
    file = home / ".ray" / "auth_token"
    assert file.stat().st_mode & 0o777 == 0o600
    assert auth_token() == file.read_text() and len(auth_token()) == 64
    keep_token_private()
    assert auth_token() == file.read_text(), "running heads know it"


def test_a_token_that_ray_left_open_to_others_is_closed_and_stays_the_same(home: Path) -> None:
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("f" * 64)
    (home / ".ray" / "auth_token").chmod(0o644)
    keep_token_private()
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    assert auth_token() == "f" * 64


@pytest.mark.parametrize(("name", "value"), [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "a" * 64)])
def test_without_need_no_token_is_written(home: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    keep_token_private()
    assert list(home.iterdir()) == []


@pytest.mark.nightly
def test_a_local_head_takes_the_token_and_leaves_it_private(home: Path) -> None:
    script = "import os, pipelines.cluster.connect as cluster\nos.umask(0)\ncluster.connect()\n"
    script += "import ray\nprint(ray.get(ray.remote(lambda: 'ran').remote()))\ncluster.disconnect()\n"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("ran"), done.stderr[-2000:]
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600

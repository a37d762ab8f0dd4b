"""What the log says of failed episodes."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pipelines.cluster import observe
from pipelines.cluster.observe import Observer, log_failed, tell
from stores.extensions import Extension
from stores.types import Cause, EpisodeStatus

pytestmark = pytest.mark.fast


def test_a_failed_episode_is_logged_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    failed: Any = SimpleNamespace(
        episode_id="e1",
        status=EpisodeStatus.AGENT_ERROR,
        stop_reason="workflow_raised",
        cause=Cause.POLICY,
        attempt=1,
        error="secret",
    )
    sound: Any = SimpleNamespace(episode_id="e2", status=EpisodeStatus.TRUNCATED)
    log_failed([sound, failed])
    line = "episode ended as agent_error (workflow_raised), caused by policy, attempt 1"
    assert caplog.messages == [line]
    log_failed([failed] * 50, is_last=False)
    log_failed([failed] * 50)
    assert caplog.messages[1:] == [line] * 10 + ["... and 90 more like these"]


class _Broken(Observer):
    def champion(self, run_id: str, version: int) -> None:
        raise RuntimeError("the text of a prompt")


class _Heard(Observer):
    def __init__(self) -> None:
        self.champions: list[tuple[str, int]] = []

    def champion(self, run_id: str, version: int) -> None:
        self.champions.append((run_id, version))


def test_an_observer_that_raises_is_named_and_the_next_one_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard = _Heard()
    monkeypatch.setattr(observe, "observers", lambda: [_Broken(), heard])
    tell(Observer.champion, "demo", 3)
    assert heard.champions == [("demo", 3)]
    assert "observer _Broken.champion raised RuntimeError at " in caplog.text and "test_observe.py" in caplog.text
    assert "the text of a prompt" not in caplog.text


class _Unmade(Observer):
    def __init__(self) -> None:
        raise OSError("no meter at 127.0.0.1:1")


def test_an_observer_that_cannot_be_made_is_named_and_the_next_one_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    added = [Extension(name="bad", observer="mine:Unmade"), Extension(name="good", observer="mine:Heard")]
    mine = ModuleType("mine")
    mine.__dict__.update(Unmade=_Unmade, Heard=_Heard)
    monkeypatch.setitem(sys.modules, "mine", mine)
    monkeypatch.setattr(observe, "extensions", lambda: added)
    observe.observers.cache_clear()
    try:
        tell(Observer.champion, "demo", 3)
        (heard,) = observe.observers()
    finally:
        observe.observers.cache_clear()
    assert isinstance(heard, _Heard) and heard.champions == [("demo", 3)]
    assert "the observer of extension bad is left out: no meter at 127.0.0.1:1" in caplog.text

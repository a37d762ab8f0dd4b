"""What the log says of failed episodes."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.cluster.observe import log_failed
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

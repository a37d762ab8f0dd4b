"""A task that the workflow refuses is the caller's fault over MCP, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve_apps.extensions.mcp_server.test_mcp_api import session
from tests.serve_apps.gateway.test_callers_tasks import CODE, scene_of

pytestmark = [pytest.mark.test, pytest.mark.anyio]


async def test_a_task_that_the_workflow_cannot_play_is_refused_and_counts_for_no_team(tiny_model: Path) -> None:
    scene = scene_of(tiny_model, CODE)
    async with session(scene) as client:
        result = await client.call_tool("demo", {"prompt": "Add two numbers.", "metadata": {"tests": 5}})
    assert result.is_error and "tests" in result.content[0].text  # type: ignore[union-attr]
    assert scene.service.figures() == [] and scene.service.admission.num_in_flight == 0

"""Requests as clients sent them: 165 bodies that 15 frameworks, and OpenAI's client with what it can say, sent by their own defaults.

They were recorded by a server that answers anything, and on their way to a gateway (tests/clients/recorded_bodies.jsonl: client, path, body).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_apps.gateway.traffic.teams import TeamRoute
from tests.serve_apps.gateway_scene import Scene, deployed_team

BODIES = Path(__file__).parents[2] / "clients" / "recorded_bodies.jsonl"


def recorded() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for line in BODIES.read_text().splitlines():
        record = json.loads(line)
        yield record["client"], record["path"], record["body"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.nightly
@pytest.mark.anyio
async def test_every_recorded_body_is_answered(tiny_model: Path) -> None:
    scene = Scene(tiny_model)
    scene.serve(TeamRoute(champion=deployed_team(tiny_model, 3, "blue", max_model_len=8192)))
    refused = []
    async with scene.http() as client:
        for number, (name, path, body) in enumerate(recorded(), 1):
            answer = await client.post(path, json=body)
            if answer.status_code != 200:
                refused.append(f"line {number} ({name}): {answer.status_code} {answer.text[:300]}")
    assert not refused, "\n".join(refused)
    assert number >= 100

"""A set of policy apps whose replicas are all gone: every API answers 503 in its own form, and says when to ask again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import Scene

from serve_apps.config import CallConfig
from serve_apps.policy.policy_stream import ServeStreams
from serve_apps.policy.serve_client import ServeClient

pytestmark = [pytest.mark.test, pytest.mark.anyio]

REPLICA_TIMEOUT_S = 0.05


class NoReplicas:
    """Stands for a Serve handle of an app without a replica, and for a call that nobody takes."""

    num_cancelled = 0

    def remote(self, *_: Any) -> NoReplicas:
        return self

    async def _to_object_ref_gen(self) -> None:
        await asyncio.Event().wait()

    async def __aiter__(self) -> AsyncIterator[Any]:
        await self._to_object_ref_gen()
        yield None

    def cancel(self) -> None:
        self.num_cancelled += 1


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (
            "chat/completions",
            {"model": "demo/solver", "messages": [{"role": "user", "content": "6*7"}]},
            "server_error",
        ),
        ("completions", {"model": "demo/group/shared", "prompt": "6*7"}, "server_error"),
        ("responses", {"model": "demo/solver", "input": "6*7"}, "server_error"),
        (
            "messages",
            {"model": "demo/solver", "max_tokens": 8, "messages": [{"role": "user", "content": "6*7"}]},
            "api_error",
        ),
        ("workflows/demo/runs", {"prompt": "6*7"}, "server_error"),
    ],
)
async def test_a_set_without_a_replica_is_said_soon_and_in_the_form_of_the_api(
    tiny_model: Path, path: str, body: dict[str, Any], kind: str
) -> None:
    scene, app = Scene(tiny_model, extensions=("messages",)), NoReplicas()
    scene.service.streams = ServeStreams(replica_timeout_s=REPLICA_TIMEOUT_S, open_app=lambda _: app)
    scene.service.client = lambda team: ServeClient(  # type: ignore[method-assign, assignment]
        team.apps, CallConfig(), open_app=lambda _: app, replica_timeout_s=REPLICA_TIMEOUT_S
    )
    async with scene.http() as http:
        answer = await http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 503 and float(answer.headers["retry-after"]) > 0, answer.text
    error = answer.json()["error"]
    assert (
        error["type"] == kind and "no replica of app 'demo-blue-shared' took the call within 0.05 s" in error["message"]
    )
    assert app.num_cancelled > 0, "a replica that comes back has nothing to do for a caller who was told"


class Cancelled(NoReplicas):
    """Stands for a call that Serve cancels: a replica has taken it, and ends."""

    async def _to_object_ref_gen(self) -> None:
        raise asyncio.CancelledError


async def test_a_call_that_serve_cancels_is_an_answer_as_well(tiny_model: Path) -> None:
    scene = Scene(tiny_model)
    scene.service.streams = ServeStreams(open_app=lambda _: Cancelled())
    async with scene.http() as http:
        body = {"model": "demo/solver", "messages": [{"role": "user", "content": "6*7"}]}
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 503 and "Serve cancelled the call" in answer.json()["error"]["message"]

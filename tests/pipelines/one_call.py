"""A workflow of one call, and a policy app without an engine: what tests of sampling and of the watchdog run on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray import serve

from serve_apps.authoring.agent import Agent
from serve_apps.authoring.contracts import Tags
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.engines.port import Piece
from stores.types import GenerateRequest, Task

NUM_TOKENS = 5
"""Of every completion."""
SLOW_FROM = 60
"""Prompt tokens from which on a call takes `slow_s`."""


class OneCall(Workflow):
    """One agent, asked once."""

    solver = Agent(prompt="{question}", contract=Tags("ANSWER"))

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Whatever the agent says."""
        reply = await agents.solver(question=task.prompt)
        return Outcome(answer=reply.text)


@serve.deployment(ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=1000, graceful_shutdown_timeout_s=1)
class FakePolicy:
    """Answers each request after a while, all at once."""

    def __init__(self, fast_s: float, slow_s: float) -> None:
        self._fast_s, self._slow_s = fast_s, slow_s

    async def generate(self, requests: list[GenerateRequest]) -> AsyncIterator[list[tuple[int, Piece]]]:
        """Streams results as `Policy.generate` does."""
        tasks = [asyncio.create_task(self._answer(place, request)) for place, request in enumerate(requests)]
        for finished in asyncio.as_completed(tasks):
            yield [await finished]

    async def _answer(self, place: int, request: GenerateRequest) -> tuple[int, Piece]:
        await asyncio.sleep(self._slow_s if len(request.prompt_token_ids) >= SLOW_FROM else self._fast_s)
        return place, Piece([1] * NUM_TOKENS, [-0.5] * NUM_TOKENS, "stop", 0)


def deploy(name: str, *, fast_s: float, slow_s: float) -> None:
    """Runs the fake as the Serve application `name`."""
    serve.run(FakePolicy.bind(fast_s, slow_s), name=name, route_prefix=None)

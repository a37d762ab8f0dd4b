"""Shadow requests: they are sent in batches, no more than allowed are open, and each gets a result, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import Scene
from waits import until

from serve_apps.gateway.traffic.shadowing import Shadowing, ShadowJob, ShadowResult
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.protocol import ApiError

pytestmark = [pytest.mark.test, pytest.mark.anyio]


def job(number: int = 0, *, version: int = 4, model: str = "demo/solver") -> ShadowJob:
    request = ChatRequest.model_validate({"model": model, "messages": [{"role": "user", "content": "What is 6*7?"}]})
    about: dict[str, Any] = {"team": "demo", "team_version": version, "set_name": "green"}
    return ShadowJob(**about, request=request, task_id=f"task{number}", is_kept=False)


class Waiting:
    """A Player that answers once the test allows it."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def play_jobs(self, jobs: Sequence[ShadowJob]) -> list[ShadowResult]:
        self.batches.append([job.task_id for job in jobs])
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return [ShadowResult(outcome="answered", figures={"completion_tokens": float(job.task_id[4:])}) for job in jobs]


async def test_jobs_are_sent_in_batches_and_each_gets_its_own_result() -> None:
    player, results = Waiting(), dict[int, ShadowResult]()
    shadowing = Shadowing(player, max_open=4, batch_wait_s=0.1)
    added = [shadowing.add(job(k), lambda result, k=k: results.update({k: result})) for k in range(3)]  # type: ignore[misc]
    await until(lambda: player.batches)
    added += [shadowing.add(job(k), lambda result, k=k: results.update({k: result})) for k in range(3, 6)]  # type: ignore[misc]
    assert added == [True] * 4 + [False] * 2, "four may be open"
    await until(lambda: len(player.batches) > 1)
    assert player.batches == [["task0", "task1", "task2"], ["task3"]] and results == {}
    player.may_answer.set()
    await until(lambda: len(results) == 4)
    assert {k: result.figures["completion_tokens"] for k, result in results.items()} == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}
    assert shadowing.add(job(), lambda _: None), "further ones are taken again"


async def test_jobs_of_a_player_that_raises_are_dropped_and_no_longer_open() -> None:
    player, results, faults = Waiting(), list[ShadowResult](), list[Exception]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
    player.error = KeyError("a bug")
    player.may_answer.set()
    shadowing = Shadowing(player, max_open=1, batch_wait_s=0.1)
    assert shadowing.add(job(), results.append)
    await until(lambda: faults)
    assert [result.outcome for result in results] == ["dropped"]
    assert faults == [player.error], "it is not hidden"
    assert shadowing.add(job(), results.append)


async def test_the_error_of_one_job_does_not_touch_the_others_of_its_batch(tiny_model: Path) -> None:
    scene = Scene(tiny_model)
    scene.serve_both(shadow=1.0)
    jobs = [job(0), job(1, version=5), job(2, model="demo/nobody"), job(3)]
    results = await scene.shadow_player.play_jobs(jobs)
    assert [result.outcome for result in results] == ["answered", "dropped", "failed", "answered"]
    scene.streams.error = KeyError("a bug")
    assert [result.outcome for result in await scene.shadow_player.play_jobs(jobs[:2])] == ["failed", "dropped"]


async def test_a_process_that_is_busy_says_nothing_of_the_candidate(tiny_model: Path) -> None:
    scene = Scene(tiny_model)
    scene.serve_both(shadow=1.0)
    scene.streams.error = ApiError(429, "too many forms are being tried", code="overloaded")
    assert [result.outcome for result in await scene.shadow_player.play_jobs([job()])] == ["dropped"]


async def test_a_shadow_request_is_sampled_whole_and_without_logprobs(tiny_model: Path) -> None:
    scene = Scene(tiny_model)
    scene.serve_both(shadow=1.0)
    shadow_job = job()
    seen = {"stream": True, "logprobs": True, "top_logprobs": 2}
    shadow_job = replace(shadow_job, request=shadow_job.request.model_copy(update=seen))
    (result,) = await scene.shadow_player.play_jobs([shadow_job])
    (asked,) = scene.streams.requests
    assert result.outcome == "answered" and not asked.is_streamed and asked.top_logprobs == 0

"""Shadows on their way: several go at once, no more than there is room for, and each one's end is told, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import Scene, arm

from serve_apps.gateway.shadowing import Played, Shadowing, ShadowJob
from serve_apps.gateway.teams import TeamRoute
from serve_apps.openai_api.protocol import ChatRequest

pytestmark = pytest.mark.anyio


def job(number: int = 0, *, version: int = 4, model: str = "demo/solver") -> ShadowJob:
    request = ChatRequest.model_validate({"model": model, "messages": [{"role": "user", "content": "What is 6*7?"}]})
    about: dict[str, Any] = {"team": "demo", "team_version": version, "set_name": "green"}
    return ShadowJob(**about, request=request, task_id=f"task{number}", is_kept=False)


class Waiting:
    """A Player that answers when it is told to."""

    def __init__(self) -> None:
        self.parcels: list[list[str]] = []
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def play(self, jobs: Sequence[ShadowJob]) -> list[Played]:
        self.parcels.append([one.task_id for one in jobs])
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return [Played(outcome="answered", figures={"completion_tokens": float(one.task_id[4:])}) for one in jobs]


async def test_jobs_go_together_and_each_is_told_its_own_end() -> None:
    player, told = Waiting(), dict[int, Played]()
    shadowing = Shadowing(player, max_open=4, parcel_s=0.1)
    added = [shadowing.add(job(k), lambda played, k=k: told.update({k: played})) for k in range(3)]  # type: ignore[misc]
    await asyncio.sleep(0.2)
    added += [shadowing.add(job(k), lambda played, k=k: told.update({k: played})) for k in range(3, 6)]  # type: ignore[misc]
    assert added == [True] * 4 + [False] * 2, "there is room for four"
    await asyncio.sleep(0.2)
    assert player.parcels == [["task0", "task1", "task2"], ["task3"]] and told == {}
    player.may_answer.set()
    await asyncio.sleep(0.05)
    assert {k: played.figures["completion_tokens"] for k, played in told.items()} == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}
    assert shadowing.add(job(), lambda _: None), "their room is free again"


async def test_a_player_that_breaks_has_dropped_them_and_their_room_is_free() -> None:
    player, told, faults = Waiting(), list[Played](), list[Exception]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
    player.error = KeyError("a bug")
    player.may_answer.set()
    shadowing = Shadowing(player, max_open=1, parcel_s=0.1)
    assert shadowing.add(job(), told.append)
    await asyncio.sleep(0.2)
    assert [played.outcome for played in told] == ["dropped"]
    assert faults == [player.error], "it is not hidden"
    assert shadowing.add(job(), told.append)


async def test_what_is_wrong_with_one_job_is_not_the_fault_of_those_that_came_with_it(tiny_model: Path) -> None:
    scene = Scene(tiny_model)
    scene.serve(TeamRoute(champion=arm(tiny_model, 3, "blue"), candidate=arm(tiny_model, 4, "green"), shadow=1.0))
    jobs = [job(0), job(1, version=5), job(2, model="demo/nobody"), job(3)]
    played = await scene.shadow_player.play(jobs)
    assert [one.outcome for one in played] == ["answered", "dropped", "failed", "answered"]
    scene.streams.error = KeyError("a bug")
    assert [one.outcome for one in await scene.shadow_player.play(jobs[:2])] == ["failed", "dropped"]


async def test_nobody_watches_a_shadow_and_so_it_is_sampled_as_a_whole(tiny_model: Path) -> None:
    scene = Scene(tiny_model)
    scene.serve(TeamRoute(champion=arm(tiny_model, 3, "blue"), candidate=arm(tiny_model, 4, "green"), shadow=1.0))
    one = job()
    seen = {"stream": True, "logprobs": True, "top_logprobs": 2}
    one = replace(one, request=one.request.model_copy(update=seen))
    (played,) = await scene.shadow_player.play([one])
    (asked,) = scene.streams.requests
    assert played.outcome == "answered" and asked.is_whole and asked.top_logprobs == 0

"""What callers give as tasks of a workflow: nonsense is their error, is said before anything runs, and counts for no team."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gateway_scene import Engine, Scene, deployed_team

from serve_apps.authoring.agent import Agent, Tool
from serve_apps.authoring.fair_lanes import CALLER
from serve_apps.authoring.workflow import Outcome, Workflow
from serve_apps.config import EpisodeConfig
from serve_apps.episode.team import TeamSpec
from serve_apps.gateway.calls.workflow_runs import episode_spec, stream_workflow
from serve_apps.gateway.shadow.shadows_app import ShadowPlayer
from serve_apps.gateway.traffic.callers import ANYONE
from serve_apps.gateway.traffic.shadowing import ShadowJob
from serve_apps.gateway.traffic.teams import TeamRoute
from serve_apps.openai_api.protocol import RunRequest
from stores.types import Sampling, Task

pytestmark = [pytest.mark.test, pytest.mark.anyio]

CODE = "pipelines.extensions.code_tasks.reflective_code:ReflectiveCode", ("planner", "coder", "reflector")
HOUSEHOLD = "pipelines.examples.household.workflow:Household", ("planner", "actor")
STEPS = "pipelines.examples.small_sums.workflow:TwoSteps", ("first", "second")
CASES = [{"input": "1 2", "output": "3"}]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(CASES)))).decode()
RAISES = "def check(given, expected, actual): raise ValueError"


class Careless(Workflow):
    """Reads metadata that it did not check, after a turn."""

    solver = Agent(prompt="{question}")

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns what the task says that the answer is."""
        await agents.solver(question=task.prompt)
        return Outcome(answer=task.metadata["says"])


class Confused(Careless):
    """Has a check that reads what may not be there."""

    def check_task(self, task: Task, place: str) -> None:
        """Raises whatever comes."""
        if task.metadata["says"] == 0:
            raise RuntimeError("a bug")
        if not task.metadata["says"]["it"].strip():
            raise ValueError(f"{place}: metadata.says.it is empty")


class Patient(Careless):
    """Waits for as long as the task says."""

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Asks nobody."""
        await asyncio.sleep(task.metadata["seconds"])
        return Outcome(answer="")


class Curious(Careless):
    """Has a tool that says whose request it works for."""

    def __init__(self) -> None:
        self.tools = {"whose": Tool(self._whose)}

    async def run(self, task: Task, agents: Any, tools: Any) -> Outcome:
        """Returns what the tool says."""
        return Outcome(answer=(await tools.whose())["caller"])

    async def _whose(self) -> dict[str, str]:
        return {"caller": str(CALLER.get())}


CARELESS, CONFUSED, PATIENT, CURIOUS = (
    (f"{__name__}:{name}", ("solver",)) for name in ("Careless", "Confused", "Patient", "Curious")
)


def scene_of(model: Path, workflow: tuple[str, tuple[str, ...]], **spec_changes: Any) -> Scene:
    path, agents = workflow
    team = deployed_team(model, 3, "blue")
    team_spec = replace(
        TeamSpec.from_dict(team.team_spec),
        workflow=path,
        group_of=dict.fromkeys(agents, "shared"),
        sampling=dict.fromkeys(agents, Sampling(max_tokens=32)),
        **spec_changes,
    )
    spec = team_spec.to_dict()
    scene = Scene(model)
    candidate = deployed_team(model, 4, "green").model_copy(update={"team_spec": spec})
    scene.serve(TeamRoute(champion=team.model_copy(update={"team_spec": spec}), candidate=candidate, shadow=0.0))
    scene.service.client = lambda team: Engine(scene)  # type: ignore[assignment, method-assign, return-value]
    return scene


@pytest.mark.parametrize(
    ("workflow", "metadata", "said"),
    [
        (CODE, {}, "the task: tests are a list or an object, this is NoneType"),
        (CODE, {"tests": None}, "the task: tests are a list or an object, this is NoneType"),
        (CODE, {"tests": "x"}, "metadata.tests: 'x' is a text: give the tests as JSON values"),
        (CODE, {"tests": 5}, "the task: tests are a list or an object, this is int"),
        (CODE, {"tests": [[[]]]}, "the task: case 1 is list"),
        (CODE, {"tests": {"private_tests": PACKED}}, "is a text: give the tests as JSON values"),
        (CODE, {"tests": [{**CASES[0], "metadata": PACKED}]}, "is a text: give the tests as JSON values"),
        (CODE, {"tests": CASES * 10_000}, "metadata.tests: give tests of at most 200,000 characters"),
        (CODE, {"tests": {"tests": CASES, "checker_code": RAISES}}, "a checker is code that judges"),
        (CODE, {"tests": {"tests": CASES, "checker_type": "custom"}}, "checker 'custom' has no checker_code"),
        (STEPS, {}, "the task: metadata.first is no text"),
        (STEPS, {"first": "7 * 8"}, "the task: metadata.then is no text"),
        (STEPS, {"first": "7 * 8", "then": 5}, "the task: metadata.then is no text"),
        (CONFUSED, {}, "the task's metadata have no 'says'"),
        (CONFUSED, {"says": None}, "the workflow cannot read this task: TypeError"),
        (CONFUSED, {"says": {"it": 5}}, "the workflow cannot read this task: AttributeError"),
        (CONFUSED, {"says": {}}, "the workflow cannot read this task: KeyError"),
        (CONFUSED, {"says": 0}, "the workflow cannot read this task: RuntimeError: a bug"),
        (CONFUSED, {"says": {"it": " "}}, "the task: metadata.says.it is empty"),
    ],
)
async def test_a_task_that_the_workflow_cannot_play_is_refused_and_counts_for_no_team(
    tiny_model: Path, workflow: tuple[str, tuple[str, ...]], metadata: dict[str, Any], said: str
) -> None:
    scene = scene_of(tiny_model, workflow)
    body = {"prompt": "Add two numbers.", "user": "u3", "metadata": metadata}
    async with scene.http() as http:
        for stream in (False, True):
            refused = await http.post("/v1/workflows/demo/runs", json=body | {"stream": stream})
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert error["code"] == "invalid_task" and said in error["message"]
    assert scene.service.figures() == [] and scene.service.admission.num_in_flight == 0


async def test_tests_that_a_caller_may_give_are_played(tiny_model: Path) -> None:
    scene = scene_of(tiny_model, CODE)
    async with scene.http() as http:
        body = {"prompt": "Add two numbers.", "metadata": {"tests": CASES}}
        answer = await http.post("/v1/workflows/demo/runs", json=body)
    assert answer.status_code == 200 and answer.json()["turns"], answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_know_whose_request_they_work_for(tiny_model: Path, stream: bool) -> None:
    """`FairLanes` takes the work of callers in turns by it."""
    scene = scene_of(tiny_model, CURIOUS)
    async with scene.http() as http:
        answer = await http.post("/v1/workflows/demo/runs", json={"prompt": "a", "stream": stream})
    assert str(ANYONE.holder) in answer.text


async def test_metadata_that_a_workflow_reads_unchecked_and_a_caller_left_out_count_for_no_team(
    tiny_model: Path,
) -> None:
    scene = scene_of(tiny_model, CARELESS)
    async with scene.http() as http:
        told = (await http.post("/v1/workflows/demo/runs", json={"prompt": "a"})).json()
        assert (told["status"], told["cause"]) == ("agent_error", "author") and len(told["turns"]) == 1
        assert told["error"] == "MissingMetadata: the task's metadata have no 'says', which the workflow reads"
        assert scene.service.figures() == []
        sound = (await http.post("/v1/workflows/demo/runs", json={"prompt": "a", "metadata": {"says": "7"}})).json()
    assert (sound["status"], sound["cause"], sound["answer"]) == ("ok", "", "7")
    (figures,) = scene.service.figures()
    assert figures["sums"]["failure_share"] == [1, 0.0, 0.0]


async def test_a_task_that_takes_too_long_before_any_model_answers_counts_for_no_team(tiny_model: Path) -> None:
    scene = scene_of(tiny_model, PATIENT, limits=EpisodeConfig(episode_timeout_s=0.05))
    async with scene.http() as http:
        body = {"prompt": "a", "metadata": {"seconds": 30}}
        told = (await http.post("/v1/workflows/demo/runs", json=body)).json()
        streamed = (await http.post("/v1/workflows/demo/runs", json=body | {"stream": True})).text
    assert (told["status"], told["cause"]) == ("timeout", "author") and '"cause": "author"' in streamed
    assert scene.service.figures() == []


@pytest.mark.parametrize("workflow", [CARELESS, CONFUSED])
async def test_a_shadow_of_such_a_task_says_nothing_of_the_candidate(
    tiny_model: Path, workflow: tuple[str, tuple[str, ...]]
) -> None:
    scene = scene_of(tiny_model, workflow)
    request = RunRequest(prompt="a")
    about: dict[str, Any] = {"team": "demo", "team_version": 4, "set_name": "green", "task_id": "t", "is_kept": False}
    (result,) = await ShadowPlayer(scene.service).play_jobs([ShadowJob(request=request, **about)])
    assert result.outcome == "dropped"


async def test_a_workflow_in_simulated_worlds_is_not_run_for_callers_and_its_agents_answer(tiny_model: Path) -> None:
    scene = scene_of(tiny_model, HOUSEHOLD)
    async with scene.http() as http:
        refused = await http.post("/v1/workflows/demo/runs", json={"prompt": "put apple in table 1"})
        chat = {"model": "demo/planner", "messages": [{"role": "user", "content": "Task: put apple in table 1"}]}
        answered = await http.post("/v1/chat/completions", json=chat)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "simulated_world"
    assert "acts in worlds of home, which are simulated by workers" in refused.json()["error"]["message"]
    assert answered.status_code == 200, answered.text


async def test_a_caller_who_leaves_a_streamed_run_leaves_no_task_behind(tiny_model: Path) -> None:
    scene = scene_of(tiny_model, PATIENT)
    team, before, begun = scene.service.teams["demo"].champion, asyncio.all_tasks(), asyncio.Event()
    spec = episode_spec(team, RunRequest(prompt="a", metadata={"seconds": 60}))

    async def read() -> None:
        async for _ in stream_workflow(scene.service, team, spec, on_end=lambda _: None):
            begun.set()

    caller = asyncio.ensure_future(read())
    await begun.wait()
    caller.cancel()
    with suppress(asyncio.CancelledError):
        await caller
    assert asyncio.all_tasks() == before

"""A team whose workflow acts in simulated worlds: its agents answer, its workflow is not run for callers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gateway_scene import Scene, deployed_team

from serve_apps.episode.team import TeamSpec
from serve_apps.gateway.traffic.teams import TeamRoute
from stores.types import Sampling

pytestmark = [pytest.mark.test, pytest.mark.anyio]


async def test_a_workflow_in_simulated_worlds_is_not_run_for_callers(tiny_model: Path) -> None:
    team = deployed_team(tiny_model, 3, "blue")
    agents = ("planner", "actor")
    team_spec = replace(
        TeamSpec.from_dict(team.team_spec),
        workflow="pipelines.examples.household.workflow:Household",
        group_of=dict.fromkeys(agents, "shared"),
        sampling=dict.fromkeys(agents, Sampling(max_tokens=32)),
    )
    scene = Scene(tiny_model)
    scene.serve(TeamRoute(champion=team.model_copy(update={"team_spec": team_spec.to_dict()})))
    async with scene.http() as http:
        refused = await http.post("/v1/workflows/demo/runs", json={"prompt": "put apple in table 1"})
        chat = {"model": "demo/planner", "messages": [{"role": "user", "content": "Task: put apple in table 1"}]}
        answered = await http.post("/v1/chat/completions", json=chat)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "simulated_world"
    assert "acts in worlds of home, which are simulated by workers" in refused.json()["error"]["message"]
    assert answered.status_code == 200, answered.text

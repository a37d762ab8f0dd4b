"""A gateway serves teams by the modules that their records carry."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from gateway_scene import deployed_team

from serve_apps.episode.scripted import play_scripted
from serve_apps.gateway.app import user_config
from serve_apps.gateway.traffic.teams import DeployedTeam, TeamRoute, build_teams, parse_teams
from stores.types import Task

pytestmark = pytest.mark.test

TASK = Task(task_id="a-task", prompt="2+3*4", answers=("14",))
TEAM = """
from serve_apps import Agent, Outcome, Workflow

class Team(Workflow):
    solver = Agent(prompt="Solve {question}")

    async def run(self, task, agents, tools):
        from ending import ENDING
        return Outcome(answer=(await agents.solver(question=task.prompt)).text + ENDING)
"""


def test_teams_whose_modules_have_the_same_names_are_served_by_one_gateway(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path))

    def deployed(version: int, ending: str) -> DeployedTeam:
        team = deployed_team(tiny_model, version, "blue")
        sampling = {"solver": team.team_spec["sampling"]["solver"]}
        code = {"my_team.py": TEAM, "ending.py": f"ENDING = {ending!r}"}
        own = {"workflow": "my_team:Team", "group_of": {"solver": "shared"}, "sampling": sampling, "code": code}
        return team.model_copy(update={"team_spec": team.team_spec | own})

    def answers(routes: dict[str, TeamRoute]) -> list[str]:
        teams, faults = asyncio.run(build_teams({}, parse_teams(json.loads(json.dumps(user_config(routes))))))
        assert not faults
        served = [team for production in teams.values() for team in (production.champion, production.candidate) if team]
        return [play_scripted(team.acting.workflow, TASK, {"solver": ["14"]}).answer for team in served]

    champion, candidate, other = deployed(1, " of one"), deployed(2, " of its candidate"), deployed(1, " of two")
    routes = {"one": TeamRoute(champion=champion, candidate=candidate), "two": TeamRoute(champion=other)}
    assert answers(routes) == ["14 of one", "14 of its candidate", "14 of two"]
    assert answers({"one": TeamRoute(champion=candidate), "two": routes["two"]}) == ["14 of its candidate", "14 of two"]


def test_a_team_that_cannot_be_loaded_keeps_no_other_team_from_its_callers(tiny_model: Path, tmp_path: Path) -> None:
    good, gone = deployed_team(tiny_model, 1, "blue"), deployed_team(tmp_path / "gone", 2, "green")
    routes = {"gone": TeamRoute(champion=gone), "good": TeamRoute(champion=good)}
    teams, faults = asyncio.run(build_teams({}, routes))  # as on a replica that starts anew
    assert teams.keys() == {"good"} and faults.keys() == {"gone"}

    newer = {name: TeamRoute(champion=gone) for name in ("good", "gone")}
    running, faults = asyncio.run(build_teams(teams, newer))
    assert running == teams and faults.keys() == {"good", "gone"}


def test_a_record_of_another_troupe_keeps_no_team_from_its_callers(tiny_model: Path) -> None:
    good = deployed_team(tiny_model, 1, "blue")
    odd = good.model_copy(update={"team_spec": good.team_spec | {"surprise": 1}})
    teams, faults = asyncio.run(build_teams({}, {"odd": TeamRoute(champion=odd), "good": TeamRoute(champion=good)}))
    assert teams.keys() == {"good"}
    assert "unexpected keyword argument 'surprise'" in faults["odd"]

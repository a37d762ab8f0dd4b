"""openenv_house: `python openenv_house.py PORT CAPACITY`, in an environment with `openenv`: the household game behind a real OpenEnv server."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from pipelines.examples.household.world import House


class Say(Action):
    """An action in words."""

    text: str


class Shown(Observation):
    """What the room shows, and what a workflow reads of it."""

    text: str = ""
    holding: str = ""
    at: str = ""
    unseen: str = ""
    is_won: bool = False


class Home(Environment):
    """A room, by its seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, kind: str = "put", **_: Any) -> Shown:
        self.house = House(seed=seed or 0, kind=kind)
        return shown(self.house.reset())

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Shown:
        return shown(self.house.step(action.text))

    @property
    def state(self) -> State:
        return State()


def shown(seen: dict[str, Any]) -> Shown:
    return Shown(text=seen["text"], reward=seen["reward"], done=seen["is_done"], **seen["info"])


if __name__ == "__main__":
    app = create_fastapi_app(Home, Say, Shown, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")

"""world: a game of ALFWorld or TextWorld -> a world: its words, the commands that are possible, and 1 where the task is done.

    Environment("tests.worlds.alfworld.world:Generated", python=".venvs/alfworld/bin/python", paths=(".",))

It runs in a virtual environment of its own (`requirements.txt`), and knows nothing of Troupe.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.worlds.alfworld.games import KINDS, LAMP, Room, make_room, problem, traj_data

EXPERTS = ("", "planner", "handcoded")
PDDL = ".tw-pddl"
"""How a file of ALFWorld ends."""
STATES = {"isclean": "clean", "ishot": "hot", "iscool": "cool"}
"""By fact, what ALFWorld's rules make of a thing."""
MAX_ACTION = 200
"""Characters of an action that are read."""


class Game:
    """A game from a file: `game.tw-pddl` of ALFWorld, or what `tw-make` of TextWorld writes (`.z8`)."""

    def __init__(self, file: str, expert: str = "", max_commands: int = 60) -> None:
        """Args:
        expert: whose commands `info["expert"]` holds. `planner`: all that are left until the task is done, of somebody who knows where
            everything is. `handcoded`: the next one of ALFWorld's expert, who searches; it needs `traj_data.json` beside the game.
        max_commands: of the commands that are possible, the first so many are in `info`.

        Raises ValueError for an expert that there is not.
        """
        if expert not in EXPERTS:
            raise ValueError(f"alfworld: expert {expert!r} does not exist: use one of planner, handcoded")
        self.file, self.expert, self.max_commands = file, expert, max_commands
        self.env: Any = None
        self.state: Any = None
        self.earned = 0.0
        self.seen: set[str] = set()
        """Places whose things were in sight."""

    def reset(self) -> dict[str, Any]:
        """Begins the game, and returns its first text with the task."""
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredExpert

        requested = ("won", "score", "max_score", "facts", "admissible_commands")
        infos = textworld.EnvInfos(**dict.fromkeys(requested, True), policy_commands=self.expert == "planner")
        wrappers: list[Any] = [AlfredDemangler] if self.file.endswith(PDDL) else []
        if self.expert == "handcoded":
            wrappers.append(AlfredExpert)
        self.env = textworld.start(self.file, infos, wrappers)
        self.state = self.env.reset()
        return self._shown(is_done=False)

    def step(self, action: str) -> dict[str, Any]:
        """Gives the game a command. What it does not know changes nothing, and the text says so."""
        # A NUL in a command ends the whole process where TextWorld plays a `.z8`.
        printable = "".join(c if c.isprintable() else " " for c in action[:MAX_ACTION])
        self.state, _, is_done = self.env.step(" ".join(printable.lower().split()))
        return self._shown(is_done=bool(is_done))

    def close(self) -> None:
        """Gives the game's memory back. Each game of ALFWorld has a copy of the planner's library."""
        if self.env is None:
            return
        env, self.env = self.env, None
        env.close()
        if self.file.endswith(PDDL):
            from fast_downward.interface import close_lib

            close_lib(env.unwrapped.downward_lib)

    def _shown(self, *, is_done: bool) -> dict[str, Any]:
        state = self.state
        score = (state.get("score") or 0) / (state.get("max_score") or 1)
        reward, self.earned = score - self.earned, score
        commands = sorted(state["admissible_commands"])
        info = {"is_won": bool(state["won"]), "commands": commands[: self.max_commands], "num_commands": len(commands)}
        if self.expert:
            plan = state["policy_commands"] if self.expert == "planner" else state["extra.expert_plan"]
            info["expert"] = list(plan or ())[: self.max_commands]
        if self.file.endswith(PDDL):
            info |= self._household()
        return {
            "text": state["feedback"].strip(),
            "reward": reward,
            "is_done": is_done,
            "info": info,
            "anchor": self._anchor(),
        }

    def _household(self) -> dict[str, str]:
        """What an agent of ALFWorld knows by now: what it holds, where it is, and which places it has not looked into."""
        facts: dict[str, list[tuple[str, ...]]] = {}
        for fact in self.state["facts"]:
            facts.setdefault(fact.name, []).append(tuple(name.strip() for name in fact.names))
        here = {location for _, location in facts.get("atlocation", ())}
        places = {place: location for place, location in facts.get("receptacleatlocation", ())}
        closed = {place for (place,) in facts.get("openable", ())} - {place for (place,) in facts.get("opened", ())}
        at = [place for place, location in places.items() if location in here]
        self.seen.update(place for place in at if place not in closed)
        held = [thing for _, thing in facts.get("holds", ())]
        made = [word for fact, word in STATES.items() if any((thing,) in facts.get(fact, ()) for thing in held)]
        return {
            "holding": " ".join([*made, *held]) or "nothing",
            "at": _listed(at) or "the middle of a room",
            "unseen": _listed(places.keys() - self.seen) or "nothing",
        }

    def _anchor(self) -> str:
        """Names the state: all that is true, without what was merely looked at, and the places that were seen."""
        true = sorted(str(fact) for fact in self.state["facts"] if fact.name != "checked")
        return sha256(repr((true, sorted(self.seen))).encode()).hexdigest()[:16]


class Generated(Game):
    """The game of ALFWorld that a seed makes."""

    def __init__(self, seed: int, kind: str, expert: str = "", max_commands: int = 60) -> None:
        """Args: kind: put, clean, heat, cool or look. The others are those of `Game`."""
        super().__init__("", expert, max_commands)
        self.room = make_room(seed, kind)

    def reset(self) -> dict[str, Any]:
        """Writes the game, begins it, and returns its first text."""
        with tempfile.TemporaryDirectory(prefix="alfworld-") as folder:
            self.file = str(write(self.room, Path(folder)))
            return super().reset()


def write(room: Room, folder: Path) -> Path:
    """Writes `game.tw-pddl` and `traj_data.json`, as ALFWorld's own folders of games have them; returns the path of the game."""
    from alfworld.gen.goal_library import gdict
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

    goal = gdict[KINDS[room.kind]]["pddl"].format(obj=room.thing, recep=room.target, toggle=LAMP).replace("#", "-")
    game = {
        "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
        "grammar": Path(ALFRED_TWL2_PATH).read_text().replace("UNKNOWN GOAL", room.task),
        "pddl_problem": problem(room, goal),
    }
    (folder / "traj_data.json").write_text(json.dumps(traj_data(room)))
    path = folder / f"game{PDDL}"
    path.write_text(json.dumps(game))
    return path


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))

"""Worlds that behave and worlds that do not, for tests; a worker imports them without Troupe."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from typing import Any, ClassVar


class Corridor:
    """A door every `length` steps: remembers every action."""

    def __init__(self, length: int = 3, bonus: float = 0.5) -> None:
        self.length, self.bonus, self.done = length, bonus, [] if length else ["never"]

    def reset(self) -> dict[str, Any]:
        print("this is no answer")
        return {"text": "You are at the beginning."}

    def step(self, action: str) -> dict[str, Any]:
        print("nor is this", file=sys.stdout)
        if action != "walk":
            return {"text": "Nothing happens.", "info": {"done": len(self.done)}}
        self.done.append(action)
        is_done = len(self.done) >= self.length
        text = f"You have walked {len(self.done)} of {self.length}."
        return {"text": text, "reward": self.bonus, "is_done": is_done, "info": {"done": len(self.done)}}


class Dice:
    """Shows something else each time."""

    def reset(self) -> dict[str, Any]:
        return {"text": f"A die shows {random.SystemRandom().random()}."}

    def step(self, action: str) -> dict[str, Any]:
        return {"text": f"A die shows {random.SystemRandom().random()}.", "is_done": action == "stop"}


class Hanging:
    """Hangs when it is told to."""

    def __init__(self, seconds: float = 60.0, hangs_in: str = "step") -> None:
        self.seconds, self.hangs_in = seconds, hangs_in

    def reset(self) -> dict[str, Any]:
        if self.hangs_in == "reset":
            time.sleep(self.seconds)
        return {"text": "It is quiet."}

    def step(self, action: str) -> dict[str, Any]:
        if action == "hang":
            time.sleep(self.seconds)
        return {"text": f"You {action}.", "is_done": action == "stop"}


class Dying:
    """Takes its worker with it in every third step."""

    def __init__(self) -> None:
        self.num_steps = 0

    def reset(self) -> dict[str, Any]:
        return {"text": "It is not well."}

    def step(self, action: str) -> dict[str, Any]:
        self.num_steps += 1
        if self.num_steps == 3:
            print("so this is the end", file=sys.stderr, flush=True)
            os._exit(7)
        return {"text": f"Step {self.num_steps}.", "is_done": False}


class Growing:
    """Takes 64 MiB more with each step."""

    def __init__(self) -> None:
        self.held: list[bytearray] = []

    def reset(self) -> dict[str, Any]:
        return {"text": "It is small."}

    def step(self, action: str) -> dict[str, Any]:
        self.held.append(bytearray(os.urandom(2**20) * 64))
        time.sleep(0.25)
        return {"text": f"It is {len(self.held)} large."}


class Answering:
    """Answers a step with a value that is no answer of a world."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def reset(self) -> dict[str, Any]:
        return {"text": "Ask."}

    def step(self, action: str) -> Any:
        return {
            "nan": {"text": "a", "reward": float("nan")},
            "set": {"text": "a", "info": {"b": {1, 2}}},
            "none": None,
            "no text": {"reward": 1.0},
            "true": {"text": "a", "reward": True},
            "word": {"text": "a", "is_done": "no"},
            "list": {"text": "a", "info": [1]},
        }[self.kind]


class Unavailable(Exception):
    """What a world raises that cannot work now, whatever its policy did."""

    is_infrastructure = True


class Raising:
    """Raises where it is told to."""

    def __init__(self, place: str) -> None:
        self.place = place
        if place == "init":
            raise ValueError("no such house")

    def reset(self) -> dict[str, Any]:
        if self.place == "reset":
            raise ValueError("no such house")
        return {"text": "It begins."}

    def step(self, action: str) -> dict[str, Any]:
        if action == "work":
            raise Unavailable("no sandbox starts")
        raise KeyError(action)


class Starting:
    """Starts a process, as a browser would, and says which."""

    def reset(self) -> dict[str, Any]:
        self.child = subprocess.Popen(["sleep", "600"])
        return {"text": "It is open.", "info": {"pid": self.child.pid, "worker": os.getpid()}}

    def step(self, action: str) -> dict[str, Any]:
        return {"text": "Nothing happens."}


class Counting:
    """Begins slowly, and says how many of its kind there are."""

    alive: ClassVar[set[object]] = set()

    def reset(self) -> dict[str, Any]:
        time.sleep(0.3)
        self.alive.add(self)
        return {"text": "It begins."}

    def step(self, action: str) -> dict[str, Any]:
        return {"text": f"There are {len(self.alive)}."}

    def close(self) -> None:
        self.alive.remove(self)


class Talkative:
    """Has much to say in `info`."""

    def reset(self) -> dict[str, Any]:
        return {"text": "Hear.", "info": {"valid": ["go north"] * 1000}}

    def step(self, action: str) -> dict[str, Any]:
        return {"text": "Hear more.", "info": {"valid": ["go north"] * 1000}, "is_done": True}

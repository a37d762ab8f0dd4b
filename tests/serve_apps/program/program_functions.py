"""Functions that are programs, for the processes that play them."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

NUM_PLAYED = [0]


def ask(prompt: str, client: Any) -> str:
    """Answers as the model does."""
    reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": prompt}])
    return str(reply.choices[0].message.content)


def leave(prompt: str, client: Any) -> str:
    """Leaves the interpreter after a call."""
    ask(prompt, client)
    return sys.exit("cannot read this")


def do_as_told(prompt: str, client: Any) -> dict[str, Any]:
    """Prints, and then sleeps, raises, dies, or says how many episodes its process has played."""
    print("a word for a reader")
    NUM_PLAYED[0] += 1
    answer = ask(prompt, client)
    if answer == "sleep":
        time.sleep(60)
    if answer == "raise":
        raise ValueError("no such planet")
    if answer == "die":
        os._exit(3)
    return {
        "answer": answer,
        "metadata": {"process": os.getpid(), "num_played": NUM_PLAYED[0], "user": os.environ.get("USER")},
    }

"""world_worker: `PYTHON world_worker.py package.module:Name [FOLDER ...]`: worlds of one class; requests and answers are lines of JSON.

    {"world": 3, "verb": "reset", "argument": {"seed": 7}}     ->  {"answer": {"text": ...}}
    {"world": 3, "verb": "step", "argument": "open drawer 1"}  ->  {"answer": ...} | {"raised": "..."} | {"failed": "..."} | {"invalid": "..."}
    {"world": 3, "verb": "close"}                           ->  {"answer": null}

It runs in any Python from 3.8 on, with nothing but its standard library, and imports nothing of Troupe. Its first line says whether
the class can be imported: {"ready": true}, or {"broken": "..."}. When standard input ends, it closes its worlds and ends, with all that
they have started.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

END_S = 5.0
"""Seconds that worlds have to close."""


def main() -> None:
    """Answers every line of standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a world prints is no answer
    requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=read_into, args=(requests,), daemon=True).start()
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [*sys.argv[2:], *(folder for folder in sys.path if os.path.abspath(folder or ".") != here)]

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        make = load(sys.argv[1])
    except BaseException:  # noqa: BLE001 - whatever an import raises is why there is no world
        say({"broken": traceback.format_exc(limit=-2)})
        return
    say({"ready": True})
    worlds: dict[int, Any] = {}
    while (line := requests.get()) is not None:
        say(answer_to(json.loads(line), worlds, make))
    for world in worlds.values():
        close(world)
    end_all()


def read_into(requests: queue.SimpleQueue[str | None]) -> None:
    """Puts lines of standard input into a queue, and None at its end; then the process ends, whatever it is at."""
    for line in sys.stdin:
        requests.put(line)
    requests.put(None)
    time.sleep(END_S)
    end_all()


def end_all() -> None:
    """Ends this process and all that it has started, which are one process group."""
    sys.stderr.flush()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def load(path: str) -> Callable[..., Any]:
    """Returns what `package.module:Name` names."""
    module, _, name = path.partition(":")
    made: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return made


def answer_to(request: dict[str, Any], worlds: dict[int, Any], make: Callable[..., Any]) -> dict[str, Any]:
    """Returns the answer to a request. Args: worlds: those that have begun, by number."""
    number, verb = request["world"], request["verb"]
    try:
        if verb == "reset":
            worlds[number] = make(**request["argument"])
            answer = worlds[number].reset()
        elif verb == "step":
            answer = worlds[number].step(request["argument"])
        else:
            close(worlds.pop(number, None))
            answer = None
    except BaseException as error:  # noqa: BLE001 - whatever a world raises, even the end of the interpreter, is an answer
        traceback.print_exc()
        kind = "failed" if getattr(error, "is_infrastructure", False) else "raised"
        return {kind: f"{type(error).__name__}: {error}"}
    try:
        json.dumps(answer, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return {"invalid": f"{error}: {repr(answer)[:200]}"}
    return {"answer": answer}


def close(world: Any) -> None:
    """Closes a world that can be closed."""
    getattr(world, "close", int)()


if __name__ == "__main__":
    main()

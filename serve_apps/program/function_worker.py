"""function_worker: `python -m serve_apps.program.function_worker MODULE:NAME`: a function that plays episodes, see `workers`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from openai import OpenAI

from stores.by_name import open_by_name


def main() -> None:
    """Answers every line of standard input. The function has none, and what it prints goes to standard error."""
    episodes, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    function = open_by_name(sys.argv[1], place="workflow.settings.function")
    for line in episodes:
        episode = json.loads(line)
        print(json.dumps({**_played(function, episode), "id": episode["id"]}), file=answers, flush=True)


def _played(function: Callable[[str, Any], Any], episode: dict[str, Any]) -> dict[str, Any]:
    try:
        with OpenAI(base_url=episode["base_url"], api_key=episode["api_key"], max_retries=0, timeout=None) as client:
            returned = function(episode["prompt"], client)
        result = returned if isinstance(returned, dict) else {"answer": returned}
        # One that has none of these is handed on whole: the episode refuses it by its keys.
        reply = {name: result[name] for name in ("answer", "score", "metadata") if name in result} or result
        json.dumps(reply)
    except SystemExit as left:
        return {"error": f"the function called sys.exit({left.code!r})"}
    except Exception as error:  # noqa: BLE001 - whatever a user's function raises is its failure
        return {"error": f"{type(error).__name__}: {error}"}
    return reply


if __name__ == "__main__":
    main()

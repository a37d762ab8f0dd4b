"""hostile_gateway: `python -m tests.serve_apps.gateway.hostile_gateway MODEL FOLDER`: a gateway process whose engine is scripted.

The server, its limits, the routes, keys, capture and redaction are those of a deployed replica; what an engine would sample is a text.
Writes {"port", "pid"} to standard output and serves until standard input ends. FOLDER has keys.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from serve_apps.gateway.http.connections import make_server
from serve_apps.gateway.traffic.teams import ServedTeam, TeamRoute, TeamStores
from serve_apps.policy.client import ContextExhausted
from stores.types import Completion, FinishReason, GenerateRequest
from tests.serve_apps.gateway_scene import Scene, deployed_team

TEXT = "It is 42, and 42 it is. " * 12
CONTEXT = 4096
SETTINGS: dict[str, Any] = {
    "receive_timeout_s": 3.0,
    "max_in_flight": 32,
    "max_queued": 64,
    "request_timeout_s": 60.0,
    "max_connections": 1200,
    "capture": {"share": 1.0, "redact": {r"[\w.]+@[\w.]+": "<email>"}, "flush_s": 0.2},
    "episodes": {"max_open": 64, "idle_s": 60},
}
"""Those of a deployment, but that waits are shorter, so that running into them takes less time."""


class ScriptedClient:
    """A ServeClient of workflow runs and episodes, which refuses what does not fit into the context, as an engine does."""

    def __init__(self, scene: Scene, team: ServedTeam) -> None:
        self._tokenizer, self._version = scene.streams.tokenizer, team.acting.policy_versions["shared"]

    async def generate(self, request: GenerateRequest) -> Completion:
        """Returns the text, cut to the limit."""
        if len(request.prompt_token_ids) + request.sampling.max_tokens > CONTEXT:
            raise ContextExhausted(f"prompt of {len(request.prompt_token_ids)} tokens")
        await asyncio.sleep(0.005)
        ids = [*self._tokenizer.encode(TEXT), self._tokenizer.eos_id][: request.sampling.max_tokens]
        reason = FinishReason.STOP if ids[-1] == self._tokenizer.eos_id else FinishReason.LENGTH
        return Completion(token_ids=ids, logprobs=[-0.5] * len(ids), finish_reason=reason, policy_version=self._version)


def scripted_scene(model: Path, **settings: Any) -> Scene:
    """A gateway that needs no Ray for any of its routes."""
    scene = Scene(model, **SETTINGS | settings)
    scene.streams.text, scene.streams.pause_s = TEXT, 0.002
    scene.service.client = lambda team: ScriptedClient(scene, team)  # type: ignore[assignment, method-assign, return-value]
    return scene


async def main(model: Path, folder: Path) -> None:
    """Serves one team with a candidate that answers half of its requests."""
    scene = scripted_scene(model, keys_file=str(folder / "keys.json"))
    stores = TeamStores(run_id="run", traces=str(folder / "traces"), served=str(folder / "served"))
    champion, candidate = (
        deployed_team(model, version, set_name, max_model_len=CONTEXT)
        for version, set_name in ((3, "blue"), (4, "green"))
    )
    scene.serve(TeamRoute(champion=champion, candidate=candidate, share=0.5, stores=stores))
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    server = make_server(scene.api, scene.service.config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    print(json.dumps({"port": listener.getsockname()[1], "pid": os.getpid()}), flush=True)
    watching = asyncio.ensure_future(longest_stretch())
    await asyncio.to_thread(sys.stdin.read)
    watching.cancel()
    print(json.dumps(await watching), flush=True)
    server.should_exit = server.force_exit = True
    await serving


async def longest_stretch() -> float:
    """Returns, once cancelled, the most processor seconds that the event loop's thread took before it came to what was due.

    Other processes of a busy machine do not change it, as they do the time of an answer.
    """
    longest, before = 0.0, time.thread_time()
    with suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(0.005)
            now = time.thread_time()
            longest, before = max(longest, now - before), now
    return longest


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))

"""A gateway without a network or an engine: its policy apps return the text that a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from serve_apps.chat.tokenizer import ChatTokenizer, load_tokenizer
from serve_apps.config import EpisodeConfig, GatewayConfig
from serve_apps.engines.port import Piece
from serve_apps.episode.team import TeamSpec
from serve_apps.gateway.http.http_api import build_api
from serve_apps.gateway.shadow.shadows_app import ShadowPlayer
from serve_apps.gateway.traffic.callers import ApiKey, write_keys
from serve_apps.gateway.traffic.peer_replicas import PeerReplicas
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.teams import DeployedTeam, Production, TeamRoute
from stores.types import Completion, FinishReason, GenerateRequest, Sampling

HELLO: list[Any] = [{"role": "user", "content": "What is 6*7?"}]


def keys_file(folder: Path, *keys: ApiKey) -> str:
    """Writes a file of API keys and returns its path."""
    write_keys(folder / "keys.json", list(keys))
    return str(folder / "keys.json")


class Scripted:
    """PolicyStreams that return the text of a test, token by token."""

    def __init__(self, tokenizer: ChatTokenizer, text: str = "It is 42.", *, pause_s: float = 0.0) -> None:
        self.tokenizer, self.text, self.pause_s = tokenizer, text, pause_s
        self.requests: list[GenerateRequest] = []
        self.num_open = self.num_said = 0
        self.error: Exception | None = None

    async def stream(self, app: str, request: GenerateRequest) -> AsyncGenerator[Piece]:
        self.requests.append(request)
        self.num_open += 1
        try:
            if self.error is not None:
                raise self.error
            ids = [*self.tokenizer.encode(self.text), self.tokenizer.eos_id]
            reason = "stop" if len(ids) <= request.sampling.max_tokens else "length"
            ids = ids[: request.sampling.max_tokens]
            parts = [[i] for i in ids] if request.is_streamed else [ids]
            for index, part in enumerate(parts):
                await asyncio.sleep(self.pause_s)
                self.num_said += 1
                yield Piece(
                    token_ids=part,
                    logprobs=[-0.5] * len(part),
                    top_logprobs=[{i: -0.5, 7: -1.0} for i in part] if request.top_logprobs else [],
                    finish_reason=reason if index == len(parts) - 1 else "",
                    policy_version=3,
                )
        finally:
            self.num_open -= 1


def deployed_team(model: Path, version: int, set_name: str, *, max_model_len: int = 256) -> DeployedTeam:
    team_spec = TeamSpec(
        workflow="serve_apps.workflows.math_chain:MathChain",
        settings={},
        group_of=dict.fromkeys(("solver", "verifier", "refiner", "finalizer"), "shared"),
        tokenizers={"shared": str(model)},
        max_model_len={"shared": max_model_len},
        sampling=dict.fromkeys(
            ("solver", "verifier", "refiner", "finalizer"), Sampling(max_tokens=32, temperature=0.7)
        ),
        policy_versions={"shared": version},
        team_key=f"key{version}",
        limits=EpisodeConfig(),
    )
    return DeployedTeam(
        team_version=version,
        set_name=set_name,
        apps={"shared": f"demo-{set_name}-shared"},
        team_spec=team_spec.to_dict(),
    )


class Scene:
    """One gateway replica without a network, which serves version 3 of team `demo`."""

    def __init__(self, model: Path, *, peers: PeerReplicas | None = None, **settings: Any) -> None:
        self.streams = Scripted(load_tokenizer(str(model)))
        config = GatewayConfig(**({"allowed_hosts": ("gateway", "testserver")} | settings))
        self.settings = config.of_team
        self.shadow_player = ShadowPlayer(Service(config.of_port, streams=self.streams))
        self.service = Service(config.of_port, streams=self.streams, peers=peers, player=self.shadow_player)
        self.api = build_api(self.service)
        self.model = model
        self.serve(TeamRoute(champion=deployed_team(model, 3, "blue")))

    def serve(self, config: TeamRoute) -> None:
        self.share({"demo": config.model_copy(update={"settings": self.settings})})

    def serve_both(self, **traffic: float) -> None:
        """Serves version 3 as champion and version 4 as candidate."""
        champion, candidate = deployed_team(self.model, 3, "blue"), deployed_team(self.model, 4, "green")
        self.serve(TeamRoute(champion=champion, candidate=candidate, **traffic))

    def share(self, teams: Mapping[str, TeamRoute]) -> None:
        """Serves these teams, each with settings of its own."""
        built = {name: Production.build(name, config) for name, config in teams.items()}

        async def deploy() -> None:
            self.service.deploy(built)

        try:
            asyncio.get_running_loop()
        except RuntimeError:  # a fixture, or a test that is no coroutine: a service lives in an event loop
            asyncio.run(deploy())
        else:
            self.service.deploy(built)
        self.shadow_player.service.teams = built

    @asynccontextmanager
    async def http(self, key: str = "") -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.api, raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client:
            yield client

    @asynccontextmanager
    async def openai(self, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
        async with self.http() as http:
            client = openai.AsyncOpenAI(api_key=key, base_url="http://gateway/v1", http_client=http, max_retries=0)
            yield client


async def closes_with_its_events(events_of: Callable[[AsyncGenerator[Any]], AsyncGenerator[Any]], piece: Any) -> bool:
    """Whether closing the events that are made of a stream of pieces ends the stream before it returns."""
    num_open = 0

    async def pieces() -> AsyncGenerator[Any]:
        nonlocal num_open
        num_open += 1
        try:
            while True:
                yield piece
        finally:
            await asyncio.sleep(0)  # as sampling takes a while to end
            num_open -= 1

    events = events_of(pieces())
    await anext(events)
    assert num_open == 1
    await events.aclose()
    return num_open == 0


CHUNK = {
    "id": "c",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": "It"}, "finish_reason": None}],
}


class Engine:
    """A ServeClient that returns the texts of a test, one after the other; then `end`."""

    def __init__(self, scene: Scene, *says: str) -> None:
        self.tokenizer, self.left = scene.streams.tokenizer, list(says)
        self.seen: list[GenerateRequest] = []
        self.pause = asyncio.Event()
        self.pause.set()
        self.error: Exception | None = None
        self.version = 3

    async def generate(self, request: GenerateRequest) -> Completion:
        self.seen.append(request)
        await self.pause.wait()
        if self.error is not None:
            raise self.error
        ids = self.tokenizer.encode_completion(self.left.pop(0) if self.left else "end")
        logprobs = [-0.5] * len(ids)
        return Completion(
            token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.STOP, policy_version=self.version
        )

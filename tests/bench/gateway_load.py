"""gateway_load: callers of a chat endpoint -> what they saw; and teams of made models behind a gateway of their own."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from serve_apps.config import EpisodeConfig, ServeConfig
from serve_apps.episode.team import TeamSpec
from serve_apps.gateway.traffic.teams import DeployedTeam
from serve_apps.policy.deployment import PolicyAppSpec
from serve_apps.workflows.math_chain import MathChain
from stores.types import ModelVersionRef, Sampling
from stores.weights.manifest import Probe
from stores.weights.store import WeightStore

CLIENTS = 16
MAX_TOKENS = 24
SERVE = ServeConfig(kv_cache_gib=0.25, max_num_seqs=CLIENTS, max_model_len=256)


@dataclass
class Load:
    """What callers saw."""

    latencies: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    num_tokens: int = 0
    seconds: float = 0.0


def closed_load(url: str, model: str, callers: int, seconds: float) -> Load:
    """Callers who ask again as soon as they are answered."""
    return asyncio.run(_closed(url, model, callers, seconds))


def open_load(url: str, model: str, per_second: float, seconds: float, *, seed: int) -> Load:
    """Callers who come as they like (Poisson), whether the others are answered or not; waits for all answers."""
    return asyncio.run(_open(url, model, per_second, seconds, random.Random(seed)))


async def _closed(url: str, model: str, callers: int, seconds: float) -> Load:
    load, end = Load(), time.perf_counter() + seconds

    async def call(http: httpx.AsyncClient, number: int) -> None:
        asked = 0
        while time.perf_counter() < end:
            asked += 1
            if await _ask(http, url, model, load, f"{number}+{asked}*3", seed=asked) != 200:
                await asyncio.sleep(0.2)

    began = time.perf_counter()
    async with _client(callers) as http:
        await asyncio.gather(*(call(http, number) for number in range(callers)))
    load.seconds = time.perf_counter() - began
    return load


async def _open(url: str, model: str, per_second: float, seconds: float, rng: random.Random) -> Load:
    load, asked = Load(), []
    began = at = time.perf_counter()
    async with _client(256) as http:
        while (at := at + rng.expovariate(per_second)) < began + seconds:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            text = f"{rng.randint(1, 99)}+{rng.randint(1, 99)}*3"
            asked.append(asyncio.ensure_future(_ask(http, url, model, load, text, seed=rng.getrandbits(30))))
        await asyncio.gather(*asked)
    load.seconds = time.perf_counter() - began
    return load


async def _ask(http: httpx.AsyncClient, url: str, model: str, load: Load, text: str, *, seed: int) -> int:
    messages = [{"role": "user", "content": f"Compute {text}"}]
    body = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": seed}
    began = time.perf_counter()
    answer = await http.post(url, json=body)
    load.statuses[answer.status_code] += 1
    if answer.status_code == 200:
        load.latencies.append(time.perf_counter() - began)
        load.num_tokens += answer.json()["usage"]["completion_tokens"]
    return answer.status_code


def _client(connections: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(timeout=120, limits=limits)


def commit(model: Path, store: WeightStore, *, model_group: str, version: int) -> ModelVersionRef:
    """A model folder as a version; its probe is none that anybody asks for."""
    probe = Probe(sequences=((3, 4, 5),), logprobs=((0.0, 0.0),))
    return store.commit(
        model, model_group=model_group, version=version, parent=None, run_id="bench", iteration=version, probe=probe
    )


def app_specs(name: str, refs: Mapping[str, ModelVersionRef]) -> list[PolicyAppSpec]:
    """An app `<name>-<group>` for each model group."""
    return [PolicyAppSpec(name=f"{name}-{g}", model_group=g, model=ref, serve=SERVE) for g, ref in refs.items()]


def deployed_team(
    name: str, refs: Mapping[str, ModelVersionRef], *, team_version: int, set_name: str = "blue"
) -> DeployedTeam:
    """The math chain's four agents, dealt to the model groups in turn, on the apps of `app_specs`."""
    agents, groups = list(MathChain.agents), list(refs)
    team_spec = TeamSpec(
        workflow="serve_apps.workflows.math_chain:MathChain",
        settings={},
        group_of={agent: groups[i % len(groups)] for i, agent in enumerate(agents)},
        tokenizers=dict(refs),
        max_model_len=dict.fromkeys(groups, SERVE.max_model_len),
        sampling=dict.fromkeys(agents, Sampling(max_tokens=MAX_TOKENS)),
        policy_versions={group: ref.version for group, ref in refs.items()},
        team_key=f"bench{team_version}",
        limits=EpisodeConfig(),
    )
    apps = {group: f"{name}-{group}" for group in groups}
    return DeployedTeam(team_version=team_version, set_name=set_name, apps=apps, team_spec=team_spec.to_dict())


def build_tiny(folder: Path, *, seed: int = 0) -> Path:
    """An untrained model of less than a million parameters that knows the math chain's words."""
    from train_loops.config import TinyModelConfig
    from train_loops.engine.tiny_model import build_model, build_tokenizer, save_folder

    texts: Sequence[Any] = [*MathChain().prompts.values(), "user\nassistant\n12+3*45-6/7=890"]
    tokenizer = build_tokenizer(texts, vocab_size=600)
    shape = TinyModelConfig(hidden_size=128, intermediate_size=384, num_layers=2)
    return save_folder(build_model(shape, tokenizer, seed=seed), tokenizer, folder)

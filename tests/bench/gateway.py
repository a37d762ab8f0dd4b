"""gateway: requests through the gateway beside vLLM's own OpenAI server on the same model and cores, and what overload does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from pipelines.cluster import connect
from serve_apps.cast import Cast
from serve_apps.config import EpisodeConfig, GatewayConfig, ServeConfig
from serve_apps.deployment import PolicyAppSpec, ensure_apps
from serve_apps.gateway_routes import route
from serve_apps.policy_app import engine_environment
from serve_apps.service.production import Arm, TeamInService
from serve_apps.workflows.math_chain import MathChain
from stores.manifest import Probe
from stores.types import ModelVersionRef, Sampling
from stores.weights import WeightStore
from tests.bench.figures import Figure, ratio
from tests.bench.setting import build_100m
from tests.servers import free_port

CLIENTS = 16
MAX_TOKENS = 24
TURN_S = {"tiny": 6.0, "100M": 15.0}
ROUNDS = 3
"""The two take turns, so that a noisy neighbour disturbs both."""
PLACES = 16
SERVE = ServeConfig(kv_cache_gib=0.25, max_num_seqs=CLIENTS, max_model_len=256)


def measure(folder: Path) -> list[Figure]:
    """Both shapes, one after the other."""
    connect()
    figures: list[Figure] = []
    for shape, build in (("tiny", _tiny), ("100M", build_100m)):
        model = build(folder / shape)
        figures += _beside_vllm(shape, model, folder)
    return figures


def _beside_vllm(shape: str, model: Path, folder: Path) -> list[Figure]:
    config = GatewayConfig(port=free_port(), max_in_flight=PLACES, max_queued=PLACES, queue_timeout_s=5)
    name = f"bench-{shape}"
    _deploy(name, config, model, folder)
    with _vllm_server(model) as port:
        ours = f"http://127.0.0.1:{config.port}/v1/chat/completions", f"{name}/group/g"
        theirs = f"http://127.0.0.1:{port}/v1/chat/completions", "m"
        both: dict[str, list[_Load]] = {"gateway": [], "vLLM": []}
        for url, of in (ours, theirs):  # warm
            _load(url, of, CLIENTS, 3.0)
        for _ in range(ROUNDS):
            for who, (url, of) in (("gateway", ours), ("vLLM", theirs)):
                both[who].append(_load(url, of, CLIENTS, TURN_S[shape]))
    tokens = {who: sum(x.num_tokens for x in loads) / sum(x.seconds for x in loads) for who, loads in both.items()}
    figures = [
        ratio(
            f"{shape}: tokens/s through the gateway / vLLM's server",
            tokens["gateway"],
            tokens["vLLM"],
            least=0.7 if shape == "100M" else None,
            note=f"{tokens['gateway']:.0f} and {tokens['vLLM']:.0f} tokens/s, {CLIENTS} callers, {MAX_TOKENS} tokens each",
        )
    ]
    for who, loads in both.items():
        latencies = np.concatenate([x.latencies for x in loads])
        rate = len(latencies) / sum(x.seconds for x in loads)
        p50, p99 = np.percentile(latencies, (50, 99))
        figures.append(Figure(name=f"{shape}: {who}, requests/s", value=rate, note=f"p50 {p50:.3f} s, p99 {p99:.3f} s"))
    return figures + _overload(shape, *ours)


def _overload(shape: str, url: str, model: str) -> list[Figure]:
    """Three times the callers that there is room for."""
    load = _load(url, model, 3 * 2 * PLACES, TURN_S[shape])
    after = _load(url, model, 1, 2.0)
    shed = load.statuses[429] + load.statuses[503]
    lost = sum(num for status, num in load.statuses.items() if status not in (200, 429, 503))
    return [
        Figure(
            name=f"{shape}: share shed at 3x", value=shed / max(1, load.statuses.total()), note=str(dict(load.statuses))
        ),
        Figure(name=f"{shape}: accepted requests lost at 3x", value=float(lost), limit=0.0, is_upper=True),
        Figure(
            name=f"{shape}: answered share right after",
            value=after.statuses[200] / max(1, after.statuses.total()),
            limit=1.0,
        ),
    ]


class _Load:
    """What callers saw who ask again as soon as they are answered."""

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.statuses: Counter[int] = Counter()
        self.num_tokens, self.seconds = 0, 0.0


def _load(url: str, model: str, callers: int, seconds: float) -> _Load:
    return asyncio.run(_play(url, model, callers, seconds))


async def _play(url: str, model: str, callers: int, seconds: float) -> _Load:
    load, end = _Load(), time.perf_counter() + seconds
    limits = httpx.Limits(max_connections=callers, max_keepalive_connections=callers)

    async def call(http: httpx.AsyncClient, number: int) -> None:
        asked = 0
        while time.perf_counter() < end:
            asked += 1
            messages = [{"role": "user", "content": f"Compute {number}+{asked}*3"}]
            body = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": asked}
            began = time.perf_counter()
            answer = await http.post(url, json=body)
            load.statuses[answer.status_code] += 1
            if answer.status_code == 200:
                load.latencies.append(time.perf_counter() - began)
                load.num_tokens += answer.json()["usage"]["completion_tokens"]
            else:
                await asyncio.sleep(0.2)

    began = time.perf_counter()
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:
        await asyncio.gather(*(call(http, number) for number in range(callers)))
    load.seconds = time.perf_counter() - began
    return load


def _deploy(name: str, config: GatewayConfig, model: Path, folder: Path) -> None:
    """A team of one group behind a gateway of its own."""
    store, state_file = WeightStore(str(folder / f"weights-{name}")), folder / "apps.json"
    probe = Probe(sequences=((3, 4, 5),), logprobs=((0.0, 0.0),))
    ref: ModelVersionRef = store.commit(
        model, model_group="g", version=0, parent=None, run_id="bench", iteration=0, probe=probe
    )
    ensure_apps(
        [PolicyAppSpec(name=name, model_group="g", model=ref, serve=SERVE)], state_file=state_file, timeout_s=300
    )
    agents = list(MathChain.agents)
    cast = Cast(
        workflow="serve_apps.workflows.math_chain:MathChain",
        settings={},
        group_of=dict.fromkeys(agents, "g"),
        tokenizers={"g": ref},
        max_model_len={"g": SERVE.max_model_len},
        sampling=dict.fromkeys(agents, Sampling(max_tokens=MAX_TOKENS)),
        policy_versions={"g": 0},
        team_key="bench",
        limits=EpisodeConfig(),
    )
    arm = Arm(team_version=1, set_name="blue", apps={"g": name}, cast=cast.to_dict())
    route(config, name, TeamInService(champion=arm), state_file=state_file, timeout_s=120)


@contextmanager
def _vllm_server(model: Path) -> Iterator[int]:
    """vLLM's OpenAI server on the model, with the settings of a policy app; its port."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--dtype", SERVE.dtype, "--enforce-eager"]
    command += ["--max-model-len", str(SERVE.max_model_len), "--max-num-seqs", str(CLIENTS)]
    command += ["--kv-cache-memory-bytes", str(int(SERVE.kv_cache_gib * 2**30)), "--generation-config", "vllm"]
    command += ["--max-num-batched-tokens", "8192", "--no-enable-chunked-prefill", "--disable-log-stats"]
    command += ["--no-enable-log-requests", "--uvicorn-log-level", "warning"]
    environment = os.environ | engine_environment(SERVE) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = subprocess.Popen(command, env=environment)
    try:
        deadline = time.monotonic() + 300
        while True:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM's server did not start: {server.poll()}; its output is above")
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        yield port
    finally:
        server.terminate()
        server.wait(timeout=60)


def _tiny(folder: Path) -> Path:
    from train_loops.config import TinyModelConfig
    from train_loops.tiny_model import build_model, build_tokenizer, save_folder

    texts: list[Any] = [*MathChain().prompts.values(), "user\nassistant\n12+3*45-6/7=890"]
    tokenizer = build_tokenizer(texts, vocab_size=600)
    shape = TinyModelConfig(hidden_size=128, intermediate_size=384, num_layers=2)
    return save_folder(build_model(shape, tokenizer, seed=0), tokenizer, folder)

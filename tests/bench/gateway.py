"""gateway: requests through the gateway beside vLLM's own OpenAI server on the same model and cores, and what overload does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np

from pipelines.cluster.connect import connect
from serve_apps.config import GatewayConfig
from serve_apps.engines.vllm.settings import engine_environment
from serve_apps.gateway.routes import route
from serve_apps.gateway.traffic.teams import TeamRoute
from serve_apps.policy.deployment import ensure_apps
from stores.weights.store import WeightStore
from tests.bench.figures import Figure, ratio
from tests.bench.gateway_load import (
    CLIENTS,
    MAX_TOKENS,
    SERVE,
    Load,
    app_specs,
    build_tiny,
    closed_load,
    commit,
    deployed_team,
)
from tests.bench.setting import build_100m
from tests.servers import free_port

TURN_S = {"tiny": 6.0, "100M": 15.0}
ROUNDS = 3
"""The two take turns, so that a noisy neighbour disturbs both."""
SLOTS = 16


def measure(folder: Path) -> list[Figure]:
    """Both shapes, one after the other."""
    connect()
    figures: list[Figure] = []
    for shape, build in (("tiny", build_tiny), ("100M", build_100m)):
        model = build(folder / shape)
        figures += _beside_vllm(shape, model, folder)
    return figures


def _beside_vllm(shape: str, model: Path, folder: Path) -> list[Figure]:
    config = GatewayConfig(port=free_port(), max_in_flight=SLOTS, max_queued=SLOTS, queue_timeout_s=5)
    name = f"bench-{shape}"
    _deploy(name, config, model, folder)
    with _vllm_server(model) as port:
        ours = f"http://127.0.0.1:{config.port}/v1/chat/completions", f"{name}/group/g"
        theirs = f"http://127.0.0.1:{port}/v1/chat/completions", "m"
        both: dict[str, list[Load]] = {"gateway": [], "vLLM": []}
        for url, of in (ours, theirs):  # warm
            closed_load(url, of, CLIENTS, 3.0)
        for _ in range(ROUNDS):
            for who, (url, of) in (("gateway", ours), ("vLLM", theirs)):
                both[who].append(closed_load(url, of, CLIENTS, TURN_S[shape]))
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
        figures.append(Figure(f"{shape}: {who}, requests/s", rate, note=f"p50 {p50:.3f} s, p99 {p99:.3f} s"))
    return figures + _overload(shape, *ours)


def _overload(shape: str, url: str, model: str) -> list[Figure]:
    """Three times the callers that there is room for."""
    load = closed_load(url, model, 3 * 2 * SLOTS, TURN_S[shape])
    after = closed_load(url, model, 1, 2.0)
    shed = load.statuses[429] + load.statuses[503]
    lost = sum(num for status, num in load.statuses.items() if status not in (200, 429, 503))
    return [
        Figure(f"{shape}: share shed at 3x", shed / max(1, load.statuses.total()), note=str(dict(load.statuses))),
        Figure(f"{shape}: accepted requests lost at 3x", float(lost), most=0.0),
        Figure(f"{shape}: answered share right after", after.statuses[200] / max(1, after.statuses.total()), least=1.0),
    ]


def _deploy(name: str, config: GatewayConfig, model: Path, folder: Path) -> None:
    """A team of one group behind a gateway of its own."""
    refs = {"g": commit(model, WeightStore(str(folder / f"weights-{name}")), model_group="g", version=0)}
    ensure_apps(app_specs(name, refs), state_file=folder / "apps.json", timeout_s=300)
    champion = deployed_team(name, refs, team_version=1)
    route(config, name, TeamRoute(champion=champion), state_file=folder / "apps.json", timeout_s=120)


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
    environment = os.environ | engine_environment(SERVE, threads=1) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
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

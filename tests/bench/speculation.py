"""speculation: tokens per second of an engine that drafts over one that does not, on the same requests, weights and seeds.

    demo, M-ASK   three iterations are trained; both engines get the requests of the third, the drafter knows the second
    100M          untrained, so that nothing is kept: it must stop drafting; then the same requests again, which it knows by heart

Each wave of requests goes to both engines one after the other, in turns which is first; no request comes twice to an engine, but where
that is the point.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from pipelines.config.run_config import load_config
from pipelines.report.progress import Screen
from pipelines.run.run import Run
from pipelines.runners.local_runner import train_team
from serve_apps.config import ServeConfig, SpeculationConfig
from serve_apps.policy.engine_settings import engine_environment
from tests.bench.figures import Figure, ratio
from tests.bench.peer import Peer
from tests.bench.setting import DEMO, ROOT, SHORT_WARMSTART, build_100m

AGENTS = ["solver", "verifier", "refiner", "finalizer"]
MASK = ROOT / "infra" / "workflows" / "iterative_search_shared.yaml"
AT_ONCE = {64: 512, 8: 96, 1: 16}
"""Requests by how many are given at once."""
SHORT = {"iterations": 3, "tasks.test": None, "evaluate.every": 99}

Requests = list[dict[str, Any]]


def measure(folder: Path) -> list[Figure]:
    """The demo's team and M-ASK on one model each, then the 100M shape."""
    demo = {"model_groups": {"team": {"agents": AGENTS}}, **SHORT_WARMSTART, **SHORT}
    figures = _trained(folder, "demo", DEMO, demo)
    figures += _trained(folder, "M-ASK", MASK, {**SHORT, "warmstart.num_demonstrations": 800})
    return figures + _untrained(build_100m(folder / "model-100m"))


class _Engines:
    """An engine with drafts and one without, on one model."""

    def __init__(self, folder: Path, config: ServeConfig, *, threads: int) -> None:
        self._folder = folder
        self._peers = [
            Peer(
                [
                    *(sys.executable, "-m", "tests.bench.raw_vllm", str(folder)),
                    config.model_copy(update={"speculation": speculation}).model_dump_json(),
                ],
                env=engine_environment(config, threads=threads),
            )
            for speculation in (None, SpeculationConfig())
        ]
        self._num_files = 0

    def __enter__(self) -> _Engines:
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self._peers:
            peer.close()

    def learn(self, requests: Requests) -> None:
        """Tells the drafter what was sampled before."""
        self._peers[1].ask({"learn": self._file(requests)})

    def counts(self) -> tuple[int, int, int]:
        """Steps of single sequences, tokens sampled in them, drafts made, since the start."""
        counts = self._peers[1].ask({"counts": True})["agents"].values()
        return sum(c["steps"] for c in counts), sum(c["sampled"] for c in counts), sum(c["drafted"] for c in counts)

    def compare(self, requests: Requests, at_once: int) -> tuple[float, float, float]:
        """Tokens per second without and with drafts, and the least share of completions that are as expected."""
        seconds, tokens, same = [0.0, 0.0], [0, 0], 1.0
        for number, start in enumerate(range(0, len(requests), at_once)):
            file = self._file([requests[start : start + at_once]])
            for which in (0, 1) if number % 2 else (1, 0):
                answer = self._peers[which].ask({"waves": file})
                seconds[which] += sum(answer["seconds"])
                tokens[which] += answer["num_tokens"]
                same = min(same, answer["same_share"])
        return tokens[0] / seconds[0], tokens[1] / seconds[1], same

    def identical_share(self, requests: Requests) -> float:
        """Share of the requests to which both give the same tokens."""
        file = self._file([requests])
        plain, drafting = (peer.ask({"waves": file, "keep": True})["completions"] for peer in self._peers)
        return sum(one == other for one, other in zip(plain, drafting, strict=True)) / len(requests)

    def _file(self, content: Sequence[Any]) -> str:
        self._num_files += 1
        path = self._folder.parent / f"requests-{self._num_files}.json"
        path.write_text(json.dumps(list(content)))
        return str(path)


def _trained(folder: Path, name: str, config_path: Path, changes: dict[str, Any]) -> list[Figure]:
    settings = {"run": f"bench-{name.lower()}", "storage.root": str(folder / name)}
    config = load_config(config_path, {**changes, **settings})
    train_team(config, screen=Screen())
    ray.shutdown()
    run = Run(config)
    model = run.weights.fetch(run.trained(2)["team"])
    before, requests = (_requests(run, iteration) for iteration in (2, 3))
    figures = []
    with _Engines(model, config.serve_config("team"), threads=1) as engines:
        engines.learn(before)
        engines.compare(requests[:32], 32)  # the first calls of an engine are slower
        requests = requests[32:]
        for at_once, num in AT_ONCE.items():
            some, requests = requests[:num], requests[num:]
            steps, sampled, _ = engines.counts()
            plain, drafting, same = engines.compare(some, at_once)
            more_steps, more_sampled, _ = engines.counts()
            per_step = (more_sampled - sampled) / (more_steps - steps)
            note = f"{plain:,.0f} -> {drafting:,.0f} tok/s, {per_step:.2f} tokens per step and sequence, {same:.1%} of completions identical"
            figures.append(ratio(f"with / without drafts, {name}, {at_once} at once", drafting, plain, note=note))
        share = engines.identical_share([{**request, "temperature": 0.0} for request in requests[:128]])
        figures.append(Figure(name=f"identical completions at temperature 0, {name}", value=share, limit=1.0))
    return figures


def _requests(run: Run, iteration: int) -> Requests:
    """Every turn of an iteration as a request with the completion that was stored, in an order that mixes agents."""
    ref = run.iteration(iteration).collected.traces
    requests = [
        {
            "agent": turn.agent,
            "task": trace.task.task_id,
            "prompt": list(turn.prompt_token_ids),
            "max_tokens": turn.sampling.max_tokens,
            "temperature": turn.sampling.temperature,
            "seed": turn.seed,
            "completion": list(turn.completion_token_ids),
        }
        for trace in sorted(run.traces.read_traces(ref), key=lambda t: t.episode_id)
        for turn in trace.turns
    ]
    random.Random(0).shuffle(requests)
    return requests


def _untrained(model: Path) -> list[Figure]:
    config = ServeConfig(max_model_len=256, kv_cache_gib=1.0, max_num_seqs=64, threads=2)
    draw = random.Random(0)
    figures = []
    with _Engines(model, config, threads=2) as engines:
        for at_once, num in ((32, 64), (8, 16), (1, 4)):
            requests = [
                {
                    "agent": "solver",
                    "task": f"{at_once}-{n}",
                    "prompt": [draw.randrange(20, 400) for _ in range(40)],
                    "max_tokens": 48,
                    "temperature": 1.0,
                    "seed": draw.randrange(2**31),
                    "completion": [],
                }
                for n in range(num)
            ]
            for what, least in (("nothing is foreseen", 0.97), ("all is foreseen", None)):
                plain, drafting, _ = engines.compare(requests, at_once)
                note = f"{plain:,.0f} -> {drafting:,.0f} tok/s"
                name = f"with / without drafts, 100M, {at_once} at once, {what}"
                figures.append(ratio(name, drafting, plain, least=least, note=note))
    return figures

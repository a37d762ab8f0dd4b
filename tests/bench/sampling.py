"""sampling: where an engine's seconds go, and what block size and threads change, each pair of engines in one run.

    pass k:  prompts of 46 tokens, each for 8 episodes ──> engine A, engine B, ... one after another, the others idle

python -m tests.bench.sampling MODEL_FOLDER    the same for a model of your own
"""

from __future__ import annotations

import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from pipelines.runners.begin import make_version_zero
from serve_apps.config import ServeConfig
from serve_apps.engines.vllm.settings import engine_environment
from tests.bench.figures import Figure, figures_table, ratio
from tests.bench.peer import Peer
from tests.bench.setting import SHORT_WARMSTART, build_100m, open_run

PARTS = ("prefill", "decode", "logits", "sampling", "logprobs", "python")
NUM_PASSES = 3
BASE = ServeConfig(max_model_len=192, kv_cache_gib=0.5, max_num_seqs=128, threads=1)
ENGINES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "block 128, 1 thread": ({"block_size": 128}, {}),
    "block 32, 1 thread": ({}, {}),
    "block 32, 2 threads": ({"threads": 2}, {}),
    "block 32, 2 threads that spin": ({"threads": 2}, {"GOMP_SPINCOUNT": "300000"}),  # OpenMP's own default
    "block 32, 2 threads that sleep": ({"threads": 2}, {"GOMP_SPINCOUNT": "0"}),
}
"""Changes of `serve` and of the environment by engine."""


def measure(folder: Path) -> list[Figure]:
    """The tiny model of the demo, then the 100M shape."""
    run = open_run("bench-sampling", folder, {"model_groups": {"team": {"agents": ["solver", "verifier", "refiner", "finalizer"]}}, **SHORT_WARMSTART})  # fmt: skip
    make_version_zero(run)
    tiny = run.weights.fetch(run.trained(0)["team"])
    figures = measure_model(tiny, "tiny", vocabulary=300, num_prompts=48, max_tokens=24)
    return figures + measure_model(build_100m(folder / "model-100m"), "100M", vocabulary=30_000)


def measure_model(
    model: Path, shape: str, *, vocabulary: int, num_prompts: int = 16, max_tokens: int = 12
) -> list[Figure]:
    """The figures of one model; `vocabulary`: token ids below it are in the prompts."""
    sums: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        peers = {}
        for name, (changes, env) in ENGINES.items():
            config = BASE.model_copy(update=changes)
            command = [sys.executable, "-m", "tests.bench.engine_parts", str(model), config.model_dump_json()]
            peers[name] = stack.enter_context(
                Peer(command, env=engine_environment(config, threads=changes.get("threads", 1)) | env)
            )
            _ask(peers[name], seed=0, vocabulary=vocabulary, num_prompts=2, max_tokens=4)  # started and warm
        for number in range(1, 1 + NUM_PASSES):
            for name, peer in peers.items():
                answer = _ask(peer, seed=number, vocabulary=vocabulary, num_prompts=num_prompts, max_tokens=max_tokens)
                print(f"sampling {shape} pass {number}, {name}: {answer}", flush=True)
                _add(sums.setdefault(name, {"parts": {}}), answer)
    rates = {name: total["num_tokens"] / total["seconds"] for name, total in sums.items()}
    figures = [Figure(f"{name}, {shape}", rates[name], "tok/s", note=_note(total)) for name, total in sums.items()]
    first, second, *others = rates
    figures.append(ratio(f"{second} / {first}, {shape}", rates[second], rates[first]))
    return figures + [ratio(f"{other} / {second}, {shape}", rates[other], rates[second]) for other in others]


def _ask(peer: Peer, *, seed: int, vocabulary: int, num_prompts: int, max_tokens: int) -> dict[str, Any]:
    rng = random.Random(seed)  # new prompts in each pass: nothing of the pass before is cached
    prompts = [[rng.randrange(20, vocabulary) for _ in range(46)] for _ in range(num_prompts)]
    return peer.ask({"prompts": prompts, "episodes": 8, "max_tokens": max_tokens})


def _add(total: dict[str, Any], answer: dict[str, Any]) -> None:
    for name, value in answer.items():
        if name == "parts":
            for part, seconds in value.items():
                total["parts"][part] = total["parts"].get(part, 0.0) + seconds
        else:
            total[name] = total.get(name, 0) + value


def _note(total: dict[str, Any]) -> str:
    shares = ", ".join(f"{part} {total['parts'].get(part, 0.0) / total['seconds']:.0%}" for part in PARTS)
    return f"{shares}; {total['num_cached'] / total['num_prompt']:.0%} of prompt tokens cached"


def main() -> None:
    """Prints the figures of the model folder in the arguments."""
    with tempfile.TemporaryDirectory():
        figures = measure_model(Path(sys.argv[1]), Path(sys.argv[1]).name, vocabulary=int(sys.argv[2]) if len(sys.argv) > 2 else 30_000)  # fmt: skip
    console = Console(width=150)
    console.print(figures_table({"sampling": {"figures": [f.to_dict() for f in figures], "error": ""}}))


if __name__ == "__main__":
    main()

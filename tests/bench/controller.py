"""controller: 1,000 simultaneous episodes on a simulated engine with 0.2 to 2 s latency, one controller and two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.bench.figures import Figure, ratio
from tests.bench.peer import Peer

IN_FLIGHT = 1000
WAVES = 6
MAX_GROWTH = 0.10


def measure(folder: Path) -> list[Figure]:
    """Episodes per second against what the latencies allow; memory from the first wave to the last."""
    model, num = tokenizer_folder(folder / "model"), IN_FLIGHT * WAVES
    [one] = played_by(folder / "one", model, count=1, in_flight=IN_FLIGHT, num_episodes=num)
    two = played_by(folder / "two", model, count=2, in_flight=IN_FLIGHT, num_episodes=num)
    rate, ideal = num / one["seconds"], num / one["ideal_s"]
    together = sum(num / answer["seconds"] for answer in two)
    memory = one["memory_mb"]
    growth = (max(memory[1:]) - memory[0]) / memory[0]
    return [
        Figure(name="peak episodes in flight", value=one["peak"], limit=float(IN_FLIGHT), note="one process, one loop"),
        Figure(
            name="one controller",
            value=rate,
            unit="episodes/s",
            note=f"{num} episodes of 4 turns, {one['cpu_s'] / num * 1000:.2f} ms of CPU each",
        ),
        Figure(name="ideal, by the latencies alone", value=ideal, unit="episodes/s"),
        ratio("one controller / ideal", rate, ideal),
        Figure(
            name="memory growth after the first wave",
            value=growth,
            limit=MAX_GROWTH,
            is_upper=True,
            note="MB after each wave: " + ", ".join(f"{m:.0f}" for m in memory),
        ),
        Figure(
            name="two controllers",
            value=together,
            unit="episodes/s",
            note=f"{2 * IN_FLIGHT} in flight, peaks {', '.join(str(answer['peak']) for answer in two)}",
        ),
        ratio("two controllers / one", together, rate),
    ]


def played_by(folder: Path, model: Path, *, count: int, in_flight: int, num_episodes: int) -> list[dict[str, Any]]:
    """Has `count` controllers play side by side, each as many episodes, into one store; returns what each of them measured."""
    from stores.traces.store import TraceStore

    store = folder / "traces"
    TraceStore(str(store)).create()
    command = [sys.executable, "-m", "tests.bench.simulated_controller", str(model), str(store)]
    peers = [Peer([*command, str(seed), str(num_episodes), str(in_flight)]) for seed in range(count)]
    for peer in peers:
        peer.read()
    for peer in peers:
        peer.send({})
    answers = [peer.read() for peer in peers]
    for peer in peers:
        peer.close()
    return answers


def tokenizer_folder(folder: Path) -> Path:
    """Returns the demo's tokenizer: a model folder without a trained model."""
    from serve_apps.workflows.math_chain import MathChain
    from tests.bench.simulated_controller import SAID
    from train_loops.config import TinyModelConfig
    from train_loops.engine.tiny_model import build_model, build_tokenizer, save_folder

    tokenizer = build_tokenizer([*MathChain().prompts.values(), *SAID, "user\nassistant\n"], vocab_size=512)
    return save_folder(build_model(TinyModelConfig(), tokenizer, seed=0), tokenizer, folder)

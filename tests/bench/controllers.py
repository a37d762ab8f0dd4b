"""controllers: up to 10,000 simultaneous episodes on a simulated engine with 0.2 to 2 s latency, over 1 to 8 controllers on this machine.

Each controller is a process with one event loop and 1,250 episodes in flight, all write into one store. What ends the growth is named: the
latencies, or the cores of this machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipelines.run.cpu_threads import usable_cores
from serve_apps.workflows.math_chain import MathChain
from stores.traces.store import TraceStore
from tests.bench.figures import Figure, ratio
from tests.bench.peer import Peer
from tests.bench.simulated_controller import SAID
from train_loops.config import TinyModelConfig
from train_loops.engine.tiny_model import build_model, build_tokenizer, save_folder

IN_FLIGHT = 1250
WAVES = 4
COUNTS = (1, 2, 4, 8)
MAX_GROWTH = 0.10
LEAST_SHARE = 0.8
"""Of what one controller plays, times their number, or of what the cores allow, where that is less."""


def measure(folder: Path) -> list[Figure]:
    """Episodes per second, cores used and memory by number of controllers; the last row says what limits them."""
    model = tokenizer_folder(folder / "model")
    answers = {
        n: played_by(folder / f"{n}", model, count=n, in_flight=IN_FLIGHT, num_episodes=IN_FLIGHT * WAVES)
        for n in COUNTS
    }
    cores = usable_cores()
    rates = {n: _rate(found) for n, found in answers.items()}
    cpu_s = answers[1][0]["cpu_s"] / (IN_FLIGHT * WAVES)
    first = answers[1][0]
    figures = [
        Figure("peak episodes in flight of one controller", first["peak"], least=float(IN_FLIGHT)),
        ratio("one controller / ideal, by the latencies alone", rates[1], IN_FLIGHT * WAVES / first["ideal_s"]),
    ]
    for n, found in answers.items():
        allowed = min(n * rates[1], cores / cpu_s)
        used = sum(answer["cpu_s"] for answer in found) / max(answer["seconds"] for answer in found)
        figures.append(
            Figure(
                f"{n} controllers, {n * IN_FLIGHT:,} episodes in flight: episodes/s over what latencies and cores allow",
                rates[n] / allowed,
                "x",
                least=LEAST_SHARE,
                note=f"{rates[n]:.0f} episodes/s of {allowed:.0f}, {used:.1f} of {cores} cores, peaks {sum(a['peak'] for a in found):,}",
            )
        )
        figures.append(
            Figure(
                f"{n} controllers: largest memory growth of one after its first wave",
                max((max(a["memory_mb"][1:]) - a["memory_mb"][0]) / a["memory_mb"][0] for a in found),
                most=MAX_GROWTH,
                note=f"{max(a['memory_mb'][-1] for a in found):.0f} MB at the end",
            )
        )
    figures.append(
        Figure(
            "controllers that these cores carry at full speed",
            cores / cpu_s / rates[1],
            note=f"an episode of 4 turns takes {cpu_s * 1000:.2f} ms of one core, store included; the event loop of one controller is busy "
            f"{rates[1] * cpu_s:.0%} of the time",
        )
    )
    return figures


def _rate(found: list[dict[str, Any]]) -> float:
    return sum(IN_FLIGHT * WAVES / answer["seconds"] for answer in found)


def played_by(folder: Path, model: Path, *, count: int, in_flight: int, num_episodes: int) -> list[dict[str, Any]]:
    """Has `count` controllers play side by side, each as many episodes, into one store; returns what each of them measured."""
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
    tokenizer = build_tokenizer([*MathChain().prompts.values(), *SAID, "user\nassistant\n"], vocab_size=512)
    return save_folder(build_model(TinyModelConfig(), tokenizer, seed=0), tokenizer, folder)

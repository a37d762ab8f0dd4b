"""malformed_calls: a policy that is more often wrong than right and may call a typed tool in a wrong way; whether it learns to.

Six iterations on the real stack, a tiny model. Where failed episodes are left out of training, a policy that loses most of its
episodes is paid for failing: the share of malformed calls rises.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.config.run_config import load_config
from pipelines.report.progress import Screen
from pipelines.run.run import Run
from pipelines.runners.local_runner import train_team
from stores.types import Cause, Trace
from tests.bench.figures import Figure
from tests.bench.setting import ROOT

ITERATIONS = 6
CONFIG = ROOT / "tests" / "e2e" / "small.yaml"
CHANGES: Mapping[str, Any] = {
    "run": "malformed",
    "iterations": ITERATIONS,
    "workflow": {"path": "tests.bench.typed_tool:TypedTool"},
    "credit": {"path": "pipelines.credit.math_final_answer:MathFinalAnswer", "settings": {"format_weight": 0.0}},
    "model_groups": {"team": {"agents": ["solver"]}},
    "agents": {"solver": {"max_tokens": 24}},
    "warmstart.demonstrator": "tests.bench.typed_tool:demonstrate",
    "warmstart.num_demonstrations": 1200,
    "evaluate.every": ITERATIONS,
}


def measure(folder: Path) -> list[Figure]:
    """Shares of the episodes of each iteration, and by how much that of malformed calls has risen."""
    process = multiprocessing.get_context("spawn").Process(target=_train, args=(str(folder),))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"training ended with {process.exitcode}: see its output above")
    run = Run(load_config(CONFIG, {**CHANGES, "storage.root": str(folder)}))
    traces = [_sampled(run, number) for number in range(1, ITERATIONS + 1)]
    malformed = [_share(t, lambda trace: trace.stop_reason == "tool_refused") for t in traces]
    others = [_share(t, lambda trace: not trace.is_outcome) for t in traces]
    right = [_share(t, lambda trace: trace.answer in trace.task.answers) for t in traces]
    policy = [_share(t, lambda trace: trace.cause is Cause.POLICY) for t in traces]
    return [
        Figure(
            f"rise of the share of malformed calls in {ITERATIONS} iterations",
            malformed[-1] - malformed[0],
            most=0.0,
            note=_in_words(malformed),
        ),
        Figure("failed by the policy, last iteration", policy[-1], note=_in_words(policy)),
        Figure("right answers, last iteration", right[-1], note=_in_words(right)),
        Figure("episodes without an outcome", max(others), most=0.0),
    ]


def _train(folder: str) -> None:
    train_team(load_config(CONFIG, {**CHANGES, "storage.root": folder}), screen=Screen())


def _sampled(run: Run, number: int) -> list[Trace]:
    return list(run.traces.read_traces(run.iteration(number).collected.traces))


def _share(traces: list[Trace], holds: Any) -> float:
    return sum(map(holds, traces)) / len(traces)


def _in_words(shares: list[float]) -> str:
    return ", ".join(f"{share:.3f}" for share in shares)

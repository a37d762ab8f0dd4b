"""train: tokens per second of the train stage in its warm trainer, beside a bare PyTorch loop on the same rows.

    demonstrated episodes ── collect, score in the journal ──> stage train (order to the warm trainer) ──> version k
                          └─ same rows, same cuts ──────────> bare loop, while the trainer waits

Every row has a gradient (`credit.LetterShare`), so that both do the same work.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.cluster.connect import connect, disconnect
from pipelines.examples.arithmetic.tasks import demonstrate as play
from pipelines.run.cpu_threads import trainer_threads
from pipelines.run.run import Run
from pipelines.runners.begin import make_version_zero
from pipelines.stages.steps import run_stage
from pipelines.stages.train import trainer_of
from serve_apps.episode.demonstrate import demonstrate
from stores.journal.stage_results import Collected
from stores.types import Purpose
from tests.bench.figures import Figure, ratio
from tests.bench.peer import Peer
from tests.bench.setting import SHORT_WARMSTART, build_100m, open_run, pretrained

LIMIT, LIMIT_OF_TINY = 0.95, 0.7
"""The least ratios: the work around the learning weighs more for a tiny model."""
WARM_UP_ORDERS = 1
ANY_LOGPROB = {"tolerance_mean": 1e6, "tolerance_max": 1e6, "limit_mean": 1e6}
"""Demonstrations have no rollout logprobs to compare with."""
TOTALS = (
    "order",
    "learn",
    "old",
    "advantages",
    "update",
    "read",
    "checkpoint",
    "store",
    "bare",
    "bare_old",
    "bare_save",
    "tokens",
)
"""What is added up over the orders that count; `store` includes `checkpoint`."""
GROUP, AGENTS = "team", ["solver", "verifier", "refiner", "finalizer"]
CREDIT = {"path": "tests.bench.credit:LetterShare"}


def measure(folder: Path) -> list[Figure]:
    """The tiny model with an iteration's rows of the demo, the 100M shape, and SmolLM2-135M-Instruct where its folder is there."""
    tiny = {
        "credit": CREDIT,
        "model_groups": {"team": {"agents": AGENTS}},
        "train.mismatch": ANY_LOGPROB,
        "train.optimizer": {"lr": 1e-5, "max_grad_norm": 1.0},
        **SHORT_WARMSTART,
    }
    figures = _measure(folder, "tiny", tiny, num_episodes=192, num_orders=4)
    large = {
        "credit": CREDIT,
        "model_groups": {"team": {"agents": AGENTS, "model": str(build_100m(folder / "model-100m"))}},
        "warmstart": None,
        "train.mismatch": ANY_LOGPROB,
        "train.optimizer": {"lr": 1e-6, "max_grad_norm": 1.0},
        "train.threads": 2,
        "train.num_minibatches": 2,
        "train.microbatch_tokens": 2048,
    }
    figures += _measure(folder, "100M", large, num_episodes=16, num_orders=2)
    if (model := pretrained()) is None:
        return figures
    real = large | {"model_groups": {"team": {"agents": AGENTS, "model": str(model)}}}
    return figures + _measure(folder, "SmolLM2", real, num_episodes=16, num_orders=2)


def _measure(folder: Path, shape: str, changes: dict[str, Any], *, num_episodes: int, num_orders: int) -> list[Figure]:
    run = open_run(f"bench-train-{shape.lower()}", folder, changes)
    make_version_zero(run)
    connect()
    settings = run.config.train_config(GROUP)
    trainer = trainer_of(run, GROUP)
    trainer.wait_ready(settings.start_timeout_s)
    scratch = folder / f"bare-{shape}"
    command = [sys.executable, "-m", "tests.bench.bare_loop", str(run.weights.fetch(run.trained(0)[GROUP]))]
    totals = dict.fromkeys(TOTALS, 0.0)
    with Peer([*command, str(trainer_threads(run, GROUP)), str(settings.optimizer.lr), str(scratch)]) as bare:
        for iteration in range(1, 1 + WARM_UP_ORDERS + num_orders):
            _demonstrate(run, iteration, num_episodes)
            rows = _write_rows(run, iteration)
            began = time.perf_counter()
            run_stage(run, "train", iteration, model_group=GROUP)
            order_s = time.perf_counter() - began
            metrics = run.iteration(iteration).trained[GROUP].metrics
            answer = bare.ask({"rows": str(rows)})
            print(f"train {shape} order {iteration}: {order_s:.2f} s, {metrics}\n  bare loop: {answer}", flush=True)
            if iteration > WARM_UP_ORDERS:
                learn_s = sum(metrics[f"train/{part}_s"] for part in ("old_logprobs", "advantages", "update"))
                totals["order"] += order_s
                totals["learn"] += learn_s
                totals["old"] += metrics["train/old_logprobs_s"]
                totals["update"] += metrics["train/update_s"]
                totals["advantages"] += metrics["train/advantages_s"]
                totals["read"] += metrics["train/read_s"]
                totals["checkpoint"] += metrics["train/checkpoint_s"]
                totals["store"] += metrics["train/commit_s"]
                totals["bare"] += answer["old_s"] + answer["update_s"]
                totals["bare_old"] += answer["old_s"]
                totals["bare_save"] += answer["save_s"]
                totals["tokens"] += metrics["train/tokens"]
    trainer.stop()
    disconnect()
    return _figures(shape, totals, note=f"{int(metrics['train/rows'])} rows, {settings.threads} threads")


def _figures(shape: str, totals: dict[str, float], *, note: str) -> list[Figure]:
    tokens = totals["tokens"]
    least = LIMIT_OF_TINY if shape == "tiny" else LIMIT
    bare, learn = tokens / totals["bare"], tokens / totals["learn"]
    with_files = tokens / (totals["bare"] + totals["bare_save"])
    parts = f"old logprobs {totals['old']:.2f} s, update {totals['update']:.2f} s"
    bare_parts = f"old logprobs {totals['bare_old']:.2f} s, update {totals['bare'] - totals['bare_old']:.2f} s"
    stored = f"checkpoint and weights {totals['store']:.2f} s; bare loop saves the same in {totals['bare_save']:.2f} s"
    spent = {
        "update": totals["update"],
        "old logprobs": totals["old"],
        "advantages": totals["advantages"],
        "reading": totals["read"],
        "checkpoint": totals["checkpoint"],
        "export and commit": totals["store"] - totals["checkpoint"],
    }
    spent["the rest"] = totals["order"] - sum(spent.values())
    shares = ", ".join(f"{part} {seconds / totals['order']:.0%}" for part, seconds in spent.items())
    return [
        Figure(f"share of an order that is no update, {shape}", 1 - totals["update"] / totals["order"], note=shares),
        Figure(f"learning in the trainer, {shape}", learn, "tok/s", note=f"{note}; {parts}"),
        Figure(f"bare loop, {shape}", bare, "tok/s", note=bare_parts),
        ratio(f"learning / bare loop, {shape}", learn, bare, least=least),
        Figure(f"whole order, {shape}", tokens / totals["order"], "tok/s", note=stored),
        ratio(
            f"whole order / bare loop that saves too, {shape}",
            tokens / totals["order"],
            with_files,
            least=least,
            note="the stage as a caller sees it: reading, learning, committing",
        ),
        ratio(f"whole order / bare loop, {shape}", tokens / totals["order"], bare, note="the loop saves nothing"),
    ]


def _demonstrate(run: Run, iteration: int, num_episodes: int) -> None:
    """Stages collect (played, not sampled) and score of one iteration."""
    models = run.parents(iteration)
    team_spec, demonstrators = run.team_spec(models), run.team_spec(run.trained(0)).build()
    tasks = run.tasks("train")[: num_episodes // run.config.collect.episodes_per_task]
    key = {"run_id": run.run_id, "iteration": iteration, "purpose": Purpose.TRAIN, "team_key": team_spec.team_key}

    def collect(lease: Any) -> dict[str, Any]:
        # A demonstration belongs to iteration 0 and is version 0's; these stand in for an iteration's episodes.
        traces = demonstrate(
            tasks, team=demonstrators, demonstrator=play, count=num_episodes, run_id=run.run_id, seed=iteration
        )
        run.traces.write_episodes(
            [replace(t, **key, episode_id=f"{iteration}-{t.episode_id}", is_version_mixed=False) for t in traces]  # type: ignore[arg-type]
        )
        versions = {group: ref.version for group, ref in models.items()}
        return Collected(
            traces=run.traces.pin_episodes(**key),  # type: ignore[arg-type]
            policy_versions=versions,
            statuses={},
            num_new=len(traces),
            num_tokens=0,
            sampling_seconds=0.0,
            groups={},
            stopped_by=None,
            carried=(),
        ).to_json()

    run.journal.once(run.key(iteration, "collect"), collect)
    run_stage(run, "score", iteration)


def _write_rows(run: Run, iteration: int) -> Path:
    """The iteration's training rows and the trainer's cuts, for a loop that knows nothing of Troupe."""
    from train_loops.rows.batching import plan
    from train_loops.rows.sharing import chains_of
    from train_loops.worker.learner import read_rows

    done = run.iteration(iteration)
    config = run.config.train_config(GROUP)
    traces, rewards = done.collected.traces, done.scored.rewards
    samples, _ = read_rows(run.traces, traces, rewards, model_group=GROUP, config=config, credit_kind="returns")
    advantages = np.array([s.reward for s in samples])
    advantages = (advantages - advantages.mean()) / advantages.std()
    lengths = [len(s.token_ids) for s in samples]
    chains = chains_of(samples)
    cuts: dict[str, Any] = {"microbatch_tokens": config.microbatch_tokens, "seed": run.config.seed + iteration}
    cuts |= {"merge": False, "pack": False}
    rows = [
        {"ids": [int(i) for i in s.token_ids], "prompt_length": s.prompt_length, "advantage": float(a)}
        for s, a in zip(samples, advantages, strict=True)
    ]
    [score] = plan(chains, lengths, num_minibatches=1, **cuts)
    steps = plan(chains, lengths, num_minibatches=config.num_minibatches, **cuts)
    path = Path(run.folder) / f"rows-{iteration}.json"
    path.write_text(json.dumps({"rows": rows, "score": _plain(score), "steps": [_plain(step) for step in steps]}))
    return path


def _plain(cuts: list[list[tuple[int, ...]]]) -> list[list[int]]:
    """Microbatches of chains of one -> microbatches of rows."""
    return [[row for (row,) in cut] for cut in cuts]

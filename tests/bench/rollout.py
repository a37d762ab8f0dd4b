"""rollout: completion tokens per second of the whole collect stage, beside raw vLLM on the same requests.

    pass k:  sample_episodes ── traces ──> 4 waves of requests (token ids, seeds) ──> raw vLLM
             timed                                                                     timed, Troupe's engine idle

One model group, one engine. Both engines see the same passes in the same order, so their prefix caches hold the same.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from pipelines.cluster.connect import connect
from pipelines.episodes.sampling import Pass, sample_episodes
from pipelines.run.cpu_threads import engine_threads
from pipelines.run.run import Run
from pipelines.run.serving import app_names, start
from pipelines.runners.begin import make_version_zero
from serve_apps.engines.vllm.settings import engine_environment
from stores.types import TracesRef
from tests.bench.figures import Figure
from tests.bench.peer import Peer
from tests.bench.setting import SHORT_WARMSTART, build_100m, open_run, pretrained
from tests.serve_apps.deployed_apps import remove_apps

AGENTS = ["solver", "verifier", "refiner", "finalizer"]
WARM_UP_PASSES = 1


def measure(folder: Path) -> list[Figure]:
    """The tiny model as in the demo, the 100M shape, and SmolLM2-135M-Instruct where its folder is there."""
    tiny = open_run("bench-tiny", folder, {"model_groups": {"team": {"agents": AGENTS}}, **SHORT_WARMSTART})
    figures = _measure(tiny, "tiny", num_tasks=48, episodes_per_task=8, num_passes=4, least=0.6)
    cut = {agent: {"max_tokens": 20} for agent in AGENTS}
    large = open_run(
        "bench-100m",
        folder,
        {
            "model_groups": {"team": {"agents": AGENTS, "model": str(build_100m(folder / "model-100m"))}},
            "warmstart": None,
            "agents": cut,
            "serve.threads": 2,
        },
    )
    figures += _measure(large, "100M", num_tasks=8, episodes_per_task=4, num_passes=6, least=0.95)
    if (model := pretrained()) is None:
        return figures
    real = open_run(
        "bench-smollm2",
        folder,
        {
            "model_groups": {"team": {"agents": AGENTS, "model": str(model)}},
            "warmstart": None,
            "agents": cut,
            "serve.threads": 2,
        },
    )
    return figures + _measure(real, "SmolLM2", num_tasks=8, episodes_per_task=4, num_passes=6, least=0.95)


def _measure(
    run: Run, shape: str, *, num_tasks: int, episodes_per_task: int, num_passes: int, least: float
) -> list[Figure]:
    make_version_zero(run)
    models = run.trained(0)
    config = run.config.serve_config("team")
    command = [
        *(sys.executable, "-m", "tests.bench.raw_vllm"),
        str(run.weights.fetch(models["team"])),
        config.model_dump_json(),
    ]
    connect()
    ours_s, sampling_s, raw_s, tokens, same = [], [], [], [], 1.0
    with Peer(command, env=engine_environment(config, threads=engine_threads(run, "team"))) as raw:
        start(run, models)
        for iteration in range(1, 1 + WARM_UP_PASSES + num_passes):
            began = time.perf_counter()
            sampled = sample_episodes(
                run.tasks("train")[:num_tasks],
                Pass.of(run, run.team_spec(models), iteration=iteration),
                episodes_per_task=episodes_per_task,
            )
            seconds = time.perf_counter() - began
            waves = Path(run.folder) / f"waves-{iteration}.json"
            waves.write_text(json.dumps(_waves(run, sampled.traces)))
            answer = raw.ask({"waves": str(waves)})
            print(
                f"rollout {shape} pass {iteration}: Troupe {sampled.num_tokens} tokens in {seconds:.2f} s "
                f"(sampling {sampled.sampling_seconds:.2f}), raw {answer['num_tokens']} in {answer['seconds']}",
                flush=True,
            )
            if iteration > WARM_UP_PASSES:
                ours_s.append(seconds)
                sampling_s.append(sampled.sampling_seconds)
                raw_s.append(sum(answer["seconds"]))
                tokens.append(sampled.num_tokens)
                same = min(same, answer["same_share"])
    remove_apps(app_names(run).values())
    note = f"{num_tasks * episodes_per_task} episodes of 4 turns, {num_passes} passes, {engine_threads(run, 'team')} engine threads"
    each = ", ".join(f"{raw / ours:.2f}" for ours, raw in zip(ours_s, raw_s, strict=True))
    return [
        Figure(f"collect, {shape}", sum(tokens) / sum(ours_s), "tok/s", note=note),
        Figure(f"raw vLLM, {shape}", sum(tokens) / sum(raw_s), "tok/s", note=f"{same:.1%} of completions identical"),
        # The median of passes in turns: a pass in which this machine stalls says nothing about either.
        _median_ratio(f"collect / raw vLLM, {shape}", ours_s, raw_s, least=least, note=f"pass by pass {each}"),
        _median_ratio(
            f"episodes alone / raw vLLM, {shape}",
            sampling_s,
            raw_s,
            note="from the first episode's start to the last one's end",
        ),
    ]


def _median_ratio(
    name: str, ours_s: list[float], raw_s: list[float], *, least: float | None = None, note: str
) -> Figure:
    """Returns the median over passes of ours over theirs in tokens per second; both sampled the same tokens in a pass."""
    value = median(raw / ours for ours, raw in zip(ours_s, raw_s, strict=True))
    return Figure(name, value, "x", least=least, note=note)


def _waves(run: Run, ref: TracesRef) -> list[list[dict[str, Any]]]:
    """The requests of the first turns of all episodes, of the second turns, and so on, from the recorded traces."""
    waves: list[list[dict[str, Any]]] = []
    for trace in sorted(run.traces.read_traces(ref), key=lambda t: t.episode_id):
        for position, turn in enumerate(trace.turns):
            if position == len(waves):
                waves.append([])
            request = {
                "prompt": list(turn.prompt_token_ids),
                "max_tokens": turn.sampling.max_tokens,
                "temperature": turn.sampling.temperature,
                "seed": turn.seed,
                "completion": list(turn.completion_token_ids),
            }
            waves[position].append(request)
    return waves

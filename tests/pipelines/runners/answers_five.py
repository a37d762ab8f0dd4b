"""answers_five: a run whose team answers 5 to every task, twice; stores and keys are real, engines and registry are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from records import MakeTrace

from pipelines.cluster import connect
from pipelines.config.run_config import load_config
from pipelines.episodes.sampling import Pass, Sampled
from pipelines.evaluation import played as played_module
from pipelines.run.run import Run
from serve_apps.episode_spec import EpisodeSpec
from stores.types import ModelVersionRef, Task, TracesRef

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"

Played = dict[str, int]
"""Episodes that were really played, by task id."""


@pytest.fixture
def by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_trace: MakeTrace) -> tuple[Run, Played]:
    """A run whose team answers 5 to everything; stores and keys are real, engines and registry are not."""
    for name, answers in {"test": ("5", "5"), "sentinel": ("5", "6")}.items():
        write_tasks(tmp_path / f"{name}.jsonl", *answers)
    changes = {f"tasks.{name}": {"path": str(tmp_path / f"{name}.jsonl")} for name in ("test", "sentinel")}
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path), **changes}))
    run.open()
    model = ModelVersionRef(model_group="team", version=2, uri="nowhere", manifest_sha256="")
    run.__dict__["registry"] = SimpleNamespace(
        load=lambda name, alias: (7, SimpleNamespace(models={"team": model})), show_watch=lambda *shown: None
    )
    run.__dict__["tracker"] = SimpleNamespace(log_metrics=lambda *shown, at: None, log_dict=lambda *shown: None)
    monkeypatch.setattr(connect, "connect", lambda address: None)
    monkeypatch.setattr(played_module, "serve", lambda run, models: None)
    played: Played = {}
    monkeypatch.setattr(played_module, "sample_episodes", fake_sampler(make_trace, played))
    return run, played


def fake_sampler(make_trace: MakeTrace, played: Played) -> Callable[..., Sampled]:
    """`sample_episodes` without engines: what is stored under its key is kept."""

    def sample(tasks: Sequence[Task], of: Pass, **more: Any) -> Sampled:
        for task, index in product(tasks, range(more["episodes_per_task"])):
            spec = EpisodeSpec(**of.where, task=task, episode_index=index, run_seed=of.seed)
            about = {
                "episode_id": spec.episode_id,
                "episode_index": index,
                "task": task,
                "answer": "5" if index < 2 else "no",
            }
            trace = replace(make_trace(**of.where), **about)
            played[task.task_id] = played.get(task.task_id, 0) + of.store.write_episodes([trace])
        return sampled_as(of.store.pin_episodes(**of.where))

    return sample


def sampled_as(traces: TracesRef) -> Sampled:
    counts = dict.fromkeys(("num_new", "num_kept", "num_tokens"), 0)
    return Sampled(
        traces=traces,
        groups=(),
        statuses={},
        sampling_seconds=0.0,
        seconds=0.0,
        stopped_by=None,
        tasks_left=(),
        **counts,
    )


def write_tasks(file: Path, *answers: str) -> Path:
    rows = [{"id": f"t{i}", "question": f"{i}. 2 + 3 = ?", "answer": answer} for i, answer in enumerate(answers)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file

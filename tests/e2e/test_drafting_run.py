"""A run whose engines draft is the run without drafts, bit by bit: the same tokens at temperature 1, the same weights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from tests.e2e.local_runs import CONFIG, distance, finish, start

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

SETTINGS = {"serve.speculation.num_tokens": 6}


def test_drafts_change_no_token_and_no_weight(undisturbed: Run, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    finish(start(tmp_path, log, settings=[f"{key}={value}" for key, value in SETTINGS.items()]), log)
    run = Run(load_config(CONFIG, {"storage.root": str(tmp_path), **SETTINGS}))
    for iteration in (1, 2):
        assert completions(run, iteration) == completions(undisturbed, iteration)
    assert distance(run, undisturbed) == 0.0
    drafts = run.iteration(2).collected.drafts
    assert drafts is not None and set(drafts) == {"solver", "verifier", "refiner", "finalizer"}
    for counts in drafts.values():
        assert counts["sampled"] == counts["steps"] + counts["kept"]
    kept, steps = (sum(counts[name] for counts in drafts.values()) for name in ("kept", "steps"))
    assert kept > 0.05 * steps, drafts


def test_an_engine_that_has_just_started_drafts_from_the_trace_store(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    one, two = ([f"{key}={value}" for key, value in {**SETTINGS, "iterations": n}.items()] for n in (1, 2))
    finish(start(tmp_path, log, settings=one), log)
    finish(start(tmp_path, log, {"TROUPE_LOG": "text"}, settings=two), log)
    assert re.search(r"app small-rollout-team drafts from [1-9]\d* completions of iteration 1\b", log.read_text())


def completions(run: Run, iteration: int) -> dict[str, list[tuple[int, ...]]]:
    """By episode, the tokens of each turn."""
    ref = run.iteration(iteration).collected.traces
    return {
        trace.episode_id: [tuple(turn.completion_token_ids) for turn in trace.turns]
        for trace in run.traces.read_traces(ref)
    }

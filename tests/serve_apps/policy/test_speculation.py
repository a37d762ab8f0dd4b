"""A real engine with and without drafts answers a mix of all kinds of requests with the same tokens and the same logprobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve_apps.policy.engine_answers import mix

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[3]


def answers(folder: Path, has_drafts: bool) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.serve_apps.policy.engine_answers", str(folder), str(int(has_drafts))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    return dict(json.loads(line.removeprefix("ANSWERS ")))


def test_an_engine_with_drafts_gives_the_answers_of_one_without_to_the_bit(tiny_model: Path) -> None:
    plain, drafting = (answers(tiny_model, has_drafts) for has_drafts in (False, True))
    assert drafting["answers"] == plain["answers"]
    assert all(len(of_pass) == len(mix()) for of_pass in plain["answers"])
    assert plain["answers"][0] == plain["answers"][1], "the same seeds: what is drafted is what came before"
    counts = drafting["counts"]["agents"]["agent"]
    assert counts["kept"] > 0.2 * counts["steps"], counts

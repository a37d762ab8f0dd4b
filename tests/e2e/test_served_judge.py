"""A team is paid by a served model: the grader is trained, registered and served by Troupe, agrees with labels, and its scores are the rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.config.run_config import load_config
from pipelines.config.sections import DottedConfig
from pipelines.credit.rule import load_credit
from pipelines.run.run import Run
from tests.e2e.grader_team import PROMPT, score_of
from tests.e2e.local_runs import CONFIG
from tests.e2e.test_own_team import BIN, ROOT, run
from tests.servers import free_port

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def grader_config(root: Path, port: int) -> Path:
    tiny = yaml.safe_load(CONFIG.read_text())
    source = {"path": "tests.e2e.grader_team:generate"}
    config = tiny | {
        "run": "grader",
        "iterations": 1,
        "workflow": {"path": "tests.e2e.grader_team:Grader"},
        "credit": {"path": "pipelines.credit.outcome:OutcomeShare", "settings": {"metric": "math"}},
        "model_groups": {"grader": {"agents": ["grader"]}},
        "agents": {},
        "tasks": {name: {"generator": source, "count": n} for name, n in (("train", 1500), ("gate", 32), ("test", 32))},
        "warmstart": tiny["warmstart"]
        | {"demonstrator": "tests.e2e.grader_team:demonstrate", "num_demonstrations": 1500, "num_epochs": 6},
        "gateway": {"port": port},
        "storage": {"root": str(root)},
    }
    file = root / "grader.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.fixture
def head(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of commands that use a Ray head of their own."""
    environment = {
        "PYTHONPATH": str(ROOT),
        "RAY": str(BIN / "ray"),
        "TROUPE_RAY_PORT": str(free_port()),
        "TROUPE_RAY_DASHBOARD_PORT": str(free_port()),
    }
    script = str(ROOT / "infra" / "ray_head.sh")
    run(script, "up", folder=tmp_path, environment=environment)
    try:
        yield environment | {"RAY_ADDRESS": f"127.0.0.1:{environment['TROUPE_RAY_PORT']}"}
    finally:
        run(script, "down", folder=tmp_path, environment=environment)


def test_a_team_is_paid_what_a_served_grader_scores(head: dict[str, str], tmp_path: Path) -> None:
    troupe, port = str(BIN / "troupe"), free_port()
    run(troupe, "train", str(grader_config(tmp_path, port)), folder=tmp_path, environment=head)
    run(troupe, "serve", "grader@champion", "--root", str(tmp_path), folder=tmp_path, environment=head)

    rows = [{"task": f"{a}+1", "answer": str(a), "label": int(score_of(str(a)))} for a in range(20, 80)]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    judge: dict[str, Any] = {
        "url": f"http://127.0.0.1:{port}/v1",
        "model": "grader/grader",
        "labels": str(tmp_path / "labels.jsonl"),
        "prompt": PROMPT,
        "max_tokens": 16,
    }
    credit = {"path": "pipelines.extensions.judge.judged_outcome:JudgedOutcome", "settings": judge}
    # With small.yaml's 240 demonstrations few answers are numbers.
    settings = {"storage.root": str(tmp_path), "iterations": 1, "credit": credit, "warmstart.num_demonstrations": 1500}
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    run(troupe, "validate", str(CONFIG), *changes, folder=tmp_path, environment=head)
    (agreement,) = load_credit(DottedConfig(**credit)).preflight()
    run(troupe, "train", str(CONFIG), *changes, folder=tmp_path, environment=head)

    paid = Run(load_config(CONFIG, settings))
    scored = paid.iteration(1).scored
    answers = {trace.episode_id: trace.answer for trace in paid.traces.read_traces(paid.iteration(1).collected.traces)}
    outcomes = {r.episode_id: r.outcome for r in paid.traces.read_rewards(scored.rewards)}
    as_labelled = [
        outcomes[name] == int(score_of(answers[name])) / 10 for name in outcomes if answers[name].isdecimal()
    ]
    print(agreement, f"{sum(as_labelled)} of {len(as_labelled)} numbers are scored as the grader was taught")
    assert set(outcomes.values()) == {0.0, 1.0}
    assert len(as_labelled) > 50 and sum(as_labelled) / len(as_labelled) > 0.75

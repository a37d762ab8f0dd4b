"""Programs of agent frameworks, each in an environment of its own from exact requirements, play an episode."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.local_runs import COMMAND
from tests.venvs import make_venv

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
TROUPE = COMMAND[0]


@pytest.mark.parametrize("name", ["openai_agents", "langgraph", "pydantic_ai"])
def test_one_episode_is_tried_before_training(name: str, tmp_path: Path) -> None:
    """Needs a package index."""
    python = make_venv(name, tmp_path)
    program = f"pipelines/examples/{name}/program.py"
    where = f"workflow.settings.command={json.dumps([python, program])}"
    command = [
        TROUPE,
        "validate",
        f"infra/programs/{name}.yaml",
        "--set",
        f"storage.root={tmp_path}",
        "--set",
        where,
        "--try",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tool " in done.stdout and "credit: outcome " in done.stdout

"""The first two tutorials: from `troupe new` to an answer of the served team, on a Ray head that ran before there was a team."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from servers import free_port

from tests.docs.played_page import SHORT

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def run(*command: str, folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Runs a command as its user does: only the folder that it is started in says where the modules are."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own["TROUPE_CACHE"] = str(folder / ".cache")
    done = subprocess.run(
        command, cwd=folder, env=own | dict(environment or {}), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.fixture
def head(tmp_path: Path) -> Iterator[str]:
    """The address of a Ray head of another user, who has modules of the same names on its path."""
    others = tmp_path / "of_another_user"
    (others / "my_team").mkdir(parents=True)
    (others / "my_team.py").write_text("raise RuntimeError('the module of another user')")
    port = str(free_port())
    environment = {
        "PYTHONPATH": str(others),
        "RAY": str(BIN / "ray"),
        "TROUPE_CACHE": str(tmp_path / "head"),
        "TROUPE_RAY_PORT": port,
        "TROUPE_RAY_DASHBOARD_PORT": str(free_port()),
    }
    script = str(ROOT / "infra" / "ray_head.sh")
    run(script, "up", folder=others, environment=environment)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        run(script, "down", folder=others, environment=environment)


def test_the_team_of_the_first_tutorial_is_served_by_a_head_that_does_not_know_its_folder(
    head: str, tmp_path: Path
) -> None:
    troupe, port = str(BIN / "troupe"), free_port()
    run(troupe, "new", "my_team", folder=tmp_path)
    team = tmp_path / "my_team"
    changes = [word for key, value in (SHORT | {"gateway.port": port}).items() for word in ("--set", f"{key}={value}")]
    run(troupe, "train", "my_team.yaml", "--address", head, *changes, folder=team)

    (team / "my_team.py").write_text("raise RuntimeError('edited after the team was trained')")
    served = ("serve", "my_team@champion", "--root", str(team / "runs"), "--address", head)
    shown = run(troupe, *served, folder=tmp_path)
    assert f"http://127.0.0.1:{port}/v1" in shown
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", trust_env=False, timeout=120) as http:
        played = http.post("/workflows/my_team/runs", json={"prompt": "2+3*4", "seed": 1}).json()
        said = {"model": "my_team/solver", "messages": [{"role": "user", "content": "Compute 12+3*4"}]}
        reply = http.post("/chat/completions", json=said).json()
    assert [turn["agent"] for turn in played["turns"]] == ["solver", "reviewer"], played
    assert played["status"] == "ok" and reply["choices"][0]["message"]["content"], (played, reply)

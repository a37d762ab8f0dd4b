"""What the README shows is so: it is short, and its workflow and run config pass `troupe validate`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown_pages import ROOT, fences
from tests.docs.readme_example import write_example
from tests.model_folders import write_model

pytestmark = pytest.mark.fast


def test_the_readme_has_at_most_8192_bytes() -> None:
    assert (ROOT / "README.md").stat().st_size <= 8192


def test_the_example_is_short() -> None:
    example = [fence.text for fence in fences("README.md") if fence.language in ("python", "yaml")]
    assert sum(len([line for line in text.splitlines() if line.strip()]) for text in example) <= 22


def test_the_example_workflow_and_config_could_start(tmp_path: Path) -> None:
    write_example(tmp_path)
    write_model(tmp_path / "models" / "base", head_dim=32)
    troupe = Path(sys.executable).parent / "troupe"
    done = subprocess.run([troupe, "validate", "my_team.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ok (1 model groups, 2 agents)" in done.stdout

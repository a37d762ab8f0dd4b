"""Every shipped run config parses and could start."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config.run_config import load_config
from pipelines.runners.validate import check

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(path for folder in ("runs", "cluster") for path in (ROOT / "infra" / folder).glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_parses_and_could_start(path: Path) -> None:
    config = load_config(path)
    assert config.run == path.stem, "a shipped config is found by the name of its run"
    check(config)


def test_the_demo_config_is_shipped() -> None:
    assert ROOT / "infra" / "runs" / "demo.yaml" in SHIPPED

"""Every shipped run config parses and could start, or lacks nothing but the folder of a pretrained model."""

from __future__ import annotations

import re
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
    if missing := [g.model for g in config.model_groups.values() if g.model and not Path(g.model).is_dir()]:
        with pytest.raises(ValueError, match=re.escape(f"folder {missing[0]} does not exist")):
            check(config)
    else:
        check(config)


def test_the_demo_config_is_shipped() -> None:
    assert ROOT / "infra" / "runs" / "demo.yaml" in SHIPPED

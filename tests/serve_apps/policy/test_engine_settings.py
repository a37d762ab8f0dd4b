"""Serving settings become the arguments of an engine: no engine is started here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve_apps.config import ServeConfig
from serve_apps.policy.engine_settings import engine_arguments
from stores.settings import identity

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, 32),
        ({"block_size": 64}, 64),
        ({"engine": {"block_size": 96}}, 96),
        ({"gpus": 1}, None),
        ({"gpus": 1, "block_size": 16}, 16),
    ],
)
def test_cpu_engines_cache_short_prompts_and_gpu_engines_keep_their_own_block(
    settings: dict[str, Any], size: int | None, tmp_path: Path
) -> None:
    assert engine_arguments(ServeConfig(**settings), tmp_path).get("block_size") == size


@pytest.mark.parametrize("settings", [{"block_size": 16}, {"block_size": 0}, {"block_size": 0, "gpus": 1}])
def test_a_block_that_the_cpu_cannot_compute_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"serve\.block_size = \d+: take"):
        ServeConfig(**settings)


def test_a_run_from_before_the_block_size_could_be_set_goes_on() -> None:
    assert "block_size" not in identity(ServeConfig())
    assert identity(ServeConfig(block_size=64))["block_size"] == 64

"""YAML in the documentation is a run config that parses, or a part of one whose keys and values fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.docs.markdown_pages import NOT_A_RUN_CONFIG, Fence, fences, pages

pytestmark = pytest.mark.fast

BASE: Mapping[str, Any] = {
    "run": "base",
    "workflow": {"path": "my_team:SolveVerify"},
    "credit": {"path": "pipelines.credit.outcome:OutcomeShare"},
    "model_groups": {
        "first": {"agents": ["solver"], "model": "models/base"},
        "second": {"agents": ["verifier"], "model": "models/base"},
    },
    "tasks": {name: {"path": f"{name}.jsonl"} for name in ("train", "gate", "test")},
}
"""What a part of a config is laid over."""


def blocks() -> list[Fence]:
    """The YAML blocks that are run configs or parts of them."""
    found: Iterator[Fence] = (fence for page in pages() for fence in fences(page) if fence.language == "yaml")
    return [fence for fence in found if fence.before != NOT_A_RUN_CONFIG]


@pytest.mark.parametrize("fence", blocks(), ids=str)
def test_a_yaml_block_is_a_run_config_or_fits_into_one(fence: Fence) -> None:
    from pipelines.config.run_config import RunConfig

    given = yaml.safe_load(fence.text)
    assert isinstance(given, dict) and given, "an empty block: mark it as no run config"
    whole = "run" in given and "tasks" in given
    RunConfig.model_validate(given if whole else laid_over(given))


def laid_over(part: Mapping[str, Any]) -> dict[str, Any]:
    """The base with `part` on it; agents, model groups and adapters come from `part` alone where it names any."""
    config = {**BASE, **part}
    if "lora" in config.get("train", {}) and "model_groups" not in part:
        config["model_groups"] = {name: {**group, "base": "b"} for name, group in BASE["model_groups"].items()}
    if variants_of(part) is not None:
        config["train"] = {"algorithm": variants_of(part), **config.get("train", {})}
    return config


def variants_of(part: Mapping[str, Any]) -> str | None:
    """The algorithm that needs the variants which `part` plays."""
    kind = part.get("collect", {}).get("variants", {}).get("kind")
    return {"greedy": "remax"}.get(kind, kind)


def test_a_misspelt_key_in_a_part_is_found() -> None:
    from pydantic import ValidationError

    from pipelines.config.run_config import RunConfig

    with pytest.raises(ValidationError, match="min_gian"):
        RunConfig.model_validate(laid_over({"promote": {"min_gian": 0.0}}))


def test_the_base_is_a_run_config() -> None:
    from pipelines.config.run_config import RunConfig

    assert RunConfig.model_validate(laid_over({})).run == "base"

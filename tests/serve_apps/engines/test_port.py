"""Which engine a config names, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config.run_config import load_config
from pipelines.runners.validate import check
from serve_apps.config import ServeConfig
from serve_apps.engines.port import KINDS, engine_class
from serve_apps.engines.transformers_engine import TransformersEngine
from stores.settings import identity

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"


class OwnEngine(TransformersEngine):
    """An engine that a dotted path names."""


def test_a_kind_or_a_dotted_path_names_an_engine() -> None:
    assert engine_class("transformers") is TransformersEngine
    assert [engine_class(kind).__name__ for kind in KINDS] == ["VllmEngine", "TransformersEngine"]
    assert engine_class(f"{__name__}:OwnEngine") is OwnEngine


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "vlm",
            r"serve\.engine_kind = 'vlm' is no engine: take vllm, transformers, or a class as package\.module:Name",
        ),
        ("no_such_module:Engine", r"serve\.engine_kind: cannot import 'no_such_module'"),
        ("serve_apps.config:CallConfig", r"must be a subclass of serve_apps\.engines\.port\.Engine"),
    ],
)
def test_what_is_no_engine_is_refused_by_validate(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(load_config(SMALL, {"serve.engine_kind": kind}))


@pytest.mark.parametrize("setting", [{"engine": {"seed": 1}}, {"block_size": 64}, {"tensor_parallel_size": 2}])
def test_settings_of_vllm_are_refused_for_transformers(setting: dict[str, object]) -> None:
    (name,) = setting
    with pytest.raises(ValueError, match=rf"serve\.{name} is a setting of vLLM's engine"):
        ServeConfig.model_validate({"engine_kind": "transformers", **setting})


def test_another_engine_makes_another_run() -> None:
    assert "engine_kind" not in identity(ServeConfig())
    assert identity(ServeConfig(engine_kind="transformers"))["engine_kind"] == "transformers"

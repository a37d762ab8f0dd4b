"""No code out of a model folder is run: every loader of transformers says so, and so does the engine."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import ValidationError

from serve_apps.config import ServeConfig
from serve_apps.engines.vllm.settings import engine_arguments

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
PACKAGES = ("dags", "pipelines", "serve_apps", "stores", "train_loops")


def loaders() -> list[tuple[str, ast.Call]]:
    """Every call of `AutoX.from_pretrained` or `AutoX.from_config`, with its place."""
    return [
        (f"{file.relative_to(ROOT)}:{node.lineno}", node)
        for package in PACKAGES
        for file in ROOT.glob(f"{package}/**/*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config")
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id.startswith("Auto")
    ]


def test_every_loader_refuses_code_of_a_model_folder() -> None:
    assert len(loaders()) >= 5, "the loaders were not found"
    trusting = [
        place
        for place, call in loaders()
        if not any(
            keyword.arg == "trust_remote_code"
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value is False
            for keyword in call.keywords
        )
    ]
    assert trusting == []


def test_an_engine_runs_no_code_of_a_model_folder(tmp_path: Path) -> None:
    assert engine_arguments(ServeConfig(), tmp_path)["trust_remote_code"] is False
    with pytest.raises(ValidationError, match=r"trust_remote_code would run code out of the model folder"):
        ServeConfig(engine={"trust_remote_code": True})

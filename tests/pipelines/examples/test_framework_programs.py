"""The examples of agent frameworks fit together: configs, programs, exact requirements and demonstrators; no framework is installed."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from pipelines.config.run_config import load_config
from pipelines.runners.validate import check

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "infra" / "programs").glob("*.yaml"))
FRAMEWORKS = {"openai_agents": "openai-agents", "langgraph": "langgraph", "pydantic_ai": "pydantic-ai-slim"}


def test_there_is_a_config_for_each_framework() -> None:
    assert {config.stem for config in CONFIGS} == FRAMEWORKS.keys()


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_it_could_start_where_its_environment_is(config: Path) -> None:
    loaded = load_config(config)
    assert loaded.run == config.stem
    python, program = loaded.workflow.settings["command"]
    assert python == f".venvs/{config.stem}/bin/python"
    assert program == f"pipelines/examples/{config.stem}/program.py"
    assert (ROOT / program).is_file()
    here = load_config(config, {"workflow.settings.command": [sys.executable, program]})
    (said,) = [line for line in check(here) if not line.startswith("tasks.")]  # its sums are small: some are alike
    assert said.startswith(f"program: {sys.executable} {program} (found from this folder: {program}; to serve")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_without_its_environment_it_is_refused(config: Path) -> None:
    nowhere = load_config(config, {"workflow.settings.command": [".venvs/none/bin/python", "program.py"]})
    with pytest.raises(ValueError, match=r"program '\.venvs/none/bin/python' is no file here and not on"):
        check(nowhere)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_its_requirements_are_exact_and_hold_what_it_imports(name: str) -> None:
    folder = ROOT / "pipelines" / "examples" / name
    lines = (folder / "requirements.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+(\[[\w,-]+\])?==[\w.!+-]+( ; .+)?", pin) for pin in pins), pins
    pinned = {re.split(r"[=\[]", pin)[0] for pin in pins}
    assert FRAMEWORKS[name] in pinned
    tree = ast.parse((folder / "program.py").read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    distributions = {"agents": "openai-agents", "pydantic_ai": "pydantic-ai-slim"}
    imported = {module.split(".")[0] for module in modules} - sys.stdlib_module_names
    assert {distributions.get(module, module.replace("_", "-")) for module in imported} <= pinned

"""Commands in fenced blocks could be typed: `troupe` parses them, `make` has the target, the Python module exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from tests.docs.markdown_pages import ROOT, fences, pages

pytestmark = pytest.mark.fast

PAGES = [page for page in pages() if page != "CHANGELOG.md"]
"""The changelog names commands of earlier versions."""


def commands() -> Iterator[tuple[str, str]]:
    """(`page:line`, command) of every command line in a `console` or `bash` block; lines that go on are joined."""
    for page in PAGES:
        for fence in fences(page):
            if fence.language in ("console", "bash", "sh"):
                for line in fence.text.replace("\\\n", " ").splitlines():
                    prompt = line.startswith("$ ")
                    if prompt or fence.language != "console":
                        yield str(fence), line.removeprefix("$ ").strip()


def inline_commands() -> Iterator[tuple[str, str]]:
    """The same of inline code that begins with `make` or `python -m`."""
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"`((?:make|python -m) [^`\n]+)`", text):
            yield page, code


def beginning_with(*programs: str, inline: bool = False) -> list[tuple[str, list[str]]]:
    found = [*commands(), *(inline_commands() if inline else ())]
    words = [(place, shlex.split(command, comments=True)) for place, command in found]
    return [(place, w) for place, w in words if w and w[0].removeprefix(".venv/bin/") in programs]


@pytest.fixture(scope="module")
def troupe() -> Any:
    """The click command behind `troupe`."""
    import typer

    from pipelines.cli.main import app

    return typer.main.get_command(app)


def test_troupe_parses_the_commands_of_the_documentation(troupe: Any) -> None:
    import click

    refused = []
    found = beginning_with("troupe")
    for place, words in found:
        name, arguments = words[1], words[2:]
        command = troupe.commands.get(name)
        try:
            assert command is not None, f"there is no command {name!r}"
            command.make_context(name, list(arguments), resilient_parsing=False)
        except (click.ClickException, AssertionError, SystemExit) as error:
            message = getattr(error, "message", "") or str(error)
            refused.append(f"{place}: {' '.join(words)}: {message}")
    assert refused == []
    assert len(found) > 20


def test_every_make_target_of_the_documentation_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {(place, words[1]) for place, words in beginning_with("make", inline=True)}
    assert len(named) > 10
    assert sorted(f"{place}: make {target}" for place, target in named if target not in targets) == []


def test_every_python_module_of_the_documentation_exists() -> None:
    named = [(place, words[2]) for place, words in beginning_with("python", inline=True) if words[1] == "-m"]
    for place, module in named:
        path = ROOT / module.replace(".", "/")
        is_external = module.split(".")[0] not in ("pipelines", "serve_apps", "train_loops", "stores", "tests")
        assert is_external or path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), (
            f"{place}: {module}"
        )
    assert named


def test_python_blocks_are_valid_python_and_import_what_exists() -> None:
    import ast
    from importlib.util import find_spec

    for page in PAGES:
        for fence in fences(page):
            if fence.language != "python":
                continue
            for node in ast.walk(ast.parse(fence.text, filename=str(fence))):
                if not isinstance(node, ast.ImportFrom) or node.module is None:
                    continue
                if node.module.split(".")[0] in ("pipelines", "serve_apps", "train_loops", "stores"):
                    spec = find_spec(node.module)
                    assert spec is not None and spec.origin is not None, f"{fence}: no module {node.module}"
                    source = ast.parse((ROOT / spec.origin).read_text(encoding="utf-8"))
                    missing = {alias.name for alias in node.names} - _names(source)
                    assert not missing, f"{fence}: {node.module} has no {missing}"


def _names(source: Any) -> set[str]:
    import ast

    names: set[str] = set()
    for node in source.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names

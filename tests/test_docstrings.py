"""Docstrings are sentences, not labels."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast
ROOT = Path(__file__).parents[1]
PACKAGES = ("dags", "pipelines", "serve_apps", "train_loops", "stores")
MIN_WORDS = 4


def docstrings() -> list[tuple[str, str]]:
    """(`file:line`, docstring) of every module, class and function of the source that has one."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        (f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text)
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, documented) and (text := ast.get_docstring(node)) is not None
    ]


def test_a_docstring_has_more_than_a_few_words() -> None:
    every = docstrings()
    assert len(every) > 2000
    assert [f"{place} {text!r}" for place, text in every if len(text.split()) < MIN_WORDS] == []

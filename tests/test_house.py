"""What must not grow again: vLLM's folder, modules with one caller, config fields that nobody uses, long functions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "infra"))

from house import House, Module, read_house  # noqa: E402

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def house() -> House:
    return read_house()


def _house_of(**texts: str) -> House:
    return House(
        ROOT, {name.replace("__", "."): Module(name.replace("__", "."), ROOT, text) for name, text in texts.items()}
    )

"""The table of clients in the documentation is that of the cells which `make nightly` plays, with the versions of the locks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.table import markdown

pytestmark = pytest.mark.fast

RESULTS = Path(__file__).parents[2] / "infra" / "docs" / "results.md"


def test_the_documentation_shows_every_cell_that_is_played() -> None:
    assert markdown() in RESULTS.read_text(), "python -m tests.clients.table prints the table"

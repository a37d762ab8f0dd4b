"""Fixtures that several files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipelines.run.run import Run
from tests.e2e.local_runs import config_in, finish, start
from tests.e2e.scraper import Scraper


@pytest.fixture(scope="session")
def scraper() -> Iterator[Scraper]:
    """Sees what the undisturbed run shows to Prometheus."""
    scraper = Scraper()
    yield scraper
    scraper.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, scraper: Scraper) -> Iterator[Run]:
    """The run as it goes when nothing happens."""
    root = tmp_path_factory.mktemp("undisturbed")
    log = root / "log.txt"
    finish(start(root, log, scraper.environment | {"TROUPE_LOG": "json"}), log)
    yield Run(config_in(root))

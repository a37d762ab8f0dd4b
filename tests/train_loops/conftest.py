"""Fixtures that several files share."""

import pytest


@pytest.fixture(scope="session")
def one_worker() -> None:
    """The process group of a single worker, for whoever makes an engine."""
    from train_loops.engine.deepspeed_engine import join_workers

    join_workers()

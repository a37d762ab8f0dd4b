"""weights: immutable model versions, one folder each, complete as soon as its manifest is there.

    <uri>/<model group>/v<version>/   config.json  model.safetensors  tokenizer.json ...  manifest.json (last)

A version is committed by whoever finishes first; everybody else gets that one. On a local disk a whole folder appears
at once (rename). On object storage every try has a folder of its own, named by the manifest, which is written last:
what no manifest names does not exist, and a late try never mixes its files into another's. Nothing waits for the disk
(fsync makes a commit of 400 MB several times slower): any process may die, and what a power cut damages is found by
`verify`.

Who needs files of a remote version gets a copy in a cache on its machine, which keeps the last few per model group.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import struct
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stores.files import FileEntry, is_uri, list_files, local_path, open_filesystem, remove_file, remove_folder
from stores.types import ModelVersionRef

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 20
REMOTE_CHUNK_BYTES = 16 << 20
"""Each read of object storage is a request of its own."""
NUM_TRANSFERS = 8
"""Files copied from object storage at once."""
MAX_HEADER_BYTES = 100 << 20
STALE_S = 86_400
"""Age from which on the unfinished commit of a killed process is swept away."""
NUM_CACHED = 4
"""Copies of remote versions that a machine keeps per model group: live, parent, champion, reference."""
FETCH_TIMEOUT_S = 3600.0
"""How long one process waits for another's copy of a version."""
CACHED_S = 1800
"""A copy used this recently is kept in any case: somebody may be reading it."""


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
    folder: str = ""
    """Where below the version the files lie; empty: beside the manifest."""

    def to_json(self) -> str:
        """The text of `manifest.json`; floats keep every digit."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """The inverse of `to_json`; ValueError if it is no manifest."""
        try:
            data = {"folder": "", **json.loads(text)}
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
        """Args: uri: a folder, or a URI that `pyarrow.fs.FileSystem.from_uri` knows (file, s3, gs, abfss, hdfs)."""
        self.uri = str(uri).rstrip("/") if is_uri(str(uri)) else str(local_path(str(uri)))

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
                folder=store.folder,
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

    def remove(self, model_group: str, version: int) -> int:
        """Removes a version, first its manifest; returns the bytes. What a killed removal leaves is left over."""
        uri = self.uri_of(model_group, version)
        size_bytes = sum(file.size_bytes for file in list_files(uri))
        remove_file(f"{uri}/{MANIFEST}")
        remove_folder(uri)
        return size_bytes

    def leftovers(self, model_group: str, *, older_than_s: float) -> dict[str, int]:
        """Bytes by folder, a path or URI: what no manifest names and nobody has changed for so long."""
        place = self.uri_of(model_group, 0).rpartition("/")[0]
        files: dict[str, list[FileEntry]] = {}
        for file in list_files(place):
            version, _, rest = file.name.partition("/")
            is_try = rest.startswith("try-")
            files.setdefault(f"{version}/{rest.partition('/')[0]}" if is_try else version, []).append(file)
        found = {}
        for folder, entries in files.items():
            version, _, last = folder.partition("/")
            number = int(version[1:]) if version[:1] == "v" and version[1:].isdigit() else None
            ref = None if number is None else self.ref(model_group, number)
            is_named = ref is not None and (not last or read_manifest(ref).folder == last)
            if not is_named and max(e.changed_at for e in entries) < time.time() - older_than_s:
                found[f"{place}/{folder}"] = sum(e.size_bytes for e in entries)
        return found

    def fetch(self, ref: ModelVersionRef, cache_dir: str | Path | None = None) -> Path:
        """A local folder with the files of a version; without a copy if the store is on this machine."""
        return fetch(ref, cache_dir)

    def verify(self, ref: ModelVersionRef) -> None:
        """Reads everything; ValueError names the first file that is missing or not what the manifest says."""
        verify_folder(self.fetch(ref), read_manifest(ref))


def read_manifest(ref: ModelVersionRef) -> Manifest:
    """The manifest that `ref` names; ValueError if it is missing or another one."""
    data = _Folder.at(ref.uri).read(MANIFEST)
    if data is None:
        raise ValueError(
            f"{ref.uri} has no {MANIFEST}: version {ref.version} of {ref.model_group} was never committed, or "
            "maintenance removed it"
        )
    digest = sha256(data).hexdigest()
    if digest != ref.manifest_sha256:
        raise ValueError(
            f"{ref.uri}/{MANIFEST} has sha256 {digest[:12]}, the ref says {ref.manifest_sha256[:12]}: "
            "the version was replaced; take a new ref from the store"
        )
    return Manifest.from_json(data.decode())


def fetch(ref: ModelVersionRef, cache_dir: str | Path | None = None, *, with_tensors: bool = True) -> Path:
    """A local folder with the files of a version; without a copy if the store is on this machine.

    Args:
        ref: which version.
        cache_dir: where copies of remote versions are kept; default TROUPE_CACHE, else a folder for temporary files.
        with_tensors: False where config and tokenizer are enough; the folder may hold the tensors all the same.
    """
    folder = _Folder.at(ref.uri)
    manifest = read_manifest(ref)
    if folder.is_local:
        return Path(folder.path)
    cache = cache_folder(cache_dir) / sha256(ref.uri.rpartition("/")[0].encode()).hexdigest()[:16]
    whole = cache / f"v{ref.version}-{ref.manifest_sha256[:16]}"
    target = whole if with_tensors or whole.exists() else whole.with_name(f"{whole.name}-small")
    with _alone(target) as is_missing:
        if is_missing:
            _download(folder, manifest, target, with_tensors=with_tensors)
            evict(cache)
    return target


def _download(folder: _Folder, manifest: Manifest, target: Path, *, with_tensors: bool) -> None:
    names = [n for n in manifest.files if with_tensors or not n.endswith(".safetensors")]
    _sweep(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        copy = Path(scratch) / "copy"
        with ThreadPoolExecutor(max_workers=NUM_TRANSFERS) as pool:
            list(pool.map(lambda name: folder.get(f"{manifest.folder}/{name}".lstrip("/"), copy / name), names))
        folder.get(MANIFEST, copy / MANIFEST)
        _verify_files(copy, {name: manifest.files[name] for name in names})
        _rename(copy, target)


@contextmanager
def _alone(target: Path) -> Iterator[bool]:
    """One process of this machine at a time makes `target`; gives whether it is to be made, and marks it as used."""
    if _is_used(target):
        yield False
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + FETCH_TIMEOUT_S
    with (target.parent / f".lock-{target.name}").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{target} is being fetched by another process since {FETCH_TIMEOUT_S:g} s"
                    ) from None
                time.sleep(0.1)
        yield not _is_used(target)


def _is_used(target: Path) -> bool:
    """Marks a copy as used just now; False if there is none."""
    try:
        os.utime(target)
    except FileNotFoundError:
        return False
    return True


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """Where this machine keeps copies of remote versions."""
    return Path(cache_dir or os.environ.get("TROUPE_CACHE") or Path(tempfile.gettempdir()) / "troupe") / "weights"


def evict(cache: Path, *, num_kept: int = NUM_CACHED, used_s: float = CACHED_S) -> int:
    """Removes the copies of one model group that were used longest ago; returns the bytes that this freed.

    Kept are the `num_kept` used last, and what was used in the last `used_s` seconds.
    """
    copies: dict[bool, list[tuple[float, Path]]] = {True: [], False: []}
    for path in cache.glob("v*"):
        try:
            copies[path.name.endswith("-small")].append((path.stat().st_mtime, path))
        except FileNotFoundError:  # another process has just removed it
            continue
    freed = 0
    for used_at, path in (copy for found in copies.values() for copy in sorted(found, reverse=True)[num_kept:]):
        if used_at < time.time() - used_s:
            freed += size_of(path)
            gone = path.with_name(f".evict-{uuid.uuid4().hex[:12]}")
            try:
                path.rename(gone)  # at once: nobody sees half of a copy
            except FileNotFoundError:
                continue
            shutil.rmtree(gone, ignore_errors=True)
    return freed


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    sizes = []
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except FileNotFoundError:
            continue
    return sum(sizes)


def verify_folder(folder: Path, manifest: Manifest) -> None:
    """Compares every file's sha256 and all tensor names, dtypes and shapes; ValueError names the first that differs."""
    _verify_files(folder, manifest.files)
    tensors = _tensors(folder, list(manifest.files))
    if tensors != manifest.tensors:
        names = sorted(n for n in {*tensors, *manifest.tensors} if tensors.get(n) != manifest.tensors.get(n))
        raise ValueError(f"{folder}: tensors {', '.join(names[:3])} are not those of the manifest")


def _verify_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing, the manifest lists it")
        found = _sha256(path)
        if found != digest:
            raise ValueError(f"{path} has sha256 {found[:12]}, the manifest says {digest[:12]}: it was changed or cut")


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
        return cls(*open_filesystem(uri))

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
                _copy(source, file, REMOTE_CHUNK_BYTES)
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

    folder = ""

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
    """Files into a folder of this try, then the manifest, unless another try has written one by now.

    Between that look and the write another try could still get in. The stage's lease keeps two from being at it, and
    if they are, both manifests are whole and the replaced one is noticed by whoever holds its ref.
    """

    def __init__(self, filesystem: FileSystem, path: str) -> None:
        self.filesystem, self.path = filesystem, path
        self.folder = f"try-{uuid.uuid4().hex[:12]}"

    def put(self, source: Path, name: str) -> str:
        target = f"{self.path}/{self.folder}/{name}"
        self.filesystem.create_dir(target.rpartition("/")[0], recursive=True)
        with source.open("rb") as reader, self.filesystem.open_output_stream(target) as writer:
            return _copy(reader, writer)

    def finish(self, manifest: bytes) -> None:
        if _Folder(self.filesystem, self.path).read(MANIFEST) is not None:
            return
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


def _copy(source: Any, target: Any | None, chunk_bytes: int = CHUNK_BYTES) -> str:
    """Streams everything and returns its sha256; never more than one chunk in memory."""
    digest = sha256()
    while chunk := source.read(chunk_bytes):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()


def _sweep(parent: Path) -> None:
    for left in (*parent.glob(".commit-*"), *parent.glob(".fetch-*"), *parent.glob(".evict-*")):
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

"""weight_files: writes a folder of files on any pyarrow filesystem once; it is complete as soon as its manifest exists.

On a local disk a whole folder appears at once (rename). On object storage every try has a folder of its own, named by
the manifest, which is written last.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stores.files import naming_file, open_filesystem

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 20
REMOTE_CHUNK_BYTES = 16 << 20
"""Larger, because each read of object storage is a request of its own."""
STALE_S = 86_400
"""The unfinished commit of a killed process is removed at this age."""


class Folder:
    """A folder on any pyarrow filesystem, written once."""

    def __init__(self, filesystem: FileSystem | None, path: str) -> None:
        """Args: filesystem: None for the local disk."""
        self.filesystem, self.path = filesystem, path

    @classmethod
    def at(cls, uri: str) -> Folder:
        """Returns the folder at a path or URI."""
        return cls(*open_filesystem(uri))

    @property
    def is_local(self) -> bool:
        """Says whether the folder is on the local disk."""
        return self.filesystem is None

    def __str__(self) -> str:
        return self.path

    def get(self, name: str, target: Path) -> None:
        """Copies a remote file to this machine; ValueError if it is missing."""
        assert self.filesystem is not None
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.filesystem.open_input_stream(f"{self.path}/{name}") as source, target.open("wb") as file:
                copy(source, file, REMOTE_CHUNK_BYTES)
        except FileNotFoundError:
            raise ValueError(f"{self.path}/{name} is missing, the manifest lists it") from None

    def subfolders(self) -> list[str]:
        """Returns the names of the folders directly below."""
        if self.filesystem is None:
            path = Path(self.path)
            return [p.name for p in path.iterdir() if p.is_dir()] if path.is_dir() else []
        from pyarrow.fs import FileSelector, FileType

        entries = self.filesystem.get_file_info(FileSelector(self.path, allow_not_found=True))
        return [info.base_name for info in entries if info.type is FileType.Directory]

    @contextmanager
    def open_new(self) -> Iterator[LocalWriter | RemoteWriter]:
        """Yields a writer; unfinished files are removed or, on object storage, have no effect."""
        if self.filesystem is not None:
            yield RemoteWriter(self.filesystem, self.path)
            return
        parent = Path(self.path).parent
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".commit-") as scratch:
            yield LocalWriter(Path(scratch) / "new", Path(self.path))


class LocalWriter:
    """Writes files into a folder beside the target, and renames it to the target at the end."""

    folder = ""

    def __init__(self, scratch: Path, target: Path) -> None:
        self.scratch, self.target = scratch, target

    def put(self, source: Path, name: str) -> str:
        """Copies a file and returns its sha256."""
        path = self.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming_file(self.target / name), source.open("rb") as reader, path.open("wb") as writer:
            return copy(reader, writer)

    def finish(self, manifest: bytes) -> None:
        """Writes the manifest and renames the folder to the target."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        with naming_file(self.target / MANIFEST):
            (self.scratch / MANIFEST).write_bytes(manifest)
        rename(self.scratch, self.target)


class RemoteWriter:
    """Writes files into a folder of this try, then the manifest, unless another try has written one by now.

    Between that check and the write another try could still write its manifest. The stage's lease prevents two tries at
    once; if they happen all the same, both manifests are whole, and a reader of the replaced one sees another checksum than
    its ref has.
    """

    def __init__(self, filesystem: FileSystem, path: str) -> None:
        self.filesystem, self.path = filesystem, path
        self.folder = f"try-{uuid.uuid4().hex[:12]}"

    def put(self, source: Path, name: str) -> str:
        """Copies a file and returns its sha256."""
        target = f"{self.path}/{self.folder}/{name}"
        self.filesystem.create_dir(target.rpartition("/")[0], recursive=True)
        with source.open("rb") as reader, self.filesystem.open_output_stream(target) as writer:
            return copy(reader, writer)

    def finish(self, manifest: bytes) -> None:
        """Writes the manifest; from then on the version exists."""
        place = f"{self.path}/{MANIFEST}"
        if self.filesystem.get_file_info(place).is_file:
            return
        with self.filesystem.open_output_stream(place) as writer:
            writer.write(manifest)


def file_sha256(path: Path) -> str:
    """Returns the sha256 of a file, read in chunks."""
    with path.open("rb") as file:
        return copy(file, None)


def copy(source: Any, target: Any | None, chunk_bytes: int = CHUNK_BYTES) -> str:
    """Copies all bytes of `source` to `target` (None: nowhere), one chunk in memory at a time, and returns their sha256."""
    digest = sha256()
    while chunk := source.read(chunk_bytes):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()


def sweep(parent: Path) -> None:
    """Removes the unfinished folders of processes that were killed long ago."""
    for unfinished in (*parent.glob(".commit-*"), *parent.glob(".fetch-*"), *parent.glob(".evict-*")):
        try:
            is_stale = unfinished.stat().st_mtime < time.time() - STALE_S
        except FileNotFoundError:  # another writer has just finished
            continue
        if is_stale:
            shutil.rmtree(unfinished, ignore_errors=True)


def rename(source: Path, target: Path) -> None:
    """Renames a folder to `target`; if another process was first, its folder stays."""
    try:
        os.rename(source, target)
    except OSError:  # the target is a folder that is not empty: it must be a finished one
        if not (target / MANIFEST).is_file():
            raise

"""weight_files: a folder of files on any pyarrow filesystem, written once and complete as soon as its manifest is there.

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

from stores.files import open_filesystem

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 20
REMOTE_CHUNK_BYTES = 16 << 20
"""Each read of object storage is a request of its own."""
STALE_S = 86_400
"""Age from which on the unfinished commit of a killed process is swept away."""


class Folder:
    """A folder on any pyarrow filesystem, written once."""

    def __init__(self, filesystem: FileSystem | None, path: str) -> None:
        """Args: filesystem: None for the local disk."""
        self.filesystem, self.path = filesystem, path

    @classmethod
    def at(cls, uri: str) -> Folder:
        """The folder at a path or URI."""
        return cls(*open_filesystem(uri))

    @property
    def is_local(self) -> bool:
        """True on the local disk."""
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
        """Copies a remote file to this machine; ValueError if it is missing."""
        assert self.filesystem is not None
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.filesystem.open_input_stream(f"{self.path}/{name}") as source, target.open("wb") as file:
                copy(source, file, REMOTE_CHUNK_BYTES)
        except FileNotFoundError:
            raise ValueError(f"{self.path}/{name} is missing, the manifest lists it") from None

    def subfolders(self) -> list[str]:
        """Names of the folders right below."""
        if self.filesystem is None:
            path = Path(self.path)
            return [p.name for p in path.iterdir() if p.is_dir()] if path.is_dir() else []
        from pyarrow.fs import FileSelector, FileType

        found = self.filesystem.get_file_info(FileSelector(self.path, allow_not_found=True))
        return [info.base_name for info in found if info.type is FileType.Directory]

    @contextmanager
    def open_new(self) -> Iterator[LocalWriter | RemoteWriter]:
        """A writer; what it leaves unfinished is removed or, on object storage, without effect."""
        if self.filesystem is not None:
            yield RemoteWriter(self.filesystem, self.path)
            return
        parent = Path(self.path).parent
        parent.mkdir(parents=True, exist_ok=True)
        sweep(parent)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".commit-") as scratch:
            yield LocalWriter(Path(scratch) / "new", Path(self.path))


class LocalWriter:
    """Files into a folder beside the target, which takes its place at the end."""

    folder = ""

    def __init__(self, scratch: Path, target: Path) -> None:
        self.scratch, self.target = scratch, target

    def put(self, source: Path, name: str) -> str:
        """Copies a file and returns its sha256."""
        path = self.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as reader, path.open("wb") as writer:
            return copy(reader, writer)

    def finish(self, manifest: bytes) -> None:
        """Puts the folder, with its manifest, in its place."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        (self.scratch / MANIFEST).write_bytes(manifest)
        rename(self.scratch, self.target)


class RemoteWriter:
    """Files into a folder of this try, then the manifest, unless another try has written one by now.

    Between that look and the write another try could still get in. The stage's lease keeps two from being at it, and
    if they are, both manifests are whole and the replaced one is noticed by whoever holds its ref.
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
        """Writes the manifest, with which the version exists."""
        if Folder(self.filesystem, self.path).read(MANIFEST) is not None:
            return
        with self.filesystem.open_output_stream(f"{self.path}/{MANIFEST}") as writer:
            writer.write(manifest)


def file_sha256(path: Path) -> str:
    """sha256 of a file, read in chunks."""
    with path.open("rb") as file:
        return copy(file, None)


def copy(source: Any, target: Any | None, chunk_bytes: int = CHUNK_BYTES) -> str:
    """Streams everything and returns its sha256; never more than one chunk in memory."""
    digest = sha256()
    while chunk := source.read(chunk_bytes):
        digest.update(chunk)
        if target is not None:
            target.write(chunk)
    return digest.hexdigest()


def sweep(parent: Path) -> None:
    """Removes what killed processes left unfinished long ago."""
    for left in (*parent.glob(".commit-*"), *parent.glob(".fetch-*"), *parent.glob(".evict-*")):
        try:
            is_stale = left.stat().st_mtime < time.time() - STALE_S
        except FileNotFoundError:  # another writer has just finished
            continue
        if is_stale:
            shutil.rmtree(left, ignore_errors=True)


def rename(source: Path, target: Path) -> None:
    """Puts a folder in its place; whoever was there first stays."""
    try:
        os.rename(source, target)
    except OSError:  # a folder that is not empty is in that place
        if not (target / MANIFEST).is_file():
            raise

"""files: opens the filesystem behind a folder or URI, and reads and writes whole small files there.

Object storage is found by the variables that every client knows: AWS_ENDPOINT_URL (an `http://` one for servers inside a
network), AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, or a profile. They are never part of a config.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4

if TYPE_CHECKING:
    from lancedb import DBConnection
    from pyarrow.fs import FileSystem


def cache_folder() -> Path:
    """Returns the folder for what this machine may make or fetch again: TROUPE_CACHE, else this user's own among temporary files.

    Raises ValueError where the latter is somebody else's: anybody may make it first, and its owner could exchange what lies in it.
    """
    if chosen := os.environ.get("TROUPE_CACHE"):
        return Path(chosen)
    folder = Path(tempfile.gettempdir()) / f"troupe-{os.getuid()}"
    folder.mkdir(exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise ValueError(
            f"{folder} belongs to another user, and what lies there would be run: set TROUPE_CACHE to a folder"
        )
    return folder


def is_uri(location: str) -> bool:
    """Returns True for anything but a path on this machine."""
    return "://" in location and not location.startswith("file://")


def local_path(location: str) -> Path:
    """Returns the absolute path of a folder on this machine, given as a path, also one that begins with `~`, or as a file URI.

    Raises ValueError for a file URI of another machine, such as file://runs.
    """
    assert not is_uri(location), f"{location} is not on this machine"
    if not location.startswith("file://"):
        return Path(os.path.expanduser(location)).absolute()
    parts = urlsplit(location)
    if parts.netloc not in ("", "localhost"):
        raise ValueError(
            f"{location} names the machine {parts.netloc!r}: write a path, or file:// and an absolute path"
        )
    return Path(unquote(parts.path))


def open_filesystem(location: str) -> tuple[FileSystem | None, str]:
    """Returns the filesystem of `location` and its path there; None for the local disk.

    Raises ValueError for a URI that pyarrow does not know.
    """
    if not is_uri(location):
        return None, str(local_path(location))
    parts = urlsplit(location)
    filesystem, base = _remote(os.getpid(), f"{parts.scheme}://{parts.netloc}")
    return filesystem, (base.rstrip("/") + parts.path).rstrip("/")


def read_file(location: str) -> bytes | None:
    """Reads a whole small file; returns None if it is missing."""
    filesystem, path = open_filesystem(location)
    try:
        if filesystem is None:
            return Path(path).read_bytes()
        with filesystem.open_input_stream(path) as file:
            return file.read()
    except FileNotFoundError:
        return None


def write_file(location: str, data: bytes) -> None:
    """Writes a whole small file; readers see the old content or the new one, never a part."""
    filesystem, path = open_filesystem(location)
    if filesystem is not None:
        filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        with filesystem.open_output_stream(path) as file:
            file.write(data)
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Threads, and machines that share a folder, may write at once.
    temporary = target.with_name(f".{target.name}.{uuid4().hex[:12]}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)  # on a full disk a part of it would stay
        raise OSError(error.errno, error.strerror, path) from error


@contextmanager
def naming_file(path: str | Path) -> Iterator[None]:
    """Has an error of the operating system that names no file, as that of a failed write, name this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def move_file(location: str, target: str) -> None:
    """Moves a file to another place of the same file system, for which a local disk needs no room."""
    from pyarrow.fs import LocalFileSystem

    filesystem, path = open_filesystem(location)
    filesystem, target_path = filesystem or LocalFileSystem(), open_filesystem(target)[1]
    filesystem.create_dir(target_path.rpartition("/")[0], recursive=True)
    filesystem.move(path, target_path)


def read_json_object(file: Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object; ValueError names the file where it holds anything else."""
    try:
        data = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}): write it again, or copy it from its source") from None
    if not isinstance(data, dict):
        raise ValueError(
            f"{file} holds no JSON object but {str(data)[:40]!r}: write it again, or copy it from its source"
        )
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file below a folder."""

    name: str
    """Relative to the folder."""
    size_bytes: int
    changed_at: float
    """Unix seconds."""


def list_files(location: str) -> list[FileEntry]:
    """Returns every file below a folder; nothing where there is no folder. Files that disappear meanwhile are left out."""
    from pyarrow.fs import FileSelector, FileType, LocalFileSystem

    filesystem, path = open_filesystem(location)
    entries = (filesystem or LocalFileSystem()).get_file_info(FileSelector(path, allow_not_found=True, recursive=True))
    return [
        FileEntry(name=info.path.removeprefix(path).lstrip("/"), size_bytes=info.size, changed_at=info.mtime_ns / 1e9)
        for info in entries
        if info.type is FileType.File
    ]


def remove_folder(location: str, *, keeps_folder: bool = False) -> None:
    """Removes a folder with its content, or its content only; nothing happens if there is no folder."""
    from pyarrow.fs import LocalFileSystem

    filesystem, path = open_filesystem(location)
    filesystem = filesystem or LocalFileSystem()
    try:
        filesystem.delete_dir_contents(path) if keeps_folder else filesystem.delete_dir(path)
    except FileNotFoundError:
        return


def connect_lancedb(uri: str) -> DBConnection:
    """Opens a LanceDB store, of which a folder on this machine is made.

    LanceDB reads the variables itself, but plain http must be allowed; and it takes file URIs as they are, without unquoting.
    """
    import lancedb

    if not is_uri(uri):
        return lancedb.connect(str(local_path(uri)))
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    is_http = uri.startswith("s3://") and endpoint.startswith("http://")
    return lancedb.connect(uri, storage_options={"allow_http": "true"} if is_http else None)


@cache
def _remote(pid: int, root: str) -> tuple[FileSystem, str]:
    """Creates one client per process and bucket.

    A client is cached because creating one asks the server for the bucket's region; by process, because a forked child
    must not use its parent's.
    """
    from pyarrow.fs import FileSystem

    try:
        return FileSystem.from_uri(root)
    except (ValueError, NotImplementedError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise ValueError(f"storage at {root} cannot be opened: {error}") from None

"""files: a folder or URI -> the filesystem behind it, and whole small files there.

Object storage is found by the variables that every client knows: AWS_ENDPOINT_URL (an `http://` one for servers inside a
network), AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, or a profile. They are never part of a config.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


def is_uri(place: str) -> bool:
    """True for anything but a path on this machine."""
    return "://" in place and not place.startswith("file://")


def local_path(place: str) -> Path:
    """The absolute path of a folder on this machine, given as such or as a file URI."""
    assert not is_uri(place), f"{place} is not on this machine"
    return Path(unquote(urlsplit(place).path) if place.startswith("file://") else place).absolute()


def open_filesystem(place: str) -> tuple[FileSystem | None, str]:
    """The filesystem that `place` lies on and its path there; None for the local disk.

    Raises ValueError for a URI that pyarrow does not know.
    """
    if not is_uri(place):
        return None, str(local_path(place))
    parts = urlsplit(place)
    filesystem, base = _remote(os.getpid(), f"{parts.scheme}://{parts.netloc}")
    return filesystem, (base.rstrip("/") + parts.path).rstrip("/")


def read_file(place: str) -> bytes | None:
    """A whole small file; None if it is missing."""
    filesystem, path = open_filesystem(place)
    try:
        if filesystem is None:
            return Path(path).read_bytes()
        with filesystem.open_input_stream(path) as file:
            return file.read()
    except FileNotFoundError:
        return None


def write_file(place: str, data: bytes) -> None:
    """A whole small file, seen by others as it was or as it is, never in part."""
    filesystem, path = open_filesystem(place)
    if filesystem is not None:
        filesystem.create_dir(path.rpartition("/")[0], recursive=True)
        with filesystem.open_output_stream(path) as file:
            file.write(data)
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(target)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file below a folder."""

    name: str
    """Relative to the folder."""
    size_bytes: int
    changed_at: float
    """Unix seconds."""


def list_files(place: str) -> list[FileEntry]:
    """Every file below a folder; nothing where there is no folder. What disappears meanwhile is left out."""
    from pyarrow.fs import FileSelector, FileType, LocalFileSystem

    filesystem, path = open_filesystem(place)
    found = (filesystem or LocalFileSystem()).get_file_info(FileSelector(path, allow_not_found=True, recursive=True))
    return [
        FileEntry(name=info.path.removeprefix(path).lstrip("/"), size_bytes=info.size, changed_at=info.mtime_ns / 1e9)
        for info in found
        if info.type is FileType.File
    ]


def remove_folder(place: str, *, keeps_folder: bool = False) -> None:
    """Removes a folder with all that is in it, or only what is in it; nothing happens where there is none."""
    from pyarrow.fs import LocalFileSystem

    filesystem, path = open_filesystem(place)
    filesystem = filesystem or LocalFileSystem()
    try:
        filesystem.delete_dir_contents(path) if keeps_folder else filesystem.delete_dir(path)
    except FileNotFoundError:
        return


def remove_file(place: str) -> None:
    """Removes a file; nothing happens where there is none."""
    from pyarrow.fs import LocalFileSystem

    filesystem, path = open_filesystem(place)
    try:
        (filesystem or LocalFileSystem()).delete_file(path)
    except FileNotFoundError:
        return


def lancedb_options(uri: str) -> dict[str, str] | None:
    """What LanceDB must be told beside the variables that it reads by itself: that an http endpoint is meant so."""
    if not uri.startswith("s3://"):
        return None
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    return {"allow_http": "true"} if endpoint.startswith("http://") else {}


@cache
def _remote(pid: int, root: str) -> tuple[FileSystem, str]:
    """One client per process and bucket: making one asks for the bucket's region. A forked child makes its own."""
    from pyarrow.fs import FileSystem

    try:
        return FileSystem.from_uri(root)
    except (ValueError, NotImplementedError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise ValueError(f"storage at {root} cannot be opened: {error}") from None

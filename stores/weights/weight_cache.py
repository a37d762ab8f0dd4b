"""weight_cache: copies remote model versions to this machine, and keeps the last few per model group."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from stores.files import cache_folder
from stores.types import ModelVersionRef
from stores.weights.manifest import Manifest, read_manifest, verify_files
from stores.weights.weight_files import MANIFEST, Folder, rename, sweep

NUM_TRANSFERS = 8
"""So many files are copied from object storage at once."""
NUM_CACHED = 4
"""A machine keeps so many copies of remote versions per model group: live, parent, champion, reference."""
FETCH_TIMEOUT_S = 3600.0
"""How long one process waits for another's copy of a version."""
CACHED_S = 1800
"""A copy used this recently is kept in any case: somebody may be reading it."""


def fetch(ref: ModelVersionRef, cache_dir: str | Path | None = None, *, with_tensors: bool = True) -> Path:
    """Returns a local folder with the files of a version; nothing is copied if the store is on this machine.

    Args:
        ref: the version.
        cache_dir: the folder of all copies; default `stores.files.cache_folder()`.
        with_tensors: False where config and tokenizer are enough; the folder may hold the tensors all the same.
    """
    folder = Folder.at(ref.uri)
    manifest = read_manifest(ref)
    if folder.is_local:
        return Path(folder.path)
    cache = copies_folder(cache_dir) / sha256(ref.uri.rpartition("/")[0].encode()).hexdigest()[:16]
    names = [n for n in manifest.files if with_tensors or not n.endswith(".safetensors")]
    size_bytes = manifest.size_bytes if with_tensors else None
    whole = cache / f"v{ref.version}-{ref.manifest_sha256[:16]}"
    target = whole if with_tensors or _is_used(whole, names) else whole.with_name(f"{whole.name}-small")
    with _alone(target, names, size_bytes) as is_missing:
        if is_missing:
            remove_copy(target)
            _download(folder, manifest, target, names)
            evict(cache)
    return target


def _download(folder: Folder, manifest: Manifest, target: Path, names: Sequence[str]) -> None:
    sweep(target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        copy = Path(scratch) / "copy"
        with ThreadPoolExecutor(max_workers=NUM_TRANSFERS) as pool:
            list(pool.map(lambda name: folder.get(f"{manifest.folder}/{name}".lstrip("/"), copy / name), names))
        folder.get(MANIFEST, copy / MANIFEST)
        verify_files(copy, {name: manifest.files[name] for name in names})
        rename(copy, target)


@contextmanager
def _alone(target: Path, names: Sequence[str], size_bytes: int | None) -> Iterator[bool]:
    """Lets one process of this machine at a time create `target`; yields whether files are missing, and marks it as used."""
    if _is_used(target, names, size_bytes):
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
        yield not _is_used(target, names, size_bytes)


def _is_used(target: Path, names: Sequence[str], size_bytes: int | None = None) -> bool:
    """Marks a copy as used now; returns False if there is none, or files are gone or cut.

    Cleaners of /tmp take what nobody read for days, and a power cut empties files that were not on the disk yet.

    Args: size_bytes: of these files together; None: it is not known.
    """
    try:
        os.utime(target)
        num_bytes = sum((target / name).stat().st_size for name in names)
    except FileNotFoundError:
        return False
    return size_bytes in (None, num_bytes) and (target / MANIFEST).is_file()


def remove_copy(copy: Path) -> None:
    """Removes a copy, if there is one; a rename is atomic: nobody sees half of it."""
    doomed = copy.with_name(f".evict-{uuid.uuid4().hex[:12]}")
    with suppress(FileNotFoundError):
        copy.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def copies_folder(cache_dir: str | Path | None = None) -> Path:
    """Returns the folder in which this machine keeps this user's copies of remote versions."""
    return Path(cache_dir or cache_folder()) / "weights"


def evict(cache: Path, *, num_kept: int = NUM_CACHED, used_s: float = CACHED_S) -> int:
    """Removes the copies of one model group that were used longest ago; returns how many bytes that freed.

    The `num_kept` copies that were used last are kept, and those that were used in the last `used_s` seconds.
    """
    copies: dict[bool, list[tuple[float, Path]]] = {True: [], False: []}
    for path in cache.glob("v*"):
        try:
            copies[path.name.endswith("-small")].append((path.stat().st_mtime, path))
        except FileNotFoundError:  # another process has just removed it
            continue
    freed = 0
    for used_at, path in (copy for same in copies.values() for copy in sorted(same, reverse=True)[num_kept:]):
        if used_at < time.time() - used_s:
            size = size_of(path)
            with suppress(FileNotFoundError):
                if path.stat().st_mtime == used_at:  # not used meanwhile
                    remove_copy(path)
                    freed += size
    return freed


def size_of(folder: Path) -> int:
    """Returns the bytes of all files in a folder."""
    sizes = []
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size if path.is_file() else 0)
        except FileNotFoundError:
            continue
    return sum(sizes)

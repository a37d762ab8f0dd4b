"""merge_locks: a lock of Python 3.11 and what newer Pythons resolve to -> one lock for all of them, on standard output.

`python infra/merge_locks.py LOCK 3.12=FILE 3.13=FILE [before=FILE]`; `before` is the lock that is replaced. Standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

Lock = dict[str, list[str]]
"""`name==version`, with a marker where it has one -> SHA-256 hashes of its files, each `sha256:` and 64 digits."""


def read(text: str) -> Lock:
    """Returns what a requirements file holds; comments are left out."""
    lock: Lock = {}
    for line in text.replace("\\\n", " ").splitlines():
        requirement, *hashes = line.partition("#")[0].split("--hash=")
        if requirement.strip():
            lock[requirement.strip()] = [digest.strip() for digest in hashes]
    return lock


def write(lock: Lock) -> str:
    """Returns the text of a requirements file, sorted by name."""
    by_name = sorted(lock.items(), key=lambda item: item[0].partition("==")[0])
    blocks = (
        " \\\n    ".join([requirement, *(f"--hash={digest}" for digest in hashes)]) for requirement, hashes in by_name
    )
    return "".join(f"{block}\n" for block in blocks)


def merge(lock: Lock, newer: Mapping[str, Lock], before: Lock) -> Lock:
    """Returns `lock` with what only newer Pythons need, each with a marker.

    What newer Pythons no longer need stays without a marker: it does no harm there.

    Args:
        newer: Python version, e.g. "3.12" -> what was resolved with `lock` as constraints.
        before: the lock that is replaced. A build that is not on PyPI (`torch==2.13.0+cpu`) keeps the hashes that its version had
            there: the folder or index that was asked now may hold the file of one Python alone.
    """
    pythons: dict[str, list[str]] = {}
    hashes: dict[str, set[str]] = {requirement: set(digests) for requirement, digests in lock.items()}
    for version, resolved in newer.items():
        for requirement, digests in resolved.items():
            if requirement not in lock:
                pythons.setdefault(requirement, []).append(f"python_version == '{version}'")
            hashes.setdefault(requirement, set()).update(digests)
    for requirement, digests in before.items():
        if "+" in requirement and requirement in hashes:
            hashes[requirement].update(digests)
    markers = {requirement: f" ; {' or '.join(versions)}" for requirement, versions in pythons.items()}
    return {f"{requirement}{markers.get(requirement, '')}": sorted(digests) for requirement, digests in hashes.items()}


def main() -> None:
    """Merges the files that the command line names."""
    lock, *others = sys.argv[1:]
    named = dict(argument.split("=", 1) for argument in others)
    locks = {name: read(Path(file).read_text()) for name, file in named.items()}
    before = locks.pop("before", {})
    print(write(merge(read(Path(lock).read_text()), locks, before)), end="")


if __name__ == "__main__":
    main()

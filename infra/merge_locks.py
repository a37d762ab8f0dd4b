"""merge_locks: a lock of Python 3.11 and what newer Pythons resolve to -> one lock for all of them, on standard output.

`python infra/merge_locks.py LOCK 3.12=FILE 3.13=FILE`. Standard library only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def merge(lock: Sequence[str], newer: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the lines of `lock`, and those that only newer Pythons need, each with a marker; sorted by name.

    What newer Pythons no longer need stays without a marker: it does no harm there.

    Args:
        lock: lines `name==version`.
        newer: Python version, e.g. "3.12" -> lines that were resolved with `lock` as constraints.
    """
    pythons: dict[str, list[str]] = {}
    for version, lines in newer.items():
        for line in lines:
            if line not in lock:
                pythons.setdefault(line, []).append(f"python_version == '{version}'")
    marked = [f"{line} ; {' or '.join(versions)}" for line, versions in pythons.items()]
    return sorted([*lock, *marked], key=lambda line: line.partition("==")[0])


def main() -> None:
    """Merges the files that the command line names."""
    lock, *resolved = sys.argv[1:]
    files = dict(argument.split("=", 1) for argument in resolved)
    newer = {version: Path(file).read_text().splitlines() for version, file in files.items()}
    print("\n".join(merge(Path(lock).read_text().splitlines(), newer)))


if __name__ == "__main__":
    main()

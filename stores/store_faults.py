"""store_faults: what SQLite or LanceDB says -> an error that names the file, the cause and the way out.

    damaged, or no store at all      UnreadableStore: to repeat does not help
    disk full, read-only, forbidden  OSError with its errno and the file

Everything else stays as it is: what a database server or object storage says, and conflicts that a repetition ends.
"""

from __future__ import annotations

import errno
import os
import re
import sqlite3
from pathlib import Path
from typing import Any

import sqlalchemy as sa

PARTS = ("-wal", "-journal", "-shm")
"""What SQLite keeps beside a file, by the ends of their names."""
FULL_BELOW_BYTES = 65_536
"""Free space below which a failed write is put down to a full disk: SQLite's smallest files need this much."""
NO_TABLE = ("no such table", "no such column")
OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How LanceDB says what the operating system refused; it leaves the file out of most messages."""
DAMAGED = re.compile(
    r"^lance error: Not found: |file size is too small|failed to fill whole buffer|Invalid range|corrupt file|"
    r"does not appear to be a Lance file|magic number|UnexpectedEof"
)
"""What LanceDB says of files that are missing, cut or overwritten."""


class UnreadableStore(RuntimeError):
    """A store is damaged, or its files are not what they should be: a person has to look. Nothing was changed."""


def name_sqlite_faults(engine: sa.Engine | type[sa.Engine]) -> None:
    """Has errors of an engine on SQLite, or of all engines of this process, name their file; others stay as they are."""
    if not sa.event.contains(engine, "handle_error", _name_fault):
        sa.event.listen(engine, "handle_error", _name_fault)


def _name_fault(context: Any) -> None:
    fault, url = context.original_exception, context.engine.url if context.engine is not None else None
    if isinstance(fault, sqlite3.Error) and url is not None and url.database and context.dialect.name == "sqlite":
        named = sqlite_fault(fault, Path(url.database))
        if named is not None:
            raise named from fault


def sqlite_fault(error: sqlite3.Error, file: Path) -> Exception | None:
    """Returns an error that names the file; None for what is not about the file, or what a repetition may mend."""
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF  # without the extension
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return damaged(file, str(error))
    if code == sqlite3.SQLITE_ERROR and str(error).startswith(NO_TABLE):
        return damaged(file, f"it has not the tables of Troupe: {error}")
    if code == sqlite3.SQLITE_FULL:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_IOERR):
        reason = _why_not_written(file)
        return None if reason is None else OSError(reason, os.strerror(reason), str(file))
    return None


def damaged(file: Path, reason: str) -> UnreadableStore:
    """Returns the error for a SQLite file that is there and cannot be read."""
    return UnreadableStore(
        f"{file} is damaged ({reason}): put a copy of it back (with {file.name}-wal, where there is one), or save what can "
        f"be read with `sqlite3 {file} .recover`. Nothing was changed, and the stores beside it are not touched by this"
    )


def lance_fault(error: Exception, name: str, folder: str) -> Exception | None:
    """Returns an error that names the table and its folder; None for what is not about its files.

    Args: name: what people call the table.
    """
    text = str(error)
    refused = OS_ERROR.search(text)
    if refused and int(refused[1]) != errno.ENOENT:
        return OSError(int(refused[1]), os.strerror(int(refused[1])), folder)
    if not DAMAGED.search(text):
        return None
    reason = text.removeprefix("lance error: ").removeprefix("LanceError(IO): ").partition(", /")[0]
    return damaged_table(name, folder, reason)


def damaged_table(name: str, folder: str, reason: str) -> UnreadableStore:
    """Returns the error for a table whose files are there and cannot be read."""
    return UnreadableStore(f"{name} is damaged ({reason}): put a copy of {folder} back. Nothing was changed")


def _why_not_written(file: Path) -> int | None:
    """Returns the errno for which SQLite could not write a file, or make one beside it; None where none is seen."""
    folder = file.parent
    if not folder.is_dir():
        return errno.ENOENT
    stats = os.statvfs(folder)
    if stats.f_flag & os.ST_RDONLY:
        return errno.EROFS
    places = [folder, file, *(file.with_name(file.name + part) for part in PARTS)]
    if any(place.exists() and not os.access(place, os.R_OK | os.W_OK) for place in places):
        return errno.EACCES
    is_full = stats.f_bavail * stats.f_frsize < FULL_BELOW_BYTES or (stats.f_files and not stats.f_favail)
    return errno.ENOSPC if is_full else None

"""sqlite: the path of a SQLite file <-> its URL, and transactions that only read it; nothing is written beside it.

    nothing beside the file to be     opened as immutable: without locks, and without files beside it. Whether somebody wrote to it
    taken into account                meanwhile is looked at afterwards, and then it is read again
    somebody writes to it, or was     opened with mode=ro: with SQLite's locks on the files beside it, which a read-only mount of a
    killed while writing              live run shows as well
    ... and these cannot be used      a private copy in the temporary folder

To read a file in WAL mode, a plain connection makes FILE-wal and FILE-shm: it fails on a read-only mount, in a folder of somebody
else and on a full disk.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NoReturn, TypeVar
from urllib.parse import parse_qsl, quote, unquote

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from stores.store_faults import UnreadableStore, damaged, sqlite_fault

T = TypeVar("T")
PENDING = ("-wal", "-journal")
"""Ends of the names of the files that hold what is not in the file itself yet, or must be taken back there."""
ATTEMPTS = 5
TIMEOUT_S = 30.0
UNUSABLE = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL}
"""What SQLite answers where it may not, or cannot, write beside the file."""
OPTIONS = frozenset({"timeout", "isolation_level", "detect_types", "check_same_thread", "cached_statements"})
"""What may follow the `?` of such a URL: the options of Python's module but `uri`, with which the path means another file."""


def sqlite_url(path: str | Path) -> str:
    """Returns the URL of a file, whatever characters its path has."""
    return sa.URL.create("sqlite", database=str(path)).render_as_string()


def absolute_sqlite(text: str) -> sa.URL:
    """Returns the URL in a text, with a path that does not depend on the current folder; one that begins with `~` lies at home.

    A `?` begins options only where options follow: else it is one of the path that was not escaped, and SQLAlchemy would
    write to another file. Raises ValueError for an option that SQLite does not know.
    """
    head, _, rest = text.partition("?")
    url = sa.make_url(head)
    if "/" in rest or (rest and "=" not in rest):
        url = url.set(database=f"{url.database or ''}?{unquote(rest)}")
    elif rest:
        unknown = [name for name, _ in parse_qsl(rest, keep_blank_values=True) if name not in OPTIONS]
        if unknown:
            raise ValueError(f"{text!r}: SQLite has no option {unknown[0]!r}; in a path, write ? as %3F")
        url = sa.make_url(text)
    is_file = url.database and url.database != ":memory:"
    return url.set(database=str(Path(os.path.expanduser(url.database or "")).absolute())) if is_file else url


def sqlite_file(text: str) -> Path | None:
    """Returns the file that a SQLite URL names; None for any other URL."""
    if not text.startswith("sqlite:///"):
        return None
    database = absolute_sqlite(text).database
    return None if database in (None, "", ":memory:") else Path(database or "")


class SqliteReader:
    """Reads one SQLite file. It is cheap to create and to pickle: each transaction has a connection of its own."""

    def __init__(self, file: str | Path) -> None:
        """Args: file: it need not exist yet."""
        self.file = Path(file).absolute()

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Returns what `work` reads in one connection; it may be called several times, and its result must be complete.

        Raises UnreadableStore where the file is not there or damaged, OSError where it may not be read, TimeoutError where it
        changed during each attempt.
        """
        if not self.file.exists():
            raise UnreadableStore(f"{self.file} does not exist")
        for _ in range(ATTEMPTS):
            before = _state(self.file)
            is_alone = not self.pending
            try:
                result = self._read_with("immutable=1" if is_alone else "mode=ro", work)
            except DBAPIError as error:
                if is_alone and _state(self.file) != before:
                    continue
                if not is_alone and _code(error) in UNUSABLE:
                    return self._read_copy(work)
                self._raise_named(error)
            if not is_alone or _state(self.file) == before:
                return result
        raise TimeoutError(f"{self.file} was changed during each of {ATTEMPTS} attempts to read it: repeat")

    def check(self, *, table: str = "") -> None:
        """Raises as `read` does where the file is no database, or has no table of this name."""
        names = self.read(lambda c: c.exec_driver_sql("SELECT name FROM sqlite_master").scalars().all())
        if table and table not in names:
            raise damaged(self.file, f"it has no table {table}")

    @property
    def pending(self) -> list[Path]:
        """Files beside this one without which its content is not complete."""
        beside = (self.file.with_name(self.file.name + end) for end in PENDING)
        return [part for part in beside if _has_content(part)]

    def _read_with(self, option: str, work: Callable[[sa.Connection], T]) -> T:
        with _engine(f"{_url(self.file)}?{option}").connect() as connection:
            return work(connection)

    def _read_copy(self, work: Callable[[sa.Connection], T]) -> T:
        """Reads a copy in the temporary folder, in which SQLite completes what was not."""
        try:
            with tempfile.TemporaryDirectory(prefix="troupe-") as folder:
                parts = [self.file, *self.pending]
                before = [_state(part) for part in parts]
                for part in parts:
                    shutil.copyfile(part, Path(folder, part.name))
                if [_state(part) for part in parts] != before:
                    raise TimeoutError(f"{self.file} was changed while it was copied: repeat")
                with _engine(_url(Path(folder, self.file.name))).connect() as connection:
                    return work(connection)
        except DBAPIError as error:
            self._raise_named(error)
        except TimeoutError:
            raise
        except OSError as error:
            raise UnreadableStore(
                f"{self.file} was not closed by its last writer and cannot be opened where it lies, nor copied to "
                f"{tempfile.gettempdir()} ({error}): set TMPDIR to a folder with room for it, or mount it for writing"
            ) from error

    def _raise_named(self, error: DBAPIError) -> NoReturn:
        named = sqlite_fault(error.orig, self.file) if isinstance(error.orig, sqlite3.Error) else None
        raise named or error from error.orig


def _url(file: Path) -> str:
    return f"file:{quote(os.fsencode(file))}"


@lru_cache(maxsize=64)
def _engine(url: str) -> sa.Engine:
    """Opens SQLite's own form of URL anew for each connection."""
    return sa.create_engine(
        "sqlite://", creator=lambda: sqlite3.connect(url, uri=True, timeout=TIMEOUT_S), poolclass=NullPool
    )


def _has_content(file: Path) -> bool:
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:  # its last writer removes it as it closes
        return False


def _state(file: Path) -> tuple[int, int, int]:
    """Identifies the content of a file."""
    stats = os.stat(file)
    return stats.st_ino, stats.st_size, stats.st_mtime_ns


def _code(error: DBAPIError) -> int:
    return (getattr(error.orig, "sqlite_errorcode", None) or 0) & 0xFF

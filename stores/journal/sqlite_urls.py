"""sqlite_urls: the path of a SQLite file <-> its SQLAlchemy URL, in which `?` begins options and `%` is an escape."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, unquote

import sqlalchemy as sa

OPTIONS = frozenset(
    {"timeout", "isolation_level", "detect_types", "check_same_thread", "cached_statements", "uri"}  # Python's module
    | {"mode", "cache", "immutable", "nolock", "psow", "vfs"}  # SQLite itself, with uri=true
)
"""What may follow the `?` of such a URL."""


def sqlite_url(path: str | Path) -> str:
    """Returns the URL of a file, whatever characters its path has."""
    return sa.URL.create("sqlite", database=str(path)).render_as_string()


def absolute_sqlite(text: str) -> sa.URL:
    """Returns the URL in a text, with a path that does not depend on the current folder.

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
    return url.set(database=str(Path(url.database or "").absolute())) if is_file else url


def sqlite_file(text: str) -> Path | None:
    """Returns the file that a SQLite URL names; None for any other URL."""
    if not text.startswith("sqlite:///"):
        return None
    database = absolute_sqlite(text).database
    return None if database in (None, "", ":memory:") else Path(database or "")

"""schema: the tables of a journal, and the engine that makes them where they are missing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.schema import CreateTable

from stores.store_faults import name_sqlite_faults

LIBPQ_DEADLINES = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""With these a server that vanished is noticed within 30 s; in seconds, but `tcp_user_timeout` in milliseconds."""

METADATA = sa.MetaData()
RUNS = sa.Table(
    "runs",
    METADATA,
    sa.Column("run_id", sa.String(200), primary_key=True),
    sa.Column("config_sha256", sa.String(64), nullable=False),
    sa.Column("config_json", sa.Text, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
)
STAGES = sa.Table(
    "stages",
    METADATA,
    sa.Column("run_id", sa.String(200), primary_key=True),
    sa.Column("iteration", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("stage", sa.String(100), primary_key=True),
    sa.Column("model_group", sa.String(200), primary_key=True),
    sa.Column("status", sa.String(20), nullable=False),
    sa.Column("token", sa.BigInteger, nullable=False),
    sa.Column("owner", sa.String(200), nullable=False),
    sa.Column("process", sa.String(300), nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("ended_at", sa.Float),
    sa.Column("seconds", sa.Float),
    sa.Column("ref", sa.Text),
    sa.Column("error", sa.Text, nullable=False),
)
VALUES = sa.Table(
    "run_values",
    METADATA,
    sa.Column("run_id", sa.String(200), primary_key=True),
    sa.Column("name", sa.String(200), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)


def open_engine(url: str, *, is_read_only: bool = False) -> sa.Engine:
    """Connects; where the journal is only read, its tables need not be made."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite":
        is_libpq = parsed.get_dialect().driver in ("psycopg", "psycopg2")
        engine = sa.create_engine(url, pool_pre_ping=True, connect_args=LIBPQ_DEADLINES if is_libpq else {})
    else:
        Path(parsed.database or "").parent.mkdir(parents=True, exist_ok=True)
        engine = sa.create_engine(url, connect_args={"timeout": 30})
        name_sqlite_faults(engine)
        sa.event.listen(engine, "connect", _use_wal)
    if is_read_only and sa.inspect(engine).has_table(RUNS.name):  # a replica refuses to make tables, even those it has
        return engine
    for tries_left in (2, 1, 0):
        try:
            with engine.begin() as connection:
                for table in METADATA.sorted_tables:
                    connection.execute(CreateTable(table, if_not_exists=True))
            return engine
        except (IntegrityError, OperationalError, ProgrammingError):  # two processes make the tables at once
            if not tries_left:
                raise
            time.sleep(0.2)
    raise AssertionError("unreachable")


def _use_wal(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA busy_timeout = 30000")
    if cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.close()

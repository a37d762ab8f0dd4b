"""stores.journal.sqlite: every committed row is read, whatever lies beside the file, and nothing is written there."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from mounts import on_full_disk, on_read_only_mount

from stores.journal.journal import Journal
from stores.journal.sqlite import SqliteReader, sqlite_url
from stores.registry.experiment import absolute, connect
from stores.registry.tracking import RunTracker
from stores.store_faults import UnreadableStore
from stores.traces.store import TraceStore

pytestmark = pytest.mark.fast


READ = """
import sys
from stores.registry.experiment import connect
from stores.journal.journal import Journal
from stores.journal.sqlite import sqlite_url
print([row.run_id for row in Journal(sqlite_url(sys.argv[1]), is_read_only=True).runs()])
"""


WRITE = """
import os, sys, time
from stores.registry.experiment import connect
from stores.journal.journal import Journal
from stores.journal.sqlite import sqlite_url
Journal(sqlite_url(sys.argv[1])).begin_run("second", "sha", "{}")
print("written", flush=True)
time.sleep(600)
"""


FOLDERS = ["q?a", "q?timeout=9", "50%", "q%3Fa", "c#1", "a b+c", "x@y:z", "ü&=;", "[1]"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A journal with one run, closed by its writer."""
    file = tmp_path / "q?a 50%" / "journal.db"
    journal = Journal(sqlite_url(file))
    journal.begin_run("first", "sha", "{}")
    assert journal._engine is not None
    journal._engine[1].dispose()
    assert [path.name for path in file.parent.iterdir()] == ["journal.db"]
    return file


@contextmanager
def writer(file: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has committed a second run and still has the journal open."""
    process = subprocess.Popen([sys.executable, "-c", WRITE, file], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def count(connection: sa.Connection) -> int:
    return int(connection.exec_driver_sql("SELECT count(*) FROM runs").scalar_one())


def test_reading_a_journal_writes_nothing_beside_it(file: Path) -> None:
    before = content(file.parent)
    assert [row.run_id for row in Journal(sqlite_url(file), is_read_only=True).runs()] == ["first"]
    assert content(file.parent) == before
    with pytest.raises(AssertionError, match="is only read here"):
        Journal(sqlite_url(file), is_read_only=True).put_value("first", "name", {})


@pytest.mark.test
def test_a_closed_journal_is_read_on_a_read_only_mount_and_on_a_full_disk(file: Path) -> None:
    for run in (on_read_only_mount, on_full_disk):
        done = run(file.parent, [sys.executable, "-c", READ, file])
        assert done.stdout == "['first']\n", done.stderr


@pytest.mark.test
def test_what_a_live_or_killed_writer_committed_is_read_on_a_read_only_mount(file: Path) -> None:
    with writer(file):
        live = on_read_only_mount(file.parent, [sys.executable, "-c", READ, file])
    assert live.stdout == "['first', 'second']\n", live.stderr
    assert file.with_name("journal.db-wal").stat().st_size, "its writer was killed"
    for run in (on_read_only_mount, on_full_disk):
        killed = run(file.parent, [sys.executable, "-c", READ, file])
        assert killed.stdout == "['first', 'second']\n", killed.stderr
    file.with_name("journal.db-shm").unlink()  # as in a copy that leaves it out
    for run in (on_read_only_mount, on_full_disk):
        copied = run(file.parent, [sys.executable, "-c", READ, file])
        assert copied.stdout == "['first', 'second']\n", copied.stderr


def test_a_writer_that_comes_during_an_immutable_read_has_it_repeated(file: Path) -> None:
    attempts = []

    def work(connection: sa.Connection) -> int:
        number = count(connection)
        attempts.append(number)
        if len(attempts) == 1:
            Journal(sqlite_url(file)).begin_run("second", "sha", "{}")
            with sqlite3.connect(file) as other:
                other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return number

    assert SqliteReader(file).read(work) == 2
    assert attempts == [1, 2]


def test_what_the_last_writer_removes_while_it_is_looked_at_does_not_count(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_file", lambda _: True)  # as it was a moment before
    reader = SqliteReader(file)
    assert reader.pending == [] and reader.read(count) == 1


def test_a_file_that_never_rests_ends_in_one_message(file: Path) -> None:
    def work(connection: sa.Connection) -> int:
        os.utime(file, ns=(0, os.stat(file).st_mtime_ns + 1))
        return count(connection)

    with pytest.raises(TimeoutError, match=r"journal\.db was changed during each of 5 attempts"):
        SqliteReader(file).read(work)


@pytest.mark.parametrize(
    ("damage", "reason", "is_read_only"),
    [
        ("header", "file is not a database", True),
        ("header", "file is not a database", False),
        ("cut", "malformed", True),
        ("cut", "malformed", False),
        ("foreign", "no such table", True),
    ],
)
def test_a_damaged_journal_is_named_with_what_to_do(file: Path, damage: str, reason: str, is_read_only: bool) -> None:
    if damage == "header":
        file.write_bytes(b"garbage" + file.read_bytes()[7:])
    if damage == "cut":
        os.truncate(file, file.stat().st_size // 2)
    if damage == "foreign":
        file.unlink()
        sqlite3.connect(file).execute("CREATE TABLE other (a)").connection.close()
    before = content(file.parent)
    with pytest.raises(
        UnreadableStore, match=rf"journal\.db is damaged \(.*{reason}.*put a copy of it back.*\.recover"
    ):
        Journal(sqlite_url(file), is_read_only=is_read_only).runs()
    assert content(file.parent)["journal.db"] == before["journal.db"]


def test_a_value_that_is_no_json_is_named_with_run_and_name(file: Path) -> None:
    Journal(sqlite_url(file)).put_value("first", "champion", {})
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE run_values SET value = '{'")
    with pytest.raises(
        UnreadableStore, match=r"journal\.db is damaged: what it has of run 'first' as 'champion' is no"
    ):
        Journal(sqlite_url(file), is_read_only=True).value("first", "champion")


def test_a_missing_journal_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(UnreadableStore, match=r"nowhere/journal\.db does not exist"):
        Journal(sqlite_url(tmp_path / "nowhere" / "journal.db"), is_read_only=True).runs()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.test
def test_a_writer_on_a_full_or_read_only_disk_is_told_the_file_and_the_reason(file: Path) -> None:
    write = WRITE.replace("time.sleep(600)", "")
    for run, name in ((on_read_only_mount, errno.EROFS), (on_full_disk, errno.ENOSPC)):
        done = run(file.parent, [sys.executable, "-c", write, file])
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == f"OSError: [Errno {name}] {os.strerror(name)}: '{file}'"
    assert shutil.disk_usage(file.parent).free


def test_an_mlflow_store_that_mlflow_would_have_to_complete_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mlflow.db"
    sqlite3.connect(file).execute("CREATE TABLE alembic_version (version_num)").connection.close()
    file.with_name("mlflow.db-journal").write_bytes(b"left by a killed writer")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as on a read-only mount
    with pytest.raises(
        UnreadableStore, match=r"mlflow\.db was not closed by its last writer.*copy it with mlflow\.db-jou"
    ):
        connect(sqlite_url(file), is_read_only=True)


def test_an_mlflow_store_that_is_damaged_is_refused_before_mlflow_tries(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    for content, reason in ((b"garbage" * 1000, "file is not a database"), (b"", "it has no table alembic_version")):
        file.write_bytes(content)
        with pytest.raises(UnreadableStore, match=rf"mlflow\.db is damaged \({reason}\): put a copy of it back"):
            connect(sqlite_url(file), is_read_only=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_journal_lies_in_its_own_folder(folder: str, tmp_path: Path) -> None:
    journal = Journal(sqlite_url(tmp_path / folder / "journal.db"))
    journal.begin_run("run", "sha", "{}")
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder]
    assert (tmp_path / folder / "journal.db").is_file()
    for again in (Journal(journal.url), pickle.loads(pickle.dumps(journal)), Journal(journal.shown_url)):
        assert [row.run_id for row in again.runs()] == ["run"]
    mlflow = tmp_path / folder / "mlflow.db"
    assert sa.make_url(absolute(sqlite_url(mlflow))).database == str(mlflow)


@pytest.mark.parametrize("folder", ["q?a", "q?a=1", "q?timeout=9", "c#1"])
def test_a_question_mark_that_was_not_escaped_begins_no_options(folder: str, tmp_path: Path) -> None:
    Journal(f"sqlite:///{tmp_path}/{folder}/journal.db").begin_run("run", "sha", "{}")
    assert (tmp_path / folder / "journal.db").is_file() and [p.name for p in tmp_path.iterdir()] == [folder]


def test_options_are_kept_and_unknown_ones_refused(tmp_path: Path) -> None:
    assert absolute("sqlite:///m.db?timeout=9").endswith("/m.db?timeout=9")
    assert Journal(f"sqlite:///{tmp_path}/j.db?timeout=9").url.endswith("/j.db?timeout=9")
    with pytest.raises(ValueError, match=r"SQLite has no option 'timeot'; in a path, write \? as %3F"):
        absolute(f"sqlite:///{tmp_path}/mlflow.db?timeot=9")
    with pytest.raises(ValueError, match=r"SQLite has no option 'timeot'"):
        Journal(f"sqlite:///{tmp_path}/j.db?timeot=9")
    with pytest.raises(ValueError, match=r"SQLite has no option 'mode'"):
        Journal(f"sqlite:///file:{tmp_path}/j.db?mode=rwc&uri=true")


@pytest.mark.test
def test_mlflow_and_lancedb_write_below_such_a_folder_and_nowhere_else(tmp_path: Path) -> None:
    folder = tmp_path / "q?a%41#b"
    tracker = RunTracker(sqlite_url(folder / "mlflow.db"), str(folder / "artifacts"), "run")
    tracker.start({"seed": 1})
    TraceStore(str(folder / "traces")).create()
    assert (folder / "mlflow.db").is_file() and len(list((folder / "traces").iterdir())) > 1
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]

"""Files of SQLite below folders whose names have characters that mean something in a URL."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import sqlalchemy as sa

from stores.journal.journal import Journal
from stores.journal.sqlite_urls import sqlite_url
from stores.registry.experiment import absolute
from stores.registry.tracking import RunTracker
from stores.traces.store import TraceStore

pytestmark = pytest.mark.fast

FOLDERS = ["q?a", "q?timeout=9", "50%", "q%3Fa", "c#1", "a b+c", "x@y:z", "ü&=;", "[1]"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_journal_lies_in_its_own_folder(folder: str, tmp_path: Path) -> None:
    journal = Journal(sqlite_url(tmp_path / folder / "journal.db"))
    journal.begin_run("run", "sha", "{}")
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder]
    assert (tmp_path / folder / "journal.db").is_file()
    for again in (Journal(journal.url), pickle.loads(pickle.dumps(journal)), Journal(journal.shown_url)):
        assert [row.run_id for row in again.runs()] == ["run"]


def test_two_folders_that_differ_after_a_question_mark_are_two(tmp_path: Path) -> None:
    Journal(sqlite_url(tmp_path / "q?a" / "journal.db")).begin_run("a", "sha", "{}")
    assert Journal(sqlite_url(tmp_path / "q?b" / "journal.db")).runs() == []


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


@pytest.mark.parametrize("folder", FOLDERS)
def test_mlflows_url_names_the_same_file(folder: str, tmp_path: Path) -> None:
    path = tmp_path / folder / "mlflow.db"
    assert sa.make_url(absolute(sqlite_url(path))).database == str(path)


@pytest.mark.test
def test_mlflow_and_lancedb_write_below_such_a_folder_and_nowhere_else(tmp_path: Path) -> None:
    folder = tmp_path / "q?a%41#b"
    tracker = RunTracker(sqlite_url(folder / "mlflow.db"), str(folder / "artifacts"), "run")
    tracker.start({"seed": 1})
    TraceStore(str(folder / "traces")).create()
    assert (folder / "mlflow.db").is_file() and len(list((folder / "traces").iterdir())) > 1
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]

"""stores.journal.journal on a real SQLite file and a real PostgreSQL, with real processes where processes are the point."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InternalError, OperationalError
from waits import wait_until

from stores.journal import process
from stores.journal.journal import Journal, Lease, LeaseLost, StageKey

pytestmark = pytest.mark.test

KEY = StageKey("run", 2, "train", "solver")

RACER = """
import sys, time
from stores.journal.journal import Journal, StageKey
url, mark, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
def work(lease):
    with open(mark, "a") as file:
        file.write(f"{lease.token}\\n")
    time.sleep(seconds)
    return {"table": "t", "version": 7}
print(Journal(url).once(StageKey("run", 2, "train", "solver"), work, lease_s=float(sys.argv[4])))
"""


@pytest.fixture(
    params=["sqlite", pytest.param("postgres", marks=[pytest.mark.needs_program("psql"), pytest.mark.nightly])]
)
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Journal:
    if request.param == "postgres":
        return Journal(request.getfixturevalue("postgres_url"))
    return Journal(f"sqlite:///{tmp_path}/made/on/the/way/journal.db")


def _racer(journal: Journal, mark: Path, *, seconds: float, lease_s: float = 30.0) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", RACER, journal.url, str(mark), str(seconds), str(lease_s)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wait_for(mark: Path, *, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not mark.exists() or not mark.read_text():
        assert time.monotonic() < deadline, f"{mark} was never written"
        time.sleep(0.02)


def test_a_finished_stage_returns_its_ref_and_is_not_done_again(journal: Journal) -> None:
    tokens: list[int] = []

    def work(lease: Lease) -> dict[str, object]:
        tokens.append(lease.token)
        return {"version": 3, "files": ["a"]}

    assert journal.ref(KEY) is None
    refs = [journal.once(KEY, work, owner="runner") for _ in range(3)]
    again = pickle.loads(pickle.dumps(journal))
    assert refs == [{"version": 3, "files": ["a"]}] * 3 == [again.ref(KEY)] * 3
    assert tokens == [1]
    (row,) = again.stages("run")
    assert (row.key, row.status, row.token, row.owner, row.error) == (KEY, "done", 1, "runner", "")
    assert row.ended_at >= row.started_at and row.seconds < 5


def test_a_failure_is_recorded_raised_and_may_be_tried_again(journal: Journal) -> None:
    with pytest.raises(ZeroDivisionError):
        journal.once(KEY, lambda lease: {"x": 1 / 0})
    (row,) = journal.stages("run")
    assert (row.status, row.error, row.ref) == ("failed", "ZeroDivisionError: division by zero", None)
    assert journal.ref(KEY) is None
    assert journal.once(KEY, lambda lease: {"token": lease.token}) == {"token": 2}
    (row,) = journal.stages("run")
    assert (row.status, row.error, row.token) == ("done", "", 2)


@pytest.mark.parametrize("text", ["half a pair \ud83d", "a\0b"])
def test_an_error_that_databases_do_not_store_is_recorded_and_raised(text: str, journal: Journal) -> None:
    def work(lease: Lease) -> dict[str, object]:
        raise ValueError(text)

    with pytest.raises(ValueError, match=re.escape(text)):
        journal.once(KEY, work)
    (row,) = journal.stages("run")
    assert row.status == "failed" and row.error in (r"ValueError: half a pair \ud83d", r"ValueError: a\x00b")


def test_a_process_that_proc_does_not_show_is_dead_only_when_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"])
    name = f"{process._host()} {child.pid} {process._start_of(child.pid)}"

    def hidden(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_bytes", hidden)
    assert not process.is_dead(name)
    child.kill()
    child.wait()
    assert process.is_dead(name)


def test_a_process_whose_name_is_no_text_is_known_like_any_other() -> None:
    """The kernel cuts the name of a script at 15 bytes, also within a character."""
    named = "import ctypes; ctypes.CDLL(None).prctl(15, 'обучение'.encode()[:15], 0, 0, 0); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", named], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    name = f"{process._host()} {child.pid} {process._start_of(child.pid)}"
    assert name.rpartition(" ")[2].isdigit() and not process.is_dead(name)
    child.communicate()
    assert process.is_dead(name)


def test_a_stage_that_is_marked_as_failed_took_as_long_as_it_took(journal: Journal) -> None:
    def hung(lease: Lease) -> dict[str, object]:
        lease.started -= 60
        journal.fail(lease, "hung")
        return {}

    with pytest.raises(LeaseLost):
        journal.once(KEY, hung)
    (row,) = journal.stages("run")
    assert (row.status, row.error) == ("failed", "hung") and row.seconds >= 60


def test_processes_that_race_for_a_stage_do_it_once_and_agree(journal: Journal, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    racers = [_racer(journal, mark, seconds=0.3) for _ in range(4)]
    answers = {racer.communicate(timeout=60) for racer in racers}
    assert answers == {("{'table': 't', 'version': 7}\n", "")}
    assert mark.read_text() == "1\n"


def test_of_two_that_saw_the_same_failed_stage_one_gets_it(journal: Journal) -> None:
    """Both read the row while it was free, and then take it one after the other: what they saw is old by then."""
    with pytest.raises(ZeroDivisionError):
        journal.once(KEY, lambda lease: {"x": 1 / 0})
    one, other = Journal(journal.url), Journal(journal.url)
    assert (one._take(KEY, 2, "one", 30), other._take(KEY, 2, "other", 30)) == (True, False)
    (row,) = journal.stages("run")
    assert (row.status, row.token, row.owner) == ("running", 2, "one")


def test_a_stage_that_is_done_is_not_taken_by_one_who_saw_it_before(journal: Journal) -> None:
    assert journal.once(KEY, lambda lease: {"token": lease.token}) == {"token": 1}
    assert not Journal(journal.url)._take(KEY, 2, "late", 30)
    assert journal.ref(KEY) == {"token": 1}


def test_a_killed_owner_on_this_machine_is_replaced_at_once(journal: Journal, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    owner = _racer(journal, mark, seconds=600, lease_s=600)  # which a silent owner elsewhere would keep
    _wait_for(mark)
    os.kill(owner.pid, signal.SIGKILL)  # not waited for: a zombie is dead too
    assert journal.once(KEY, lambda lease: {"token": lease.token}, wait_s=20) == {"token": 2}
    owner.communicate()


def test_a_journal_that_is_only_read_has_what_was_written(journal: Journal) -> None:
    journal.begin_run("run", "sha", "{}")
    journal.put_value("run", "name", {"x": 1})
    journal.once(KEY, lambda lease: {"version": 3})
    reading = pickle.loads(pickle.dumps(Journal(journal.url, is_read_only=True)))
    assert reading.runs() == journal.runs() and reading.stages("run") == journal.stages("run")
    assert reading.latest("run") == journal.latest("run") and reading.ref(KEY) == {"version": 3}
    assert reading.value("run", "name") == {"x": 1} == reading.values("run", ["name", "other"])["name"]
    assert reading.finished("run", "train") == [2]


@pytest.mark.nightly
def test_an_owner_that_stopped_beating_is_replaced_when_its_lease_ends_and_records_nothing(
    journal: Journal, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    owner = _racer(journal, mark, seconds=10, lease_s=1.0)
    _wait_for(mark)
    os.kill(owner.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert journal.once(KEY, lambda lease: {"token": lease.token}) == {"token": 2}
    assert time.monotonic() - began > 0.2, "the lease was taken while it ran"
    os.kill(owner.pid, signal.SIGCONT)
    _, errors = owner.communicate(timeout=30)
    assert "LeaseLost" in errors
    assert journal.ref(KEY) == {"token": 2}


@pytest.mark.nightly
def test_heartbeats_keep_a_lease_longer_than_its_length(journal: Journal) -> None:
    entered, others = threading.Event(), []

    def long_work(lease: Lease) -> dict[str, object]:
        entered.set()
        time.sleep(5)
        lease.check()
        return {"by": "first"}

    first = threading.Thread(target=journal.once, args=(KEY, long_work), kwargs={"lease_s": 2, "owner": "first"})
    first.start()
    entered.wait()
    with pytest.raises(TimeoutError, match=r"train of solver, iteration 2 of run run: first .* gave up after 3 s"):
        journal.once(KEY, lambda lease: {"by": "second"}, wait_s=3)
    assert journal.once(KEY, lambda lease: others.append(lease) or {}) == {"by": "first"}
    first.join()
    assert others == []


@pytest.mark.parametrize("kind", [OperationalError, InternalError])  # InternalError: a PostgreSQL that became read-only
def test_a_lease_outlives_a_database_that_was_away_longer_than_it_if_nobody_took_it(
    kind: type[DBAPIError], journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, away, failed = journal._connect, threading.Event(), threading.Event()

    def flaky() -> Any:
        if away.is_set():
            failed.set()
            raise kind("UPDATE", {}, Exception("server closed the connection"))
        return connect()

    def long_work(lease: Lease) -> dict[str, object]:
        monkeypatch.setattr(journal, "_connect", flaky)
        away.set()
        wait_until(lambda: time.time() > lease.expires_at)
        away.clear()
        wait_until(lambda: time.time() < lease.expires_at)
        lease.check()
        (row,) = Journal(journal.url).stages("run")
        assert not row.is_free, "others wait again"
        return {"by": "first"}

    assert journal.once(KEY, long_work, lease_s=0.6) == {"by": "first"}
    assert failed.is_set()


def test_an_outage_of_the_database_does_not_end_who_waits_for_a_stage(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, looks, failures = Journal(journal.url), [], []
    connect = other._connect

    def flaky() -> Any:
        looks.append(None)
        if failures:
            raise failures.pop()
        return connect()

    def work(lease: Lease) -> dict[str, Any]:
        waiter.start()
        wait_until(lambda: looks)
        failures.append(OperationalError("SELECT", {}, Exception("server closed the connection")))
        wait_until(lambda: not failures)
        return {"version": 3}

    found: list[dict[str, Any]] = []
    waiter = threading.Thread(target=lambda: found.append(other.once(KEY, lambda lease: {"version": 4})))
    monkeypatch.setattr(other, "_connect", flaky)
    assert journal.once(KEY, work) == {"version": 3}
    waiter.join()
    assert found == [{"version": 3}]


def test_an_outage_of_the_database_at_the_end_of_a_stage_does_not_cost_the_stage(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, failures = journal._connect, iter(range(2))

    def flaky() -> Any:
        if next(failures, None) is not None:
            raise OperationalError("UPDATE", {}, Exception("server closed the connection"))
        return connect()

    def work(lease: Lease) -> dict[str, object]:
        monkeypatch.setattr(journal, "_connect", flaky)
        return {"version": 3}

    assert journal.once(KEY, work) == {"version": 3} == journal.ref(KEY)
    assert next(failures, None) is None


def test_an_end_that_the_database_recorded_without_a_reply_is_the_end(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, losses = journal._connect, iter(range(1))

    @contextmanager
    def lossy() -> Iterator[sa.Connection]:
        with connect() as connection:
            yield connection
        if next(losses, None) is not None:
            raise OperationalError("COMMIT", {}, Exception("server closed the connection"))

    def work(lease: Lease) -> dict[str, object]:
        monkeypatch.setattr(journal, "_connect", lossy)
        return {"version": 3}

    assert journal.once(KEY, work) == {"version": 3} == journal.ref(KEY)
    assert next(losses, None) is None


def test_a_lease_that_was_taken_over_says_so(journal: Journal) -> None:
    def slow(lease: Lease) -> dict[str, object]:
        taker = Journal(journal.url)
        assert taker._take(KEY, lease.token + 1, "other", 30)
        wait_until(lambda: lease.expires_at == 0)
        lease.check()
        return {}

    with pytest.raises(LeaseLost, match="lease 1 was taken over"):
        journal.once(KEY, slow, lease_s=0.4)
    (row,) = journal.stages("run")
    assert (row.status, row.owner, row.token) == ("running", "other", 2)


def test_a_process_that_slept_through_its_lease_learns_by_its_first_check_whether_it_was_taken(
    journal: Journal,
) -> None:
    def suspended(lease: Lease) -> dict[str, object]:
        lease.expires_at = time.time()  # what a process finds that was stopped since its last heartbeat
        lease.check()
        assert lease.expires_at > time.time() + 20, "nobody took it: it goes on"
        assert Journal(journal.url)._take(KEY, lease.token + 1, "other", 30)
        lease.expires_at = time.time()
        with pytest.raises(LeaseLost, match="lease 1 was taken over"):
            lease.check()
        return {}

    with pytest.raises(LeaseLost):
        journal.once(KEY, suspended, lease_s=30)


HOLDER = """
import sys, time
from stores.journal.journal import Journal
with Journal(sys.argv[1]).hold("run", "engines", owner="the first"):
    open(sys.argv[2], "w").write("held")
    time.sleep(600)
"""


def test_what_is_held_is_held_once_and_passes_on_when_its_holder_ends_or_dies(journal: Journal, tmp_path: Path) -> None:
    with journal.hold("run", "engines", owner="the first"):
        with (
            pytest.raises(TimeoutError, match=r"the first .* gave up after 0.3 s"),
            Journal(journal.url).hold("run", "engines", wait_s=0.3),
        ):
            pytest.fail("two hold it")
        with journal.hold("run", "something else"), journal.hold("other", "engines"):
            assert journal.stages("run") == [], "a lock is no stage"
    with pytest.raises(ZeroDivisionError), journal.hold("run", "engines"):
        raise ZeroDivisionError
    mark = tmp_path / "mark"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, journal.url, str(mark)])
    _wait_for(mark)
    os.kill(holder.pid, signal.SIGKILL)
    with journal.hold("run", "engines", wait_s=5) as lease:
        lease.check()
    holder.wait()


def test_a_run_keeps_its_config(journal: Journal) -> None:
    journal.begin_run("a", "1" * 64, '{"seed": 1, "train": {"lr": 0.1}}')
    journal.begin_run("a", "1" * 64, '{"seed": 1, "train": {"lr": 0.1}}')
    journal.begin_run("b", "2" * 64, "{}")
    with pytest.raises(ValueError, match=r"run 'a' exists with another config \(differs in train.lr\): use another"):
        journal.begin_run("a", "3" * 64, '{"seed": 1, "train": {"lr": 0.2}}')
    assert [(r.run_id, r.config_sha256[0]) for r in journal.runs()] == [("a", "1"), ("b", "2")]


def test_values_of_a_run_are_kept_and_replaced(journal: Journal) -> None:
    assert journal.value("a", "champion") is None
    journal.put_value("b", "champion", {"version": 9})
    journal.put_value("a", "candidate", {"version": 8})
    journal.put_value("a", "champion", {"version": 1})
    journal.put_value("a", "champion", {"version": 2})
    assert journal.value("a", "champion") == {"version": 2}
    assert (journal.value("b", "champion"), journal.value("a", "candidate")) == ({"version": 9}, {"version": 8})


def test_a_value_that_is_pinned_stays_what_its_first_writer_wrote(journal: Journal) -> None:
    assert journal.pin_value("a", "source", {"run": "first"}) == {"run": "first"}
    assert Journal(journal.url).pin_value("a", "source", {"run": "second"}) == {"run": "first"}
    assert journal.pin_value("b", "source", {"run": "second"}) == {"run": "second"}
    assert journal.value("a", "source") == {"run": "first"}


def test_stages_are_told_by_iteration_and_then_by_their_start(journal: Journal) -> None:
    order = [(2, "train"), (2, "collect"), (1, "score"), (1, "collect"), (1, "train")]
    for iteration, stage in order:
        journal.once(StageKey("run", iteration, stage), lambda lease: {})
    told = [(row.key.iteration, row.stage) for row in journal.stages("run")]
    assert told == [*order[2:], *order[:2]]
    assert [row.stage for row in journal.stages("run", 2)] == ["train", "collect"]
    assert journal.stages("another") == []


@pytest.mark.nightly
@pytest.mark.needs_program("psql")
def test_connections_that_the_server_ends_are_made_again(postgres_url: str) -> None:
    journal, admin = Journal(postgres_url), sa.create_engine(postgres_url)
    others = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database()"

    def work(lease: Lease) -> dict[str, object]:
        time.sleep(0.8)
        with admin.begin() as connection:
            assert connection.execute(sa.text(f"{others} AND pid <> pg_backend_pid()")).scalar_one() > 0
        time.sleep(1.5)
        lease.check()
        return {"token": lease.token}

    assert journal.once(KEY, work, lease_s=2) == {"token": 1}
    journal.put_value("run", "champion", {"version": 1})
    assert journal.value("run", "champion") == {"version": 1}


def test_lists_of_iterations_and_facts_are_read_without_the_rest(journal: Journal) -> None:
    for iteration in (1, 2, 5):
        journal.once(StageKey("run", iteration, "promote"), lambda lease: {"k": 1})
    journal.once(StageKey("run", 4, "train", "a"), lambda lease: {})
    journal.once(StageKey("run", 4, "train", "b"), lambda lease: {})
    with pytest.raises(RuntimeError):
        journal.once(StageKey("run", 6, "promote"), _fail)
    begun: list[int] = []
    journal.once(
        StageKey("run", 7, "promote"),
        lambda lease: {"begun": begun.extend(journal.finished("run", "promote", is_begun_enough=True))},
    )
    assert begun == [1, 2, 5, 7]
    assert journal.finished("run", "promote") == [1, 2, 5, 7]
    assert journal.finished("run", "promote", after=1) == [2, 5, 7]
    assert journal.finished("run", "promote", among=[0, 2, 6]) == [2]
    assert journal.finished("run", "train") == [4] and journal.finished("other", "train") == []
    latest = journal.latest("run")
    assert latest is not None and latest.iteration == 7 and journal.latest("other") is None
    for k in range(1200):
        journal.put_value("run", f"summary/{k}", {"k": k})
    wanted = [f"summary/{k}" for k in range(0, 1300, 2)]
    assert journal.values("run", wanted) == {f"summary/{k}": {"k": k} for k in range(0, 1200, 2)}
    assert journal.values("run", []) == journal.values("other", wanted) == {}


def _fail(lease: Lease) -> dict[str, object]:
    raise RuntimeError("no")


def test_a_journal_whose_url_cannot_work_says_what_would() -> None:
    with pytest.raises(ValueError, match=r"pymysql.*postgresql\+psycopg://"):
        Journal("mysql+pymysql://host/troupe")
    with pytest.raises(ValueError, match=r"Could not parse.*postgresql\+psycopg://"):
        Journal("here")
    with pytest.raises(ValueError, match=r"'postgresql\+psycopgx://u:\.\.\.@host/troupe'"):
        Journal("postgresql+psycopgx://u:hidden@host/troupe")


def test_a_journal_is_the_same_file_for_processes_in_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Journal("sqlite:///runs/journal.db").url == f"sqlite:///{tmp_path}/runs/journal.db"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Journal("sqlite:///~/runs/journal.db").url == f"sqlite:///{tmp_path}/home/runs/journal.db"


def test_a_journal_that_only_one_process_could_see_is_refused() -> None:
    with pytest.raises(ValueError, match="sqlite:///PATH"):
        Journal("sqlite://")

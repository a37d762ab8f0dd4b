"""journal: which stages are done, and which process does which now. SQLite by default, PostgreSQL past one machine.

    once(key, work) ── done? ──────────────────────────────> the recorded ref, at once
                    └─ free, failed, expired, owner dead? ──> take the lease (compare-and-swap on `token`)
                                                              work(lease), heartbeats from a thread
                                                              record ref or error, only where `token` is still ours

Every lease of a key has a higher token than the one before (the fencing token), so a process that slept through its
lease can record nothing. Leases expire by the clocks of the machines: keep these within seconds of each other.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, InterfaceError, InternalError, OperationalError

from stores.journal.process import is_dead, this_process
from stores.journal.schema import RUNS, STAGES, VALUES, open_engine
from stores.journal.sqlite import SqliteReader, absolute_sqlite
from stores.journal.waiting import waiting
from stores.store_faults import UnreadableStore
from stores.urls import without_secrets

logger = logging.getLogger(__name__)

T = TypeVar("T")

RUNNING, DONE, FAILED, FREE = "running", "done", "failed", "free"
LOCK = "lock"
"""The stage name of a lock, which is held but never done; its `model_group` is the name of the lock."""
HOLD_WAIT_S = 3600.0
"""How long `Journal.hold` waits for a lock that another process has: as long as the evaluation of a large team takes."""
OUTAGE_S = 60.0
"""How long a database that does not answer is asked again, where a stage has ended and where the end of another is waited for."""
AWAY = (OperationalError, InterfaceError, InternalError)
"""What a database that is away raises; the last one a standby that is not yet the primary."""
MAX_NAMES = 500
"""Names in one query: databases limit them."""


class LeaseLost(Exception):
    """Another process took the stage over: stop, and write nothing more."""


@dataclass(frozen=True, slots=True)
class StageKey:
    """The key of a stage, which is done at most once, or of a lock."""

    run_id: str
    iteration: int
    stage: str
    model_group: str = ""

    def __str__(self) -> str:
        if self.stage == LOCK:
            return f"the {self.model_group} of run {self.run_id}"
        group = f" of {self.model_group}" if self.model_group else ""
        return f"{self.stage}{group}, iteration {self.iteration} of run {self.run_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage as the journal has it."""

    run_id: str
    iteration: int
    stage: str
    model_group: str
    status: str
    """`running`, `done` or `failed`."""
    token: int
    """Number of the lease, from 1: how often the stage was started."""
    owner: str
    process: str
    """Host, pid and start time of the process that has or had the lease."""
    expires_at: float
    """Unix seconds: end of the lease unless a heartbeat moves it."""
    started_at: float
    ended_at: float | None
    seconds: float | None
    ref: dict[str, Any] | None
    error: str

    @property
    def key(self) -> StageKey:
        """The key of this row."""
        return StageKey(self.run_id, self.iteration, self.stage, self.model_group)

    @property
    def is_free(self) -> bool:
        """True if anybody may take the lease: nobody has it, or its owner is gone."""
        return self.status in (FAILED, FREE) or self.expires_at < time.time() or is_dead(self.process)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run as the journal has it."""

    run_id: str
    config_sha256: str
    config_json: str
    created_at: float


class Lease:
    """The right to do one stage."""

    def __init__(self, key: StageKey, token: int, lease_s: float, renew: Callable[[Lease], bool]) -> None:
        self.key, self.token, self.started = key, token, time.perf_counter()
        self.lease_s, self._renew = lease_s, renew
        self.expires_at = time.time() + lease_s
        """Unix seconds: until then nobody else has it, by what this process knows."""

    def check(self) -> None:
        """Raises LeaseLost if another process took over. Call it before anything that must not be done twice.

        A process that was suspended has had no heartbeat that could tell: once the lease is over, the journal is asked.
        """
        if time.time() >= self.expires_at and not self._renew(self):
            raise self.lost()

    def lost(self) -> LeaseLost:
        """Returns the error of a lease that was taken over."""
        return LeaseLost(f"{self.key}: lease {self.token} was taken over, another process does this stage now")


class Journal:
    """The journal at a SQLAlchemy URL. Cheap to make and to pickle: every process connects for itself."""

    def __init__(self, url: str, *, is_read_only: bool = False) -> None:
        """Args:
            url: SQLAlchemy URL, for SQLite as `sqlite_url` makes it; there file and folder are made, a relative path is made
                absolute.
            is_read_only: nothing is made, changed or locked: a journal on a read-only mount or a full disk can be read, too.

        ValueError for a URL that names no database, or one whose driver is not installed.
        """
        try:
            parsed = absolute_sqlite(url) if url.startswith("sqlite") else sa.make_url(url)
            parsed.get_dialect().import_dbapi()
        except (sa.exc.ArgumentError, sa.exc.NoSuchModuleError, ModuleNotFoundError) as error:
            raise ValueError(
                f"journal {without_secrets(url)!r}: {without_secrets(str(error))}; give a SQLAlchemy URL whose driver is installed, e.g. "
                "postgresql+psycopg://troupe@host/troupe (pip install troupe-rl[postgres]) or sqlite:///PATH"
            ) from None
        if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
            raise ValueError(
                f"journal {without_secrets(url)!r} has no file: other processes must see it, use sqlite:///PATH"
            )
        self.url = parsed.render_as_string(hide_password=False)
        self.is_read_only = is_read_only
        is_file = parsed.get_backend_name() == "sqlite"
        self._reader = SqliteReader(parsed.database or "") if is_read_only and is_file else None
        self._engine: tuple[int, sa.Engine] | None = None

    @property
    def shown_url(self) -> str:
        """The URL for messages, without a password."""
        return sa.make_url(self.url).render_as_string(hide_password=True)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_engine": None}

    def begin_run(self, run_id: str, config_sha256: str, config_json: str) -> None:
        """Creates the run, or finds it; ValueError if its config is another one."""
        row = {"run_id": run_id, "config_sha256": config_sha256, "config_json": config_json, "created_at": time.time()}
        if self._insert(RUNS, row):
            return
        with self._connect() as connection:
            old = connection.execute(sa.select(RUNS).where(RUNS.c.run_id == run_id)).one()
        if old.config_sha256 != config_sha256:
            changed = _differences(json.loads(old.config_json), json.loads(config_json))
            where = f"differs in {', '.join(changed[:5])}" if changed else f"was {old.config_sha256[:8]}"
            raise ValueError(
                f"run {run_id!r} exists with another config ({where}): use another run name or the old config"
            )

    def keep_config(self, run_id: str, config_json: str) -> None:
        """Keeps what does not count in the config's hash (how many iterations, where things are kept) as it is given now."""
        is_changed = (RUNS.c.run_id == run_id) & (RUNS.c.config_json != config_json)
        with self._connect() as connection:
            connection.execute(RUNS.update().where(is_changed).values(config_json=config_json))

    def once(
        self,
        key: StageKey,
        work: Callable[[Lease], dict[str, Any]],
        *,
        owner: str = "",
        lease_s: float = 30.0,
        wait_s: float = 3600.0,
    ) -> dict[str, Any]:
        """Returns the ref of a finished stage; does the stage first if it is not done, and waits if another process does it.

        Args:
            key: what is done at most once.
            work: does it and returns a ref of JSON values. What it raises is recorded and raised again; the next call
                may then try again.
            owner: who is doing it, for people to read.
            lease_s: how long a silent owner on another machine keeps the stage. A dead one on this machine loses it
                at once.
            wait_s: how long to wait for another process.

        Raises:
            TimeoutError: another process was still doing it after `wait_s`.
            LeaseLost: another process took over while `work` ran; its result is not recorded.
        """
        lease = self._acquire(key, owner, lease_s, wait_s)
        if isinstance(lease, dict):
            return lease
        try:
            with self._alive(lease):
                ref = work(lease)
                text = json.dumps(ref)
        except BaseException as error:
            self._finish(lease, status=FAILED, error=_storable(f"{type(error).__name__}: {error}"))
            raise
        if not self._finish(lease, status=DONE, ref=text, error=""):
            raise lease.lost()
        return json.loads(text)

    @contextmanager
    def hold(
        self, run_id: str, name: str, *, owner: str = "", lease_s: float = 30.0, wait_s: float = HOLD_WAIT_S
    ) -> Iterator[Lease]:
        """Holds a lock, so that only one process at a time uses something; waits while another process has it.

        Raises TimeoutError if another process still has it after `wait_s`.
        """
        lease = self._acquire(StageKey(run_id, 0, LOCK, name), owner, lease_s, wait_s)
        assert isinstance(lease, Lease), "a lock is never done"
        try:
            with self._alive(lease):
                yield lease
        finally:
            self._finish(lease, status=FREE)

    @contextmanager
    def _alive(self, lease: Lease) -> Iterator[None]:
        """Heartbeats from a thread."""
        stopped = threading.Event()
        heart = threading.Thread(
            target=copy_context().run,  # so that its warnings carry the stage's log fields
            args=(self._beat, lease, stopped),
            daemon=True,
            name=f"lease {lease.key}",
        )
        heart.start()
        try:
            yield
        finally:
            stopped.set()

    def fail(self, lease: Lease, error: str) -> bool:
        """Marks a leased stage as failed before its process is ended; False if the lease was lost before."""
        return self._finish(lease, status=FAILED, error=_storable(error))

    def ref(self, key: StageKey) -> dict[str, Any] | None:
        """The ref of a finished stage, else None."""
        row = self._row(key)
        return row.ref if row is not None and row.status == DONE else None

    def stages(self, run_id: str, iteration: int | None = None) -> list[StageRow]:
        """Every stage of a run, or of one iteration of it, that was ever started, by iteration and time."""
        mine = (STAGES.c.run_id == run_id) & (STAGES.c.stage != LOCK)
        query = sa.select(STAGES).where(mine).order_by(STAGES.c.iteration, STAGES.c.started_at)
        if iteration is not None:
            query = query.where(STAGES.c.iteration == iteration)
        return [self._stage_row(row) for row in self._read(lambda connection: connection.execute(query).all())]

    def latest(self, run_id: str) -> StageRow | None:
        """The stage of a run that was started last; None where none ever was."""
        mine = (STAGES.c.run_id == run_id) & (STAGES.c.stage != LOCK)
        query = sa.select(STAGES).where(mine).order_by(STAGES.c.started_at.desc()).limit(1)
        return self._one(query)

    def finished(
        self,
        run_id: str,
        stage: str,
        *,
        after: int = -1,
        among: Collection[int] | None = None,
        is_begun_enough: bool = False,
    ) -> list[int]:
        """Returns the iterations in which this stage is done, in order; refs are not read.

        Args:
            after: only iterations after this one.
            among: only these iterations, of which there are few.
            is_begun_enough: also those in which it is running.
        """
        states = (DONE, RUNNING) if is_begun_enough else (DONE,)
        is_wanted = (STAGES.c.run_id == run_id) & (STAGES.c.iteration > after) & (STAGES.c.stage == stage)
        query = sa.select(STAGES.c.iteration).where(is_wanted, STAGES.c.status.in_(states))
        if among is not None:
            query = query.where(STAGES.c.iteration.in_(among))
        query = query.distinct().order_by(STAGES.c.iteration)
        return list(self._read(lambda connection: connection.execute(query).scalars().all()))

    def runs(self) -> list[RunRow]:
        """Every run, oldest first."""
        query = sa.select(RUNS).order_by(RUNS.c.created_at, RUNS.c.run_id)
        return [RunRow(**row._mapping) for row in self._read(lambda connection: connection.execute(query).all())]

    def put_value(self, run_id: str, name: str, value: Mapping[str, Any]) -> None:
        """Keeps a small fact of a run (JSON values) under a name of `RunValue`; the last writer wins."""
        row = {"run_id": run_id, "name": name, "value": json.dumps(dict(value))}
        if not self._insert(VALUES, row):
            is_row = (VALUES.c.run_id == run_id) & (VALUES.c.name == name)
            with self._connect() as connection:
                connection.execute(VALUES.update().where(is_row).values(value=row["value"]))

    def pin_value(self, run_id: str, name: str, value: Mapping[str, Any]) -> dict[str, Any]:
        """Keeps a small fact of a run unless there is one of this name; returns the one that is there. The first writer wins."""
        self._insert(VALUES, {"run_id": run_id, "name": name, "value": json.dumps(dict(value))})
        pinned = self.value(run_id, name)
        assert pinned is not None, f"{name} of {run_id} was just pinned"
        return pinned

    def value(self, run_id: str, name: str) -> dict[str, Any] | None:
        """A fact kept by `put_value`, else None."""
        return self.values(run_id, [name]).get(name)

    def values(self, run_id: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Returns the facts of these names that were kept by `put_value`, by name."""
        wanted = list(names)

        def read(connection: sa.Connection) -> list[sa.Row[Any]]:
            rows: list[sa.Row[Any]] = []
            for start in range(0, len(wanted), MAX_NAMES):
                is_wanted = (VALUES.c.run_id == run_id) & VALUES.c.name.in_(wanted[start : start + MAX_NAMES])
                rows += connection.execute(sa.select(VALUES.c.name, VALUES.c.value).where(is_wanted))
            return rows

        return {row.name: self._parsed(row.value, run_id, row.name) for row in self._read(read)}

    def _acquire(self, key: StageKey, owner: str, lease_s: float, wait_s: float) -> Lease | dict[str, Any]:
        """A lease, or the ref if the stage is done."""
        deadline, pause = time.monotonic() + wait_s, 0.02
        row = self._row(key)
        while True:
            if row is not None and row.status == DONE:
                return row.ref or {}
            if row is None or row.is_free:
                token = 1 if row is None else row.token + 1
                lease = Lease(key, token, lease_s, self._renew)  # before it is taken: it must not seem to last longer
                if self._take(key, token, owner, lease_s):
                    return lease
                row = self._row(key)
                continue
            waits = f"{key}: {row.owner or 'another process'} ({row.process}) is at it since {_clock(row.started_at)}"
            if time.monotonic() > deadline:
                raise TimeoutError(f"{waits}; gave up after {wait_s:g} s: wait for it, or end that process")
            with waiting(f"{waits}, for its end"):
                time.sleep(pause)
            pause = min(pause * 1.5, 1.0)
            row = _through_an_outage(lambda: self._row(key), f"{key}: whether it has ended is not known")

    def _take(self, key: StageKey, token: int, owner: str, lease_s: float) -> bool:
        """Compare-and-swap: True if the lease numbered `token` is ours."""
        now = time.time()
        lease = {
            "status": RUNNING,
            "token": token,
            "owner": owner,
            "process": this_process(),
            "expires_at": now + lease_s,
            "started_at": now,
            "ended_at": None,
            "seconds": None,
            "error": "",
        }
        if token == 1:
            return self._insert(STAGES, {**asdict(key), **lease})
        with self._connect() as connection:
            # Only one process can raise this token, so that two that saw the same free row do not both get it.
            is_row = _is_row(key) & (STAGES.c.token == token - 1) & (STAGES.c.status != DONE)
            return connection.execute(STAGES.update().where(is_row).values(lease)).rowcount == 1

    def _beat(self, lease: Lease, stopped: threading.Event) -> None:
        """Moves the end of the lease until `stopped`, or until the lease is lost."""
        while not stopped.wait(lease.lease_s / 4):
            try:
                if not self._renew(lease):
                    return
            except (sa.exc.SQLAlchemyError, OSError, UnreadableStore) as error:
                # Whatever it is, busy or read-only for a while, it may pass: without heartbeats another process would begin.
                logger.warning("%s: heartbeat failed: %s", lease.key, getattr(error, "orig", error))

    def _renew(self, lease: Lease) -> bool:
        """Moves the end of a lease, also of one that is over and that nobody took; False if it is lost."""
        expires_at = time.time() + lease.lease_s
        is_row = _is_row(lease.key) & (STAGES.c.token == lease.token) & (STAGES.c.status == RUNNING)
        with self._connect() as connection:
            is_ours = connection.execute(STAGES.update().where(is_row).values(expires_at=expires_at)).rowcount == 1
        lease.expires_at = expires_at if is_ours else 0.0
        return is_ours

    def _finish(self, lease: Lease, **values: Any) -> bool:
        """Records the end of a lease, also where the database is away for a while: the work of hours may hang on it."""
        values |= {"ended_at": time.time(), "seconds": time.perf_counter() - lease.started}
        # PostgreSQL may have recorded this very end though its reply was lost: a repetition finds the row so, too.
        is_open = (STAGES.c.status == RUNNING) | (STAGES.c.ended_at == values["ended_at"])
        is_row = _is_row(lease.key) & (STAGES.c.token == lease.token) & is_open

        def record() -> bool:
            with self._connect() as connection:
                return connection.execute(STAGES.update().where(is_row).values(values)).rowcount == 1

        return _through_an_outage(record, f"{lease.key}: its end cannot be recorded yet")

    def _row(self, key: StageKey) -> StageRow | None:
        return self._one(sa.select(STAGES).where(_is_row(key)))

    def _one(self, query: sa.Select[Any]) -> StageRow | None:
        row = self._read(lambda connection: connection.execute(query).one_or_none())
        return None if row is None else self._stage_row(row)

    def _insert(self, table: sa.Table, row: Mapping[str, Any]) -> bool:
        """False if there is a row of this key already."""
        try:
            with self._connect() as connection:
                connection.execute(table.insert().values(row))
        except IntegrityError:
            return False
        return True

    def _read(self, work: Callable[[sa.Connection], T]) -> T:
        """What `work` reads in one transaction; where the journal is only read it may be called again."""
        if self._reader is not None:
            return self._reader.read(work)
        with self._connect() as connection:
            return work(connection)

    def _parsed(self, text: str, run_id: str, name: str) -> dict[str, Any]:
        try:
            return json.loads(text)
        except ValueError as error:
            raise UnreadableStore(
                f"the journal {self.shown_url} is damaged: what it has of run {run_id!r} as {name!r} is no JSON ({error}); "
                "put a copy of it back"
            ) from None

    def _stage_row(self, row: sa.Row[Any]) -> StageRow:
        values = dict(row._mapping)
        name = f"{values['stage']} of iteration {values['iteration']}"
        ref = None if values["ref"] is None else self._parsed(values["ref"], values["run_id"], name)
        return StageRow(**{**values, "ref": ref})

    def _connect(self) -> Any:
        """A transaction as a context manager; engine and tables are made when first needed, once per process."""
        if self._engine is None or self._engine[0] != os.getpid():
            assert self._reader is None, f"{self.shown_url} is only read here"
            self._engine = (os.getpid(), open_engine(self.url, is_read_only=self.is_read_only))
        return self._engine[1].begin()


def _through_an_outage(work: Callable[[], T], what: str) -> T:
    """Returns what `work` does, again and again while the database is away, for `OUTAGE_S` at most."""
    deadline = time.monotonic() + OUTAGE_S
    while True:
        try:
            return work()
        except AWAY as error:
            if time.monotonic() > deadline:
                raise
            logger.warning("%s: %s", what, error.orig)
            time.sleep(1.0)


def _is_row(key: StageKey) -> sa.ColumnElement[bool]:
    return sa.and_(*(STAGES.c[name] == value for name, value in asdict(key).items()))


def _differences(old: Any, new: Any, place: str = "") -> list[str]:
    """Dotted keys at which two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(n for n in new if n not in old)]
        return [d for n in names for d in _differences(old.get(n), new.get(n), f"{place}.{n}" if place else n)]
    return [] if old == new else [place or "everything"]


def _storable(text: str) -> str:
    """Returns a text with escapes for what databases refuse: half a surrogate pair, and NUL in PostgreSQL."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))

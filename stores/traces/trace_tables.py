"""trace_tables: kind of row, run and iteration -> the LanceDB table of a trace store that holds them.

Each iteration of a run has two tables of its own, `episodes.<run>.it<k>` and `rewards.<run>.it<k>`, which its first writer
makes. So what a write, a pin or a read costs depends on the size of one iteration and not on how many there were: merges
compare keys with one iteration's rows, without an index that lags behind concurrent commits and has to be kept up. An
episode id begins with its iteration, so that a whole id is looked for in one table. The tables `episodes` and `rewards`
are made with the store. They are empty, but in stores of earlier versions, whose iterations stay in them.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stores.files import is_uri, lancedb_options, local_path
from stores.store_faults import damaged_table, lance_fault
from stores.traces import rows
from stores.traces.trace_filters import equals
from stores.types import RewardsRef, TracesRef, hinted_iteration

if TYPE_CHECKING:
    from lancedb import DBConnection
    from lancedb.table import Table

KEYS = {"episodes": "episode_id", "rewards": "reward_id"}
"""The primary key of each kind of row that has a table per iteration."""
PAGE = 1000
"""Tables that are listed at once."""
_NAME = re.compile(r"(?P<kind>[a-z]+)\.(?P<run>.+)\.it(?P<iteration>\d+)")


class TraceTables:
    """The tables at one LanceDB URI. It is cheap to create and to pickle: every process opens its own connection."""

    def __init__(self, uri: str, schemas: Mapping[str, pa.Schema]) -> None:
        """Args: schemas: by kind of row; a table of each kind is made with the store."""
        self.uri = uri
        self.schemas = schemas
        self._connection: tuple[int, DBConnection] | None = None
        """With the process id: a forked child must not use its parent's connection."""
        self._is_of_earlier_version: dict[str, bool] = {}
        """By kind, whether the table that is made with the store has rows: no later version adds any."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connection": None, "_is_of_earlier_version": {}}

    def connect(self) -> DBConnection:
        """Returns this process's connection, which its first call opens."""
        if self._connection is None or self._connection[0] != os.getpid():
            import lancedb

            self._connection = (os.getpid(), lancedb.connect(self.uri, storage_options=lancedb_options(self.uri)))
        return self._connection[1]

    def create(self) -> None:
        """Makes the tables that every store has; ValueError where one is there that another version of Troupe made."""
        for name in self.schemas:
            self._check_schema(name, self._open_or_create(name))

    # ---- opening

    def open(self, name: str) -> Table:
        """Opens the table at its newest version; ValueError where it is not there, UnreadableStore where it is damaged."""
        if self._is_missing:  # to connect would make the folder
            raise ValueError(f"table {name} was not found: there is no {self.uri}")
        with self.naming(name):
            table = self.connect().open_table(name)
            if not table.schema.names:  # what LanceDB makes of a manifest of zeros
                raise damaged_table(self._described(name), self._folder_of(name), "its newest manifest is empty")
            return table

    def open_if_there(self, name: str) -> Table | None:
        """Opens the table at its newest version; None where it is not there."""
        try:
            return self.open(name)
        except ValueError as error:
            if "not found" not in str(error):
                raise
            self._check_absent(name)
            return None

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Has what LanceDB says of this table's files name the table, see `store_faults`; "" names the whole store."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            fault = lance_fault(error, self._described(name), self._folder_of(name))
            if fault is None:
                raise
            raise fault from error

    def open_iteration(self, kind: str, run_id: str, iteration: int) -> Table:
        """Opens the table that holds this iteration's rows; it is made if it is not there."""
        return self._open_or_create(self.name_for(kind, run_id, iteration))

    def open_pinned(self, ref: TracesRef | RewardsRef) -> Table:
        """Opens the table at the version that `ref` pins; ValueError where this store does not have the pin."""
        name = self.name_for(kind_of(ref), ref.run_id, ref.iteration)
        table = self.open_if_there(name)
        with self.naming(name):
            tagged = None if table is None else table.tags.list().get(ref.tag)
        # a later version is right: `TraceUpkeep.move_pins` moved the tag
        if table is None or tagged is None or tagged["version"] < ref.version:
            state = f"is at version {tagged['version']}" if tagged else "does not exist"
            raise ValueError(
                f"{ref.tag} at version {ref.version} was pinned in {ref.uri}, but the tag {state} in {self.uri}: "
                "open the store that the ref names, or run the stage that pinned it again"
            )
        with self.naming(name):
            table.checkout(tagged["version"])
        return table

    # ---- choosing

    def name_for(self, kind: str, run_id: str, iteration: int) -> str:
        """Names the table that holds this iteration's rows, whether it is there or not."""
        if self.has_earlier_rows(kind) and self.open(kind).count_rows(equals(run_id=run_id, iteration=iteration)):
            return kind
        return table_name(kind, run_id, iteration)

    def names_for(self, kind: str, *, run_id: str | None = None, iteration: int | None = None) -> list[str]:
        """Names the tables that may hold such rows, those of later iterations first."""
        if run_id is not None and iteration is not None:
            return [self.name_for(kind, run_id, iteration)]
        names = self.iteration_names(kind, run_id=run_id)
        names = [name for name in names if iteration is None or iteration_of_table(name) == iteration]
        return sorted(names, key=iteration_of_table, reverse=True) + ([kind] if self.has_earlier_rows(kind) else [])

    def hinted_names(self, kind: str, episode_id: str, run_id: str | None) -> list[str]:
        """Names the tables of the iteration that the id begins with."""
        hinted = hinted_iteration(episode_id)
        return [] if hinted is None else self.names_for(kind, run_id=run_id, iteration=hinted)

    def has_earlier_rows(self, kind: str) -> bool:
        """Says whether the table that is made with the store has rows, those of an earlier version."""
        if kind not in self._is_of_earlier_version:
            table = self.open_if_there(kind)
            if table is None:
                return False
            self._is_of_earlier_version[kind] = table.count_rows() > 0
        return self._is_of_earlier_version[kind]

    def iteration_names(self, kind: str, *, run_id: str | None = None) -> list[str]:
        """Names the tables of iterations, of this run or of all."""
        return [name for name in self.all_names() if is_table_of(name, kind, run_id)]

    def all_names(self) -> list[str]:
        """Names every table at the URI."""
        names: list[str] = []
        if self._is_missing:
            return names
        with self.naming(""):
            page = self.connect().list_tables(limit=PAGE)
            while True:
                names += page.tables
                if not page.page_token:
                    return names
                page = self.connect().list_tables(page_token=page.page_token, limit=PAGE)

    # ---- rows of a table that may not be there

    def batches(self, name: str, where: str, *, limit: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yields whole episode rows of a table; none where it is not there."""
        table = self.open_if_there(name)
        if table is not None:
            query = table.search().select(episode_columns(table))
            query = query.where(where) if where else query
            with self.naming(name):
                yield from (query if limit is None else query.limit(limit)).to_batches(256)

    def scan(self, name: str, where: str, columns: Sequence[str]) -> pa.Table:
        """Returns these columns of the matching rows; no row where the table is not there."""
        table = self.open_if_there(name)
        if table is None:
            schema = self._schema_of(name)
            return pa.schema([schema.field(column) for column in columns]).empty_table()
        query = table.search().select(list(columns))
        with self.naming(name):
            return (query.where(where) if where else query).to_arrow()

    @property
    def _is_missing(self) -> bool:
        """Whether nothing was ever stored in a folder of this machine."""
        return not is_uri(self.uri) and not local_path(self.uri).is_dir()

    def _check_absent(self, name: str) -> None:
        """Raises UnreadableStore where a table that LanceDB does not find has rows: who made it anew would lose them."""
        if not is_uri(self.uri) and any((local_path(self.uri) / f"{name}.lance" / "data").glob("*")):
            reason = "there are data files, but no version in _versions"
            raise damaged_table(self._described(name), self._folder_of(name), reason)

    def _folder_of(self, name: str) -> str:
        return f"{self.uri}/{name}.lance" if name else self.uri

    def _described(self, name: str) -> str:
        match = _NAME.fullmatch(name)
        of_run = f" (iteration {match['iteration']} of run {match['run']!r})" if match else ""
        return f"table {name}{of_run} in {self.uri}" if name else f"the store {self.uri}"

    def _schema_of(self, name: str) -> pa.Schema:
        return self.schemas[name.partition(".")[0]]

    def _check_schema(self, name: str, table: Table) -> None:
        schema, stored = self._schema_of(name), table.schema
        other = [f.name for f in schema if f.name not in stored.names or stored.field(f.name).type != f.type]
        if other:
            raise ValueError(
                f"table {name} in {self.uri} was made by another version of Troupe (its columns {', '.join(other)} differ): "
                "it can be read, but nothing can be added to it; give the run a storage.root of its own"
            )

    def _open_or_create(self, name: str) -> Table:
        """Opens the table, which is made if it is not there; several processes of a machine may do that at once.

        LanceDB lets two processes make the same table, and the later one empties it: `TraceStore.begin` makes the tables
        before processes of several machines write to them.
        """
        table = self.open_if_there(name)
        if table is not None:
            return table
        with self._one_at_a_time(), self.naming(name):
            try:
                return self.connect().create_table(name, schema=self._schema_of(name))
            except ValueError as error:
                if "already exists" not in str(error):
                    raise
                return self.open(name)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """Lets one process of this machine in at a time, where the store is a folder."""
        if is_uri(self.uri):
            yield
            return
        folder = local_path(self.uri)
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def table_name(kind: str, run_id: str, iteration: int) -> str:
    """Returns the name of the table that holds this iteration's rows of `episodes` or `rewards`.

    Runs whose names differ only in characters that LanceDB refuses share a table: its rows have the name of their run.
    """
    return f"{kind}.{plain(run_id)}.it{iteration}"


def iteration_of_table(name: str) -> int:
    """Returns the iteration whose rows a table holds; 0 for the tables that are made with the store."""
    match = _NAME.fullmatch(name)
    return int(match["iteration"]) if match else 0


def is_table_of(name: str, kind: str, run_id: str | None = None) -> bool:
    """Says whether a table holds such rows of one iteration, of this run or of any."""
    match = _NAME.fullmatch(name)
    return match is not None and match["kind"] == kind and (run_id is None or match["run"] == plain(run_id))


def kind_of(ref: TracesRef | RewardsRef) -> str:
    """Returns the kind of row that a ref pins."""
    return "episodes" if isinstance(ref, TracesRef) else "rewards"


def episode_columns(table: Table) -> list[str]:
    """Returns the columns of an episode that a table has: one of an earlier version lacks the later ones."""
    there = set(table.schema.names)
    return [name for name in rows.EPISODES.names if name in there]


def plain(text: str) -> str:
    """Replaces the characters that Lance refuses in names of tables and in tags."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)

"""tables: the LanceDB tables of a trace store: which holds which rows, the SQL that finds them, the tags that pin them.

Each iteration of a run has two tables of its own, `episodes.<run>.it<k>` and `rewards.<run>.it<k>`, which its first writer
makes. So what a write, a pin or a read costs depends on the size of one iteration and not on how many there were: merges
compare keys with one iteration's rows, without an index that lags behind concurrent commits and has to be kept up. An
episode id begins with its iteration, so that a whole id is looked for in one table. The tables `episodes` and `rewards`
are made with the store; only a store of served episodes has rows in them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stores.files import connect_lancedb, is_uri, local_path
from stores.store_faults import damaged_table, lance_fault
from stores.traces.rows import EPISODES
from stores.types import RewardsRef, TracesRef, hinted_iteration

if TYPE_CHECKING:
    from lancedb import DBConnection
    from lancedb.table import Table

KEYS = {"episodes": "episode_id", "rewards": "reward_id"}
"""The primary key of each kind of row that has a table per iteration."""
PAGE = 1000
"""Tables that are listed at once."""
DIGITS = 16
"""Of the hash in a tag's name."""
PLAYED = ("episode_id", "status", "started_at", "duration_s")
"""Columns by which a failed episode and its repetition differ, which have the same id."""
_NAME = re.compile(r"(?P<kind>[a-z]+)\.(?P<run>.+)\.it(?P<iteration>\d+)")


class TraceTables:
    """The tables at one LanceDB URI. It is cheap to create and to pickle: every process opens its own connection."""

    def __init__(self, uri: str, schemas: Mapping[str, pa.Schema]) -> None:
        """Args: schemas: by kind of row; a table of each kind is made with the store."""
        self.uri = uri
        self.schemas = schemas
        self._connection: tuple[int, DBConnection] | None = None
        """With the process id: a forked child must not use its parent's connection."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connection": None}

    def connect(self) -> DBConnection:
        """Returns this process's connection, which its first call opens."""
        if self._connection is None or self._connection[0] != os.getpid():
            self._connection = (os.getpid(), connect_lancedb(self.uri))
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
        """Opens the table at its newest version; None where it is not there.

        UnreadableStore where it is damaged, also where it has rows but no version: who made it anew would lose them.
        """
        table = self._found(name)
        if table is None and self._has_data(name):
            table = self._found(name)  # another process may have made it between the two looks
            if table is None:
                reason = "there are data files, but no version in _versions"
                raise damaged_table(self._described(name), self._folder_of(name), reason)
        return table

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
        return table_name(kind, run_id, iteration)

    def names_for(self, kind: str, *, run_id: str | None = None, iteration: int | None = None) -> list[str]:
        """Names the tables that may hold such rows, those of later iterations first."""
        if run_id is not None and iteration is not None:
            return [self.name_for(kind, run_id, iteration)]
        names = [name for name in self.all_names() if is_table_of(name, kind, run_id)]
        names = [name for name in names if iteration is None or iteration_of_table(name) == iteration]
        return sorted(names, key=iteration_of_table, reverse=True)

    def hinted_names(self, kind: str, episode_id: str, run_id: str | None) -> list[str]:
        """Names the tables of the iteration that the id begins with."""
        hinted = hinted_iteration(episode_id)
        return [] if hinted is None else self.names_for(kind, run_id=run_id, iteration=hinted)

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

    # ---- rows

    def batches(
        self,
        table: str | Table,
        where: str,
        columns: Sequence[str] = tuple(EPISODES.names),
        *,
        limit: int | None = None,
        batch_size: int = 256,
    ) -> Iterator[pa.RecordBatch]:
        """Yields the matching rows of a table, by default whole episodes; none where a table of this name is not there."""
        opened = self.open_if_there(table) if isinstance(table, str) else table
        if opened is not None and limit != 0:  # which LanceDB takes for none
            query = opened.search().select(list(columns))
            query = query.where(where) if where else query
            with self.naming(opened.name):
                yield from (query if limit is None else query.limit(limit)).to_batches(batch_size)

    def scan(self, table: str | Table, where: str, columns: Sequence[str]) -> pa.Table:
        """Returns these columns of the matching rows; no row where a table of this name is not there."""
        schema = self._schema_of(table if isinstance(table, str) else table.name)
        batches = self.batches(table, where, columns, batch_size=8192)
        return pa.concat_tables([pa.schema([schema.field(c) for c in columns]).empty_table(), *map(_table_of, batches)])

    @property
    def _is_missing(self) -> bool:
        """Whether nothing was ever stored in a folder of this machine."""
        return not is_uri(self.uri) and not local_path(self.uri).is_dir()

    def _found(self, name: str) -> Table | None:
        try:
            return self.open(name)
        except ValueError as error:
            if "not found" not in str(error):
                raise
            return None

    def _has_data(self, name: str) -> bool:
        """Whether a folder of this machine holds rows of a table."""
        return not is_uri(self.uri) and any((local_path(self.uri) / f"{name}.lance" / "data").glob("*"))

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
                "give the run a storage.root of its own"
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


def _table_of(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch])


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


def plain(text: str) -> str:
    """Replaces the characters that Lance refuses in names of tables and in tags, where two dots may not follow each other."""
    return re.sub(r"[^A-Za-z0-9._-]|(?<=\.)\.", "_", text)


# ---- conditions in SQL


def equals(**values: str | int | None) -> str:
    """Returns SQL for the conjunction of the values that are not None, given by column; empty if all are None."""
    return " AND ".join(f"{name} = {literal(value)}" for name, value in values.items() if value is not None)


def pinned_by(ref: TracesRef | RewardsRef) -> str:
    """Returns SQL for the rows that a ref pins."""
    key: dict[str, Any] = {"run_id": ref.run_id, "iteration": ref.iteration, "purpose": ref.purpose}
    if isinstance(ref, RewardsRef):
        return equals(**key, credit_version=ref.credit_version)
    return equals(**key, team_key=ref.team_key) + without_groups(ref.excluded_groups)


def without_groups(groups: Sequence[str]) -> str:
    """Returns SQL, to be appended to a condition, for the episodes of other groups than these."""
    return f" AND group_id NOT IN ({quoted(groups)})" if groups else ""


def one_of(column: str, values: Sequence[str] | None) -> str:
    """Returns SQL, to be appended to a condition, for the rows with one of these values; None: all."""
    if values is None:
        return ""
    return f" AND {column} IN ({quoted(values)})" if values else " AND false"


def has_tag(column: str, name: str) -> str:
    """Returns SQL for the episodes of this agent (`agents`) or model group (`model_groups`)."""
    return f"contains({column}, {literal(f'|{name}|')})"


def played_by(policy_versions: Mapping[str, int]) -> list[str]:
    """Returns an SQL condition per model group: the column is a JSON object, in whose order the groups stand as written."""
    entries = [f"{json.dumps(group, ensure_ascii=False)}: {version}" for group, version in policy_versions.items()]
    return [
        f"(contains(policy_versions, {literal(f'{entry},')}) OR contains(policy_versions, {literal(entry + '}')}))"
        for entry in entries
    ]


def literal(value: str | int) -> str:
    """Returns a value as an SQL literal."""
    return str(value) if isinstance(value, int) else "'" + str(value).replace("'", "''") + "'"


def quoted(values: Sequence[str]) -> str:
    """Returns values as SQL literals, separated by commas."""
    return ", ".join(literal(value) for value in values)


# ---- pins: the tag that keeps some rows, named by a hash of what they hold


def played_rows(table: Table, where: str) -> list[tuple[str, ...]]:
    """Returns the `PLAYED` columns of the matching episodes as text, sorted."""
    episodes = table.search().where(where).select(list(PLAYED)).to_arrow()
    columns = [map(str, episodes[name].to_pylist()) for name in PLAYED]
    return sorted(zip(*columns, strict=True))


def has_same_rows(newer: Table, pinned: Table, ref: TracesRef | RewardsRef) -> bool:
    """Says whether the rows that a ref pins are the same in a newer version; rewards are added, but never replaced."""
    where = pinned_by(ref)
    if newer.count_rows(where) != pinned.count_rows(where):
        return False
    return isinstance(ref, RewardsRef) or played_rows(newer, where) == played_rows(pinned, where)


def pin(
    table: Table,
    rows: Sequence[str] | Sequence[tuple[str, ...]],
    *parts: str,
    by_run: str,
    unseen: Sequence[str] = (),
) -> tuple[str, int]:
    """Creates the tag of these rows, or takes the one that another process created first; returns tag and version.

    Args:
        rows: what tells the rows from all that may stand in their place; sorted.
        parts: begin the name, for people.
        by_run: the run that pins; a tag is of one run, and its maintenance alone may drop it.
        unseen: what else makes refs to this tag differ.
    """
    digest = sha256(json.dumps([parts, rows, unseen]).encode()).hexdigest()[:DIGITS]
    tag = plain("-".join((*parts, f"n{len(rows)}", _mark_of(by_run), digest)))
    try:
        table.tags.create(tag, table.version)
    except RuntimeError as error:
        if "already exists" not in str(error):
            raise
    return tag, table.tags.get_version(tag)


def is_pinned_by(tag: str, run_id: str) -> bool:
    """Says whether this run pinned the tag, whichever run the rows are of; it did not pin a tag that was made by hand."""
    *_, mark, digest = ["", "", *tag.split("-")]
    return mark == _mark_of(run_id) and len(digest) == DIGITS


def _mark_of(run_id: str) -> str:
    """Returns what names a run in a tag: names of runs may begin with each other, or differ only where `plain` does not."""
    return sha256(run_id.encode()).hexdigest()[:8]

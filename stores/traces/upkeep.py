"""upkeep: small files and old versions of a trace store's tables -> fewer of them; what is pinned stays readable."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from stores.traces.tables import KEYS, TraceTables, has_same_rows, is_pinned_by, iteration_of_table, kind_of
from stores.types import RewardsRef, TracesRef

if TYPE_CHECKING:
    from lancedb.table import Table

FOR_EVER = timedelta(days=36_500)
OPTIMIZE_ATTEMPTS = 10
MARGIN_S = 60.0
"""See `TraceUpkeep.compact`."""


class TraceUpkeep:
    """The part of a trace store that keeps its tables small; `TraceStore` is the whole."""

    _tables: TraceTables

    def tables(self, run_id: str, *, after: int = 0) -> list[str]:
        """Returns the names of the tables that hold rows of this run.

        Args: after: of iterations after this one only, and of iteration 0, to which any later moment may add.
        """
        names = [name for kind in KEYS for name in self._tables.names_for(kind, run_id=run_id)]
        names = [name for name in names if not 0 < iteration_of_table(name) <= after]
        # A process that died while it made a table leaves a folder without a version, which the next writer completes.
        return [name for name in names if self._tables.open_if_there(name) is not None]

    def tables_with(self, refs: Iterable[TracesRef | RewardsRef]) -> list[str]:
        """Returns the names of the tables of these refs' iterations, whichever run these are of."""
        iterations = dict.fromkeys((ref.run_id, ref.iteration) for ref in refs)
        names = [self._tables.name_for(kind, *iteration) for iteration in iterations for kind in KEYS]
        return [name for name in dict.fromkeys(names) if self._tables.open_if_there(name) is not None]

    def compact(self, *, drop_before: Mapping[str, int], margin_s: float = MARGIN_S) -> None:
        """Merges small files, and drops versions that are older than these and than every tagged one.

        It is safe beside writers, and beside readers of these versions and of all later ones.

        Args:
            drop_before: version by table: these tables are compacted; 0 keeps every version.
            margin_s: versions that are this much older than the oldest kept one stay, too. Lance takes an age, not a
                version, and counts it from a moment that is a little later than the one at which the age is looked up.
        """
        for name, first in drop_before.items():
            table = self._tables.open(name)
            with self._tables.naming(name):
                _compact(table, first, margin_s)

    def newest_versions(self, tables: Iterable[str] | None = None) -> dict[str, int]:
        """Returns the newest version by table, of these tables or of all."""
        names = self._tables.all_names() if tables is None else tables
        opened = {name: self._tables.open_if_there(name) for name in names}
        return {name: table.version for name, table in opened.items() if table is not None}

    def num_versions(self, tables: Iterable[str]) -> int:
        """Counts the versions that these tables keep."""
        return sum(len(self._tables.open(name).list_versions()) for name in tables)

    def move_pins(self, refs: Iterable[TracesRef | RewardsRef], *, is_dry_run: bool = False) -> int:
        """Moves the tags of refs to the newest version, so that older versions can be dropped; returns how many moved.

        A ref stays readable and sees the same rows: a tag is not moved if rows of its key were added or replaced since.
        """
        moved = set()
        opened: dict[str, tuple[Table, Mapping[str, Any]] | None] = {}
        for ref in refs:
            name = self._tables.name_for(kind_of(ref), ref.run_id, ref.iteration)
            if name not in opened:
                table = self._tables.open_if_there(name)
                opened[name] = None if table is None else (table, table.tags.list())
            if (found := opened[name]) is None:
                continue
            newest, tags = found
            pinned = tags.get(ref.tag)
            if pinned is None or pinned["version"] >= newest.version:
                continue
            if has_same_rows(newest, self._tables.open_pinned(ref), ref):
                moved.add(ref.tag)
                if not is_dry_run:
                    newest.tags.update(ref.tag, newest.version)
        return len(moved)

    def stray_pins(
        self, run_id: str, known: Collection[str], *, older_than_s: float, tables: Iterable[str]
    ) -> dict[str, str]:
        """Returns table by tag: the tags that this run pinned, that no ref in `known` names and that are older than this.

        They were created by stages that died before their ref was recorded. Tags by which other runs pinned rows of this one
        are left out.
        """
        strays = {}
        for name in tables:
            table = self._tables.open(name)
            ages = {v["version"]: age(v["timestamp"]) for v in table.list_versions()}
            for tag, pinned in table.tags.list().items():
                is_old = ages.get(pinned["version"], FOR_EVER) > timedelta(seconds=older_than_s)
                if is_pinned_by(tag, run_id) and tag not in known and is_old:
                    strays[tag] = name
        return strays

    def drop_pins(self, tables: Mapping[str, str]) -> None:
        """Removes tags, given with their tables."""
        for tag, name in tables.items():
            self._tables.open(name).tags.delete(tag)


def _compact(table: Table, first: int, margin_s: float) -> None:
    # Merging takes long: it is done first, so that the ages below are still right when versions are dropped.
    _optimize(table, cleanup_older_than=FOR_EVER)
    ages = {v["version"]: age(v["timestamp"]) for v in table.list_versions()}
    first_kept = min((v for v in ages if v >= first), default=table.version)
    kept_versions = {first_kept, *(tag["version"] for tag in table.tags.list().values())}
    oldest = max(ages.get(version, FOR_EVER) for version in kept_versions)
    _optimize(table, cleanup_older_than=oldest + timedelta(seconds=margin_s))


def _optimize(table: Table, *, cleanup_older_than: timedelta) -> None:
    """Merges small files and drops versions of this age, again where another process committed the like meanwhile."""
    for attempt in range(1, OPTIMIZE_ATTEMPTS + 1):
        try:
            table.optimize(cleanup_older_than=cleanup_older_than)
            return
        except RuntimeError as error:
            if "Retryable commit conflict" not in str(error) or attempt == OPTIMIZE_ATTEMPTS:
                raise
            table.checkout_latest()


def age(timestamp: datetime) -> timedelta:
    """Returns how long ago a time was that LanceDB gives for a version."""
    aware = timestamp if timestamp.tzinfo else timestamp.astimezone(UTC)
    return datetime.now(UTC) - aware

"""traces: stores episodes and their rewards exactly once, and reads them at pinned versions. LanceDB.

    collect ── write_episodes ──> [episodes] ── pin_episodes ──> TracesRef  ── read_traces  ──> score, train
    score   ── write_rewards  ──> [rewards]  ── pin_rewards  ──> RewardsRef ── read_rewards ──> train, evaluate

Exactly once rests on four things, and all are needed: a deterministic key, the primary key declared with the table,
insert-only merges that use no index on the key (`use_index(False)`), and no duplicates inside one batch. The first writer
wins: a retried episode never replaces one that another policy version sampled. The one exception is `replaced`: a stage
that failed because too many episodes failed may be repeated, and then a failed episode is replaced by its repetition under
the same id. Otherwise rows are never changed, and the content of a tagged version is fixed. On object storage a commit is a
PUT that must fail where the object exists (`If-None-Match: *`): a server that ignores the condition loses commits of
concurrent writers (see `infra/docs/design/exactly-once.md`).

Which table holds which rows, and how it is opened, is in `tables`; how episodes are found without a pin in `lookup`; what
keeps the tables small in `upkeep`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pyarrow as pa

from stores.traces import rows
from stores.traces.lookup import TraceLookup
from stores.traces.tables import (
    KEYS,
    TraceTables,
    equals,
    has_tag,
    one_of,
    pin,
    pinned_by,
    played_rows,
    quoted,
    without_groups,
)
from stores.traces.upkeep import TraceUpkeep
from stores.types import Cause, EpisodeRewards, Purpose, RewardsRef, Trace, TracesRef

if TYPE_CHECKING:
    from lancedb.table import Table

R = TypeVar("R", Trace, EpisodeRewards)


class TraceStore(TraceLookup, TraceUpkeep):
    """Episodes and rewards at one LanceDB URI. It is cheap to create and to pickle: every process opens its own connection."""

    schemas: ClassVar[Mapping[str, pa.Schema]] = {"episodes": rows.EPISODES, "rewards": rows.REWARDS}
    _tables_class: ClassVar[type[TraceTables]] = TraceTables
    """Chooses and opens the tables; a store whose rows lie in other tables has its own."""

    def __init__(self, uri: str) -> None:
        """Args: uri: a folder, or an object storage URI that LanceDB knows."""
        self.uri = str(uri)
        self._tables = self._tables_class(self.uri, self.schemas)

    def create(self) -> None:
        """Creates the store if it is missing; it is safe to call again, and from several processes at once.

        Raises ValueError where a store of another version of Troupe exists already.
        """
        self._tables.create()

    def begin(self, *, run_id: str, iteration: int) -> None:
        """Makes the tables of an iteration; call it in one process before several write to them."""
        for kind in KEYS:
            self._tables.open_iteration(kind, run_id, iteration)

    def write_episodes(self, traces: Sequence[Trace], *, replaced: Sequence[Cause] = ()) -> int:
        """Stores the episodes that are not stored yet, and returns how many these were; the first writer of a key wins.

        A stored episode whose failure has a cause in `replaced` is overwritten instead.
        """
        unique = list({t.episode_id: t for t in reversed(traces)}.values())
        return sum(
            self.write_rows(rows.episode_table(own), replaced=replaced) for own in _by_iteration(unique).values()
        )

    def write_rows(self, episodes: pa.Table, *, replaced: Sequence[Cause] = ()) -> int:
        """Does what `write_episodes` does, for rows of the `episodes` table of one iteration, each id once."""
        run_id, iteration = (episodes[name][0].as_py() for name in ("run_id", "iteration"))
        return self._insert("episodes", episodes, run_id, iteration, replaced=replaced)

    def write_rewards(self, rewards: Sequence[EpisodeRewards]) -> int:
        """Stores rewards keyed by episode and credit version and returns how many were new; the first writer wins."""
        unique = list({rows.reward_id(r): r for r in reversed(rewards)}.values())
        return sum(
            self._insert("rewards", rows.reward_table(own), *iteration)
            for iteration, own in _by_iteration(unique).items()
        )

    def stored_ids(
        self, *, run_id: str, iteration: int, purpose: Purpose, team_key: str, but_not: Sequence[Cause] = ()
    ) -> set[str]:
        """Returns the ids of the episodes of this key that are stored by now, except those with a cause in `but_not`."""
        where = equals(run_id=run_id, iteration=iteration, purpose=purpose, team_key=team_key)
        where += f" AND cause NOT IN ({quoted(but_not)})" if but_not else ""
        name = self._tables.name_for("episodes", run_id, iteration)
        return set(self._tables.scan(name, where, ["episode_id"])["episode_id"].to_pylist())

    def stored_episodes(
        self, *, run_id: str, iteration: int, purpose: Purpose, team_key: str, with_tokens: bool = False
    ) -> pa.Table:
        """Returns one row per stored episode of this key.

        Its columns are {episode_id, group_id, task_id, status, cause, stop_reason, error, num_turns, started_at, duration_s}.
        `with_tokens` adds num_tokens, the length of all its completions; that reads the turns, so it costs more.
        """
        where = equals(run_id=run_id, iteration=iteration, purpose=purpose, team_key=team_key)
        columns = ["episode_id", "group_id", "task_id", "status", "cause", "stop_reason", "error", "num_turns"]
        columns += ["started_at", "duration_s"]
        name = self._tables.name_for("episodes", run_id, iteration)
        table = self._tables.scan(name, where, [*columns, *(["turns"] * with_tokens)])
        if not with_tokens:
            return table
        counts = [
            sum(len(turn["completion_token_ids"]) for turn in turns) for turns in table.column("turns").to_pylist()
        ]
        return table.drop_columns("turns").append_column("num_tokens", pa.array(counts, pa.int64()))

    def pin_episodes(
        self,
        *,
        run_id: str,
        iteration: int,
        purpose: Purpose,
        team_key: str,
        excluded_groups: Sequence[str] = (),
        by_run: str | None = None,
    ) -> TracesRef:
        """Tags the present version, so that the rows of this key can be read unchanged for ever.

        The same rows give the same tag, however often and in whichever process a run calls this: a repeated stage gets the
        same ref. Where a failed episode was replaced meanwhile, the rows are others, and so is the tag. `excluded_groups` stay
        stored, but readers of the ref do not see them.

        Args: by_run: the run that pins, whose maintenance may drop the tag; default the one whose rows these are.
        """
        key: dict[str, Any] = {"run_id": run_id, "iteration": iteration, "purpose": purpose, "team_key": team_key}
        excluded = tuple(sorted(excluded_groups))
        table = self._tables.open_iteration("episodes", run_id, iteration)
        self._check_unique(table, "episode_id", equals(**key))
        with self._tables.naming(table.name):
            pinned = played_rows(table, equals(**key) + without_groups(excluded))
            parts = (run_id, f"it{iteration}", purpose, team_key)
            tag, version = pin(table, pinned, *parts, by_run=by_run or run_id, unseen=excluded)
        return TracesRef(
            **key, uri=self.uri, version=version, tag=tag, num_episodes=len(pinned), excluded_groups=excluded
        )

    def pin_rewards(
        self,
        *,
        run_id: str,
        iteration: int,
        purpose: Purpose,
        credit_version: str,
        traces: TracesRef,
        causes: Sequence[Cause] | None = None,
        unscored: Collection[str] = (),
        by_run: str | None = None,
    ) -> RewardsRef:
        """Tags the rewards of the episodes in `traces`; ValueError if some that must have rewards have none.

        Args:
            causes: only episodes whose failure has one of these causes must have rewards; default all.
            unscored: ids of episodes that need none either.
            by_run: the run that pins, whose maintenance may drop the tag; default the one whose rows these are.
        """
        key: dict[str, Any] = {"run_id": run_id, "iteration": iteration, "purpose": purpose}
        key["credit_version"] = credit_version
        counted = pinned_by(traces) + one_of("cause", causes)
        found = self._tables.scan(self._tables.open_pinned(traces), counted, ["episode_id"])["episode_id"]
        episodes = sorted(set(found.to_pylist()) - set(unscored))
        table = self._tables.open_iteration("rewards", run_id, iteration)
        self._check_unique(table, "reward_id", equals(**key))
        scored = set(self._tables.scan(table, equals(**key), ["episode_id"])["episode_id"].to_pylist())
        missing = [e for e in episodes if e not in scored]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(episodes)} episodes of {traces.tag} have no rewards of credit version "
                f"{credit_version!r}, the first is {missing[0]}: run the score stage to its end"
            )
        parts = (run_id, f"it{iteration}", purpose, traces.team_key, credit_version)
        with self._tables.naming(table.name):
            tag, version = pin(table, episodes, *parts, by_run=by_run or run_id)
        return RewardsRef(
            **key, uri=self.uri, version=version, tag=tag, num_episodes=len(episodes), team_key=traces.team_key
        )

    def read_batches(
        self,
        ref: TracesRef,
        *,
        model_group: str | None = None,
        causes: Sequence[Cause] | None = None,
        columns: Sequence[str] = tuple(rows.EPISODES.names),
        batch_size: int = 256,
    ) -> Iterator[pa.RecordBatch]:
        """Yields pinned episode rows, turns nested, in no particular order and at most `batch_size` at a time.

        Args:
            model_group: only episodes in which this model group has a turn.
            causes: only episodes whose failure has one of these causes; default all.
            columns: names of top-level columns; default all.
        """
        where = pinned_by(ref) + one_of("cause", causes)
        where += f" AND {has_tag('model_groups', model_group)}" if model_group is not None else ""
        yield from self._tables.batches(self._tables.open_pinned(ref), where, columns, batch_size=batch_size)

    def read_traces(
        self, ref: TracesRef, *, model_group: str | None = None, causes: Sequence[Cause] | None = None
    ) -> Iterator[Trace]:
        """Yields pinned episodes as records; filters are those of `read_batches`."""
        for batch in self.read_batches(ref, model_group=model_group, causes=causes):
            yield from rows.traces_of(batch)

    def read_rewards(self, ref: RewardsRef) -> Iterator[EpisodeRewards]:
        """Yields the pinned rewards of the episodes of the ref's team, in no particular order."""
        team = self.stored_ids(run_id=ref.run_id, iteration=ref.iteration, purpose=ref.purpose, team_key=ref.team_key)
        pinned = self._tables.open_pinned(ref)
        for batch in self._tables.batches(pinned, pinned_by(ref), rows.REWARDS.names, batch_size=1024):
            yield from (r for r in rows.rewards_of(batch) if r.episode_id in team)

    def count_rows(self, ref: TracesRef | RewardsRef) -> int:
        """Counts the rows that the ref pins."""
        if isinstance(ref, RewardsRef):
            return sum(1 for _ in self.read_rewards(ref))
        return self._tables.open_pinned(ref).count_rows(pinned_by(ref))

    def _insert(
        self, kind: str, table: pa.Table, run_id: str, iteration: int, *, replaced: Sequence[Cause] = ()
    ) -> int:
        target = self._tables.open_iteration(kind, run_id, iteration)
        # Without `use_index(False)` a merge looks keys up in an index that does not know rows of concurrent commits yet.
        merge = target.merge_insert(KEYS[kind]).use_index(False).when_not_matched_insert_all()
        if replaced:
            merge = merge.when_matched_update_all(where=f"target.cause IN ({quoted(replaced)})")
        with self._tables.naming(target.name):
            return merge.execute(table, timeout=timedelta(minutes=5)).num_inserted_rows

    def _check_unique(self, table: Table, key: str, where: str) -> None:
        """Raises ValueError if a key is there twice, which the merges of `_insert` exclude."""
        values = self._tables.scan(table, where, [key])[key].to_pylist()
        count, unique = len(values), len(set(values))
        if count != unique:
            raise ValueError(
                f"{count} rows but {unique} different {key} where {where}: the table must not be trained on"
            )


def _by_iteration(records: Iterable[R]) -> dict[tuple[str, int], list[R]]:
    """Groups records by run and iteration, which name their table."""
    groups: dict[tuple[str, int], list[R]] = {}
    for record in records:
        groups.setdefault((record.run_id, record.iteration), []).append(record)
    return groups

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

Which table holds which rows, and how it is opened, is in `trace_tables`; what keeps the tables small is in `trace_upkeep`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar, Unpack

import pyarrow as pa
import pyarrow.compute as pc

from stores.traces import rows
from stores.traces.event_times import COLUMNS, EVENT_TIMES, event_times
from stores.traces.trace_filters import (
    equals,
    literal,
    pinned_by,
    played_by,
    quoted,
    with_cause,
    with_status,
    without_groups,
)
from stores.traces.trace_pins import pin, played_rows
from stores.traces.trace_tables import KEYS, TraceTables, episode_columns
from stores.traces.trace_upkeep import TraceUpkeep
from stores.types import (
    Cause,
    EpisodeRewards,
    EpisodeStatus,
    Purpose,
    RewardsRef,
    Trace,
    TracesRef,
    hinted_iteration,
)

if TYPE_CHECKING:
    from lancedb.table import Table

R = TypeVar("R", Trace, EpisodeRewards)


class Asked(TypedDict, total=False):
    """Properties of episodes that are listed; what is missing or None may be anything."""

    run_id: str | None
    iteration: int | None
    purpose: Purpose | None
    task_id: str | None
    status: EpisodeStatus | None
    agent: str | None
    """An agent that has a turn in it."""
    outcomes: tuple[float | None, float | None] | None
    """The lowest and the highest outcome, under any credit version."""


class TraceStore(TraceUpkeep):
    """Episodes and rewards at one LanceDB URI. It is cheap to create and to pickle: every process opens its own connection."""

    schemas: ClassVar[Mapping[str, pa.Schema]] = {"episodes": rows.EPISODES, "rewards": rows.REWARDS}
    _tables_class: ClassVar[type[TraceTables]] = TraceTables
    """Chooses and opens the tables; a store whose rows lie in other tables has its own."""

    def __init__(self, uri: str) -> None:
        """Args: uri: a folder, or an object storage URI that LanceDB knows."""
        self.uri = str(uri)
        super().__init__(self._tables_class(self.uri, self.schemas))

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
            self._insert("episodes", rows.episode_table(own), replaced=replaced, run_id=run_id, iteration=iteration)
            for (run_id, iteration), own in _by_iteration(unique).items()
        )

    def write_rewards(self, rewards: Sequence[EpisodeRewards]) -> int:
        """Stores rewards keyed by episode and credit version and returns how many were new; the first writer wins."""
        unique = list({rows.reward_id(r): r for r in reversed(rewards)}.values())
        return sum(
            self._insert("rewards", rows.reward_table(own), run_id=run_id, iteration=iteration)
            for (run_id, iteration), own in _by_iteration(unique).items()
        )

    def stored_ids(
        self,
        *,
        run_id: str,
        iteration: int,
        purpose: Purpose,
        team_key: str,
        but_not: Sequence[Cause] = (),
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
        where = equals(run_id=run_id, iteration=iteration, purpose=purpose, team_key=team_key)
        excluded = tuple(sorted(excluded_groups))
        table = self._tables.open_iteration("episodes", run_id, iteration)
        with self._tables.naming(table.name):
            _check_unique(table, "episode_id", where)
            pinned = played_rows(table, where + without_groups(excluded))
            parts = (run_id, f"it{iteration}", purpose, team_key)
            tag, version = pin(table, pinned, *parts, by_run=by_run or run_id, unseen=excluded)
        return TracesRef(
            uri=self.uri,
            version=version,
            tag=tag,
            run_id=run_id,
            iteration=iteration,
            purpose=purpose,
            team_key=team_key,
            num_episodes=len(pinned),
            excluded_groups=excluded,
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
        where = equals(run_id=run_id, iteration=iteration, purpose=purpose, credit_version=credit_version)
        left_out = set(unscored)
        of_traces = self._tables.open_pinned(traces)
        with self._tables.naming(of_traces.name):
            counted = pinned_by(traces) + with_cause(causes, of_traces)
            episodes = [e for e in _column(of_traces, "episode_id", counted).to_pylist() if e not in left_out]
        table = self._tables.open_iteration("rewards", run_id, iteration)
        with self._tables.naming(table.name):
            _check_unique(table, "reward_id", where)
            scored = set(_column(table, "episode_id", where).to_pylist())
        missing = [e for e in episodes if e not in scored]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(episodes)} episodes of {traces.tag} have no rewards of credit version "
                f"{credit_version!r}, the first is {missing[0]}: run the score stage to its end"
            )
        parts = (run_id, f"it{iteration}", purpose, traces.team_key, credit_version)
        with self._tables.naming(table.name):
            tag, version = pin(table, sorted(episodes), *parts, by_run=by_run or run_id)
        return RewardsRef(
            uri=self.uri,
            version=version,
            tag=tag,
            run_id=run_id,
            iteration=iteration,
            purpose=purpose,
            credit_version=credit_version,
            num_episodes=len(episodes),
            team_key=traces.team_key,
        )

    def read_batches(
        self,
        ref: TracesRef,
        *,
        agent: str | None = None,
        model_group: str | None = None,
        statuses: Sequence[EpisodeStatus] | None = None,
        causes: Sequence[Cause] | None = None,
        columns: Sequence[str] | None = None,
        batch_size: int = 256,
    ) -> Iterator[pa.RecordBatch]:
        """Yields pinned episode rows, turns nested, in no particular order and at most `batch_size` at a time.

        Args:
            agent: only episodes in which this agent has a turn.
            model_group: only episodes in which this model group has a turn.
            statuses: only these; default all.
            causes: only episodes whose failure has one of these causes; default all.
            columns: names of top-level columns; default all.
        """
        where = [pinned_by(ref)]
        where += [f"contains(agents, {literal(f'|{agent}|')})"] if agent is not None else []
        where += [f"contains(model_groups, {literal(f'|{model_group}|')})"] if model_group is not None else []
        table = self._tables.open_pinned(ref)
        condition = " AND ".join(where) + with_status(statuses) + with_cause(causes, table)
        names = list(columns) if columns is not None else episode_columns(table)
        with self._tables.naming(table.name):
            yield from table.search().where(condition).select(names).to_batches(batch_size)

    def read_traces(
        self,
        ref: TracesRef,
        *,
        agent: str | None = None,
        model_group: str | None = None,
        statuses: Sequence[EpisodeStatus] | None = None,
        causes: Sequence[Cause] | None = None,
    ) -> Iterator[Trace]:
        """Yields pinned episodes as records; filters are those of `read_batches`."""
        for batch in self.read_batches(ref, agent=agent, model_group=model_group, statuses=statuses, causes=causes):
            yield from rows.traces_of(batch)

    def event_times(self, *, run_id: str, iteration: int, since: float, until: float) -> pa.Table:
        """Returns when the stored episodes of an iteration, their turns and their tool calls began and ended.

        The columns are those of `event_times`; there is no row where nothing is stored. The turns are read whole, since
        LanceDB reads no part of a nested column, but 256 episodes at a time.

        Args: since, until: only episodes of which a part lies between these Unix seconds.
        """
        table = self._tables.open_if_there(self._tables.name_for("episodes", run_id, iteration))
        if table is None:
            return EVENT_TIMES.empty_table()
        where = f"{equals(run_id=run_id, iteration=iteration)} AND started_at < {until} AND started_at + duration_s > {since}"
        with self._tables.naming(table.name):
            batches = table.search().where(where).select(list(COLUMNS)).to_batches(256)
            return pa.concat_tables([EVENT_TIMES.empty_table(), *map(event_times, batches)])

    def read_rewards(self, ref: RewardsRef) -> Iterator[EpisodeRewards]:
        """Yields the pinned rewards of the episodes of the ref's team, in no particular order."""
        team = self.stored_ids(run_id=ref.run_id, iteration=ref.iteration, purpose=ref.purpose, team_key=ref.team_key)
        table = self._tables.open_pinned(ref)
        query = table.search().where(pinned_by(ref)).select(rows.REWARDS.names)
        with self._tables.naming(table.name):
            for batch in query.to_batches(1024):
                yield from (r for r in rows.rewards_of(batch) if r.episode_id in team)

    def get_trace(self, episode_id: str, *, run_id: str | None = None) -> Trace:
        """Returns the episode with this id, or with the only id that starts with it.

        The iteration that the id begins with is looked at first. Only what is not there, such as an id of an earlier version
        or fewer than four characters, is looked for in every iteration.

        Args: run_id: the run whose episode it probably is: where it is, the tables need not be listed.

        Raises ValueError if there is none, or more than one.
        """
        traces = self._find_by_id(episode_id, self._tables.hinted_names("episodes", episode_id, run_id))
        if not traces:
            traces = self._find_by_id(episode_id, self._tables.names_for("episodes"))
        if len(traces) == 1:
            return traces[0]
        if not traces:
            listing = f"`troupe show --run {run_id or 'RUN'}` lists those that are stored"
            raise ValueError(f"no episode {episode_id!r} in {self.uri}: {listing}")
        ids = ", ".join(t.episode_id for t in traces)
        raise ValueError(f"episode {episode_id!r} is not unique in {self.uri} ({ids}, ...): give more characters")

    def find_traces(
        self,
        *,
        run_id: str | None = None,
        iteration: int | None = None,
        purpose: Purpose | None = None,
        task_id: str | None = None,
        status: EpisodeStatus | None = None,
        variant: str | None = None,
        policy_versions: Mapping[str, int] | None = None,
        limit: int = 50,
    ) -> list[Trace]:
        """Returns at most `limit` stored episodes with these properties, pinned or not; `variant=""`: no variants.

        Those of later iterations come first.

        Args: policy_versions: those that acted, by model group; the episodes may have been played with other groups, too.
        """
        where = equals(
            run_id=run_id, iteration=iteration, purpose=purpose, task_id=task_id, status=status, variant=variant
        )
        where = " AND ".join([*([where] if where else []), *played_by(policy_versions or {})])
        return self._find(
            where, limit=limit, names=self._tables.names_for("episodes", run_id=run_id, iteration=iteration)
        )

    def newest_episodes(
        self,
        *,
        limit: int,
        before: str = "",
        **asked: Unpack[Asked],
    ) -> list[dict[str, Any]]:
        """Returns at most `limit` stored episodes with these properties as rows without turns.

        The newest iteration comes first, and in an iteration the episode that began last. The list is empty where nothing was
        ever stored. Of each iteration that the page reaches, the ids and times of the matching episodes are read, and the
        other columns only of those that are returned.

        Args: before: only those that come after this episode in the same list; ValueError where it is not in the list.
        """
        where, names = self._asked(asked)
        run_id, outcomes = asked.get("run_id"), asked.get("outcomes")
        if before:
            here = " AND ".join(filter(None, (where, equals(episode_id=before))))
            likely = [name for name in self._tables.hinted_names("episodes", before, run_id) if name in names]
            holder = next((n for n in [*likely, *names] if len(self._tables.scan(n, here, ["episode_id"]))), None)
            if holder is None:
                raise ValueError(f"episode {before!r} is not in this list: begin without it")
            names = names[names.index(holder) :]
        page: list[dict[str, Any]] = []
        for name in names:
            ids = self._newest_ids(name, where, outcomes)
            ids = ids[ids.index(before) + 1 :] if before and name == names[0] else ids
            page += self._listed(name, ids[: limit - len(page)])
            if len(page) == limit:
                break
        return page

    def count_episodes(self, **asked: Unpack[Asked]) -> int:
        """Counts the episodes that `newest_episodes` lists without a limit."""
        where, names = self._asked(asked)
        return sum(len(self._newest_ids(name, where, asked.get("outcomes"))) for name in names)

    def outcomes_of(self, episodes: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
        """Returns the outcomes by episode and credit version; episodes that were never credited are left out.

        Args: episodes: rows with `episode_id`, `run_id` and `iteration`, as those of `newest_episodes`.
        """
        ids: dict[str, list[str]] = {}
        for row in episodes:
            ids.setdefault(self._tables.name_for("rewards", row["run_id"], row["iteration"]), []).append(
                row["episode_id"]
            )
        outcomes: dict[str, dict[str, float]] = {}
        for name, own in ids.items():
            found = self._tables.scan(
                name, f"episode_id IN ({quoted(own)})", ["episode_id", "credit_version", "outcome"]
            )
            for row in found.to_pylist():
                outcomes.setdefault(row["episode_id"], {})[row["credit_version"]] = row["outcome"]
        return outcomes

    def rewarded_traces(
        self, *, run_id: str, iteration: int | None, purpose: Purpose, min_outcome: float
    ) -> Iterator[Trace]:
        """Yields stored episodes that were credited with this outcome or more under any credit version, without variants.

        They come in no particular order. ValueError where there is no store.
        """
        self._tables.open("episodes")
        where = equals(run_id=run_id, iteration=iteration, purpose=purpose)
        paid = self._tables.names_for("rewards", run_id=run_id, iteration=iteration)
        scans = (self._tables.scan(name, f"{where} AND outcome >= {min_outcome}", ["episode_id"]) for name in paid)
        good = {episode_id for table in scans for episode_id in table["episode_id"].to_pylist()}
        for name in self._tables.names_for("episodes", run_id=run_id, iteration=iteration) if good else ():
            for batch in self._tables.batches(name, where):
                yield from (trace for trace in rows.traces_of(batch) if trace.episode_id in good and not trace.variant)

    def rewards_of(
        self, episode_id: str, *, run_id: str | None = None, iteration: int | None = None
    ) -> list[EpisodeRewards]:
        """Returns all rewards that an episode was ever given, sorted by credit version.

        Args: run_id, iteration: those of the episode, where they are known: one table is read then.
        """
        if run_id is not None and iteration is not None:
            names = [self._tables.name_for("rewards", run_id, iteration)]
        else:
            near = self._tables.hinted_names("rewards", episode_id, run_id)
            names = near + [name for name in self._tables.names_for("rewards", run_id=run_id) if name not in near]
        where = equals(episode_id=episode_id)
        for name in names:
            found = self._tables.scan(name, where, rows.REWARDS.names)
            if len(found):
                rewards = [r for batch in found.to_batches() for r in rows.rewards_of(batch)]
                return sorted(rewards, key=lambda r: r.credit_version)
        return []

    def count_rows(self, ref: TracesRef | RewardsRef) -> int:
        """Counts the rows that the ref pins."""
        if isinstance(ref, RewardsRef):
            return sum(1 for _ in self.read_rewards(ref))
        return self._tables.open_pinned(ref).count_rows(pinned_by(ref))

    def count_others(self, run_id: str) -> int:
        """Counts the stored episodes of other runs; it opens every table."""
        others = f"run_id != {literal(run_id)}"
        names = ["episodes", *self._tables.iteration_names("episodes")]
        return sum(
            table.count_rows(others) for name in names if (table := self._tables.open_if_there(name)) is not None
        )

    def completions_of(self, episode_ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Returns by episode the texts of its completions, in order; reads the turns, so ask for few."""
        hints = {hinted_iteration(episode_id) for episode_id in episode_ids}
        where = f"episode_id IN ({quoted(episode_ids)})"
        return {
            row["episode_id"]: tuple(turn["completion_text"] for turn in row["turns"])
            for iteration in hints
            for name in self._tables.names_for("episodes", iteration=iteration)
            for row in self._tables.scan(name, where, ["episode_id", "turns"]).to_pylist()
        }

    def _asked(self, asked: Asked) -> tuple[str, list[str]]:
        """Returns the condition, but for the outcomes, and the tables that may hold such episodes."""
        columns = equals(
            run_id=asked.get("run_id"),
            iteration=asked.get("iteration"),
            purpose=asked.get("purpose"),
            task_id=asked.get("task_id"),
            status=asked.get("status"),
        )
        agent = asked.get("agent")
        parts = [columns, "" if agent is None else f"contains(agents, {literal(f'|{agent}|')})"]
        names = self._tables.names_for("episodes", run_id=asked.get("run_id"), iteration=asked.get("iteration"))
        return " AND ".join(filter(None, parts)), names

    def _newest_ids(self, name: str, where: str, outcomes: tuple[float | None, float | None] | None) -> list[str]:
        """Returns the ids of a table's matching episodes, the one that began last first."""
        matching = self._tables.scan(name, where, ["episode_id", "started_at"])
        matching = matching.sort_by([("started_at", "descending"), ("episode_id", "ascending")])
        ids = matching["episode_id"].to_pylist()
        if outcomes is None:
            return ids
        bounds = zip((">=", "<="), outcomes, strict=True)
        bounded = " AND ".join(f"outcome {sign} {bound}" for sign, bound in bounds if bound is not None)
        credited = self._tables.scan(f"rewards{name.removeprefix('episodes')}", bounded, ["episode_id"])
        wanted = set(credited["episode_id"].to_pylist())
        return [i for i in ids if i in wanted]

    def _listed(self, name: str, ids: Sequence[str]) -> list[dict[str, Any]]:
        """Returns the rows of these episodes without turns, in this order."""
        if not ids:
            return []
        table = self._tables.open(name)
        columns = [column for column in rows.LISTED if column in table.schema.names]
        query = table.search().where(f"episode_id IN ({quoted(ids)})").select(columns)
        with self._tables.naming(name):
            rows_by_id = {row["episode_id"]: row for row in query.to_list()}
        return [rows_by_id[i] for i in ids]

    def _find(self, where: str, *, limit: int, names: Sequence[str] = ("episodes",)) -> list[Trace]:
        traces: list[Trace] = []
        for name in names:
            for batch in self._tables.batches(name, where, limit=limit - len(traces)):
                traces += rows.traces_of(batch)
            if len(traces) >= limit:
                break
        return traces

    def _find_by_id(self, episode_id: str, names: Sequence[str]) -> list[Trace]:
        """Returns the episode of this id, or else some of those whose ids begin with it."""
        traces = self._find(equals(episode_id=episode_id), limit=1, names=names)
        if not traces and episode_id:
            traces = self._find(f"starts_with(episode_id, {literal(episode_id)})", limit=3, names=names)
        return traces

    def _insert(
        self, kind: str, table: pa.Table, *, run_id: str, iteration: int, replaced: Sequence[Cause] = ()
    ) -> int:
        target = self._tables.open_iteration(kind, run_id, iteration)
        # Without `use_index(False)` a merge looks keys up in an index that does not know rows of concurrent commits yet.
        merge = target.merge_insert(KEYS[kind]).use_index(False).when_not_matched_insert_all()
        if replaced:
            merge = merge.when_matched_update_all(where=f"target.cause IN ({quoted(replaced)})")
        with self._tables.naming(target.name):
            return merge.execute(table, timeout=timedelta(minutes=5)).num_inserted_rows


def _check_unique(table: Table, key: str, where: str) -> None:
    """Raises ValueError if a key is there twice, which the merges of `_insert` exclude."""
    values = _column(table, key, where)
    count = len(values)
    unique = pc.count_distinct(values).as_py()
    if count != unique:
        raise ValueError(f"{count} rows but {unique} different {key} where {where}: the table must not be trained on")


def _column(table: Table, name: str, where: str) -> pa.ChunkedArray:
    return table.search().where(where).select([name]).to_arrow()[name]


def _by_iteration(records: Iterable[R]) -> dict[tuple[str, int], list[R]]:
    """Groups records by run and iteration, which name their table."""
    groups: dict[tuple[str, int], list[R]] = {}
    for record in records:
        groups.setdefault((record.run_id, record.iteration), []).append(record)
    return groups

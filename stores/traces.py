"""traces: stores episodes and their rewards exactly once, and reads them at pinned versions. LanceDB.

    collect ── write_episodes ──> [episodes] ── pin_episodes ──> TracesRef  ── read_traces  ──> score, train
    score   ── write_rewards  ──> [rewards]  ── pin_rewards  ──> RewardsRef ── read_rewards ──> train, evaluate

Each iteration of a run has two tables of its own, `episodes.<run>.it<k>` and `rewards.<run>.it<k>`, which its first writer
makes. So what a write, a pin or a read costs depends on the size of one iteration and not on how many there were: merges
compare keys with one iteration's rows, without an index that lags behind concurrent commits and has to be kept up. An
episode id begins with its iteration, so that a whole id is looked for in one table. The tables `episodes` and `rewards`
are made with the store. They are empty, but in stores of earlier versions, whose iterations stay in them.

Exactly once rests on four things, and all are needed: a deterministic key, the primary key declared with the table,
insert-only merges that use no index on the key (`use_index(False)`), and no duplicates inside one batch. The first writer
wins: a retried episode never replaces one that another policy version sampled. The one exception is `replaced`: a stage
that failed because too many episodes failed may be repeated, and then a failed episode is replaced by its repetition under
the same id. Otherwise rows are never changed, and the content of a tagged version is fixed. On object storage a commit is a
PUT that must fail where the object exists (`If-None-Match: *`): a server that ignores the condition loses commits of
concurrent writers (see `infra/docs/design/exactly-once.md`).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from stores import rows
from stores.files import is_uri, lancedb_options, local_path
from stores.trace_tables import is_table_of, iteration_of_table, plain, table_name
from stores.types import (
    COUNTED,
    SOUND,
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
    from lancedb import DBConnection
    from lancedb.table import Table

KEYS = {"episodes": "episode_id", "rewards": "reward_id"}
"""The primary key of each table."""
PAGE = 1000
"""Tables that are listed at once."""
R = TypeVar("R", Trace, EpisodeRewards)
FOR_EVER = timedelta(days=36_500)
OPTIMIZE_ATTEMPTS = 10


class TraceStore:
    """The tables at one LanceDB URI. It is cheap to create and to pickle: every process opens its own connection."""

    schemas: ClassVar[Mapping[str, pa.Schema]] = {"episodes": rows.EPISODES, "rewards": rows.REWARDS}

    def __init__(self, uri: str) -> None:
        """Args: uri: a folder, or an object storage URI that LanceDB knows."""
        self.uri = str(uri)
        self._connection: tuple[int, DBConnection] | None = None
        """With the process id: a forked child must not use its parent's connection."""
        self._is_of_earlier_version: dict[str, bool] = {}
        """By kind, whether the table that is made with the store has rows: no later version adds any."""

    def __getstate__(self) -> dict[str, Any]:
        return {"uri": self.uri, "_connection": None, "_is_of_earlier_version": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def create(self) -> None:
        """Creates the store if it is missing; it is safe to call again, and from several processes at once.

        Raises ValueError where a store of another version of Troupe exists already.
        """
        for name, schema in self.schemas.items():
            self._check_schema(name, self._open_or_create(name, schema), schema)

    def begin(self, *, run_id: str, iteration: int) -> None:
        """Makes the tables of an iteration; call it in one process before several write to them."""
        for kind in KEYS:
            self._open_or_create(self._place(kind, run_id, iteration), self.schemas[kind])

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
        where = _where(run_id=run_id, iteration=iteration, purpose=purpose, team_key=team_key)
        where += f" AND cause NOT IN ({quoted(but_not)})" if but_not else ""
        name = self._place("episodes", run_id, iteration)
        return set(self._scan(name, where, ["episode_id"])["episode_id"].to_pylist())

    def stored_episodes(
        self, *, run_id: str, iteration: int, purpose: Purpose, team_key: str, with_tokens: bool = False
    ) -> pa.Table:
        """Returns one row per stored episode of this key.

        Its columns are {episode_id, group_id, task_id, status, cause, stop_reason, error, num_turns, started_at, duration_s}.
        `with_tokens` adds num_tokens, the length of all its completions; that reads the turns, so it costs more.
        """
        where = _where(run_id=run_id, iteration=iteration, purpose=purpose, team_key=team_key)
        names = ["episode_id", "group_id", "task_id", "status", "cause", "stop_reason", "error", "num_turns"]
        names += ["started_at", "duration_s"]
        place = self._place("episodes", run_id, iteration)
        table = self._scan(place, where, [*names, *(["turns"] * with_tokens)])
        if not with_tokens:
            return table
        counts = [
            sum(len(turn["completion_token_ids"]) for turn in turns) for turns in table.column("turns").to_pylist()
        ]
        return table.drop_columns("turns").append_column("num_tokens", pa.array(counts, pa.int64()))

    def pin_episodes(
        self, *, run_id: str, iteration: int, purpose: Purpose, team_key: str, excluded_groups: Sequence[str] = ()
    ) -> TracesRef:
        """Tags the present version, so that the rows of this key can be read unchanged for ever.

        The same rows give the same tag, however often this is called and by whom: a repeated stage gets the same ref.
        `excluded_groups` stay stored, but readers of the ref do not see them.
        """
        where = _where(run_id=run_id, iteration=iteration, purpose=purpose, team_key=team_key)
        table = self._open_or_create(self._place("episodes", run_id, iteration), self.schemas["episodes"])
        count = _count_unique(table, "episode_id", where)
        tag, version = _pin(table, count, run_id, f"it{iteration}", purpose, team_key)
        excluded = tuple(sorted(excluded_groups))
        return TracesRef(
            uri=self.uri,
            version=version,
            tag=tag,
            run_id=run_id,
            iteration=iteration,
            purpose=purpose,
            team_key=team_key,
            num_episodes=table.count_rows(where + _without(excluded)) if excluded else count,
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
    ) -> RewardsRef:
        """Tags the rewards of the episodes in `traces`; ValueError if some that must have rewards have none.

        Args:
            causes: only episodes whose failure has one of these causes must have rewards; default all.
            unscored: ids of episodes that need none either.
        """
        where = _where(run_id=run_id, iteration=iteration, purpose=purpose, credit_version=credit_version)
        table = self._open_or_create(self._place("rewards", run_id, iteration), self.schemas["rewards"])
        _count_unique(table, "reward_id", where)
        of_traces = self._open_pinned(traces)
        counted = _where_of(traces) + _with_cause(causes, of_traces)
        left_out = set(unscored)
        episodes = [e for e in _column(of_traces, "episode_id", counted).to_pylist() if e not in left_out]
        scored = set(_column(table, "episode_id", where).to_pylist())
        missing = [e for e in episodes if e not in scored]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(episodes)} episodes of {traces.tag} have no rewards of credit version "
                f"{credit_version!r}, the first is {missing[0]}: run the score stage to its end"
            )
        tag, version = _pin(
            table, len(episodes), run_id, f"it{iteration}", purpose, traces.team_key, credit_version[:16]
        )
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
        where = [_where_of(ref)]
        where += [f"contains(agents, {_quote(f'|{agent}|')})"] if agent is not None else []
        where += [f"contains(model_groups, {_quote(f'|{model_group}|')})"] if model_group is not None else []
        table = self._open_pinned(ref)
        condition = " AND ".join(where) + _with_status(statuses) + _with_cause(causes, table)
        names = list(columns) if columns is not None else _names(table)
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

    def read_rewards(self, ref: RewardsRef) -> Iterator[EpisodeRewards]:
        """Yields the pinned rewards of the episodes of the ref's team, in no particular order."""
        team = self.stored_ids(run_id=ref.run_id, iteration=ref.iteration, purpose=ref.purpose, team_key=ref.team_key)
        query = self._open_pinned(ref).search().where(_where_of(ref)).select(rows.REWARDS.names)
        for batch in query.to_batches(1024):
            yield from (r for r in rows.rewards_of(batch) if r.episode_id in team)

    def get_trace(self, episode_id: str, *, run_id: str | None = None) -> Trace:
        """Returns the episode with this id, or with the only id that starts with it.

        The iteration that the id begins with is looked at first. Only what is not there, such as an id of an earlier version
        or fewer than four characters, is looked for in every iteration.

        Args: run_id: the run whose episode it probably is: where it is, the tables need not be listed.

        Raises ValueError if there is none, or more than one.
        """
        traces = self._find_by_id(episode_id, self._hinted("episodes", episode_id, run_id))
        if not traces:
            traces = self._find_by_id(episode_id, self._places("episodes"))
        if len(traces) == 1:
            return traces[0]
        if not traces:
            raise ValueError(f"no episode {episode_id!r} in {self.uri}: list the stored ones to see their ids")
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
        where = _where(
            run_id=run_id, iteration=iteration, purpose=purpose, task_id=task_id, status=status, variant=variant
        )
        where = " AND ".join([*([where] if where else []), *_played_by(policy_versions or {})])
        return self._find(where, limit=limit, places=self._places("episodes", run_id=run_id, iteration=iteration))

    def newest_episodes(
        self,
        *,
        limit: int,
        before: str = "",
        run_id: str | None = None,
        iteration: int | None = None,
        purpose: Purpose | None = None,
        task_id: str | None = None,
        status: EpisodeStatus | None = None,
    ) -> list[dict[str, Any]]:
        """Returns at most `limit` stored episodes with these properties as rows without turns.

        The newest iteration comes first, and in an iteration the episode that began last. The list is empty where nothing was
        ever stored. Of each iteration that the page reaches, the ids and times of the matching episodes are read, and the
        other columns only of those that are returned.

        Args: before: only those that come after this episode in the same list; ValueError where it is not in the list.
        """
        where = _where(run_id=run_id, iteration=iteration, purpose=purpose, task_id=task_id, status=status)
        places = self._places("episodes", run_id=run_id, iteration=iteration)
        if before:
            here = " AND ".join(filter(None, (where, _where(episode_id=before))))
            likely = [place for place in self._hinted("episodes", before, run_id) if place in places]
            holder = next((p for p in [*likely, *places] if len(self._scan(p, here, ["episode_id"]))), None)
            if holder is None:
                raise ValueError(f"episode {before!r} is not in this list: begin without it")
            places = places[places.index(holder) :]
        page: list[dict[str, Any]] = []
        for place in places:
            matching = self._scan(place, where, ["episode_id", "started_at"])
            matching = matching.sort_by([("started_at", "descending"), ("episode_id", "ascending")])
            ids = matching["episode_id"].to_pylist()
            ids = ids[ids.index(before) + 1 :] if before and place == places[0] else ids
            page += self._listed(place, ids[: limit - len(page)])
            if len(page) == limit:
                break
        return page

    def outcomes_of(self, episodes: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
        """Returns the outcomes by episode and credit version; episodes that were never credited are left out.

        Args: episodes: rows with `episode_id`, `run_id` and `iteration`, as those of `newest_episodes`.
        """
        ids: dict[str, list[str]] = {}
        for row in episodes:
            ids.setdefault(self._place("rewards", row["run_id"], row["iteration"]), []).append(row["episode_id"])
        outcomes: dict[str, dict[str, float]] = {}
        for place, own in ids.items():
            found = self._scan(place, f"episode_id IN ({quoted(own)})", ["episode_id", "credit_version", "outcome"])
            for row in found.to_pylist():
                outcomes.setdefault(row["episode_id"], {})[row["credit_version"]] = row["outcome"]
        return outcomes

    def rewarded_traces(
        self, *, run_id: str, iteration: int | None, purpose: Purpose, min_outcome: float
    ) -> Iterator[Trace]:
        """Yields stored episodes that were credited with this outcome or more under any credit version, without variants.

        They come in no particular order. ValueError where there is no store.
        """
        self._open("episodes")
        where = _where(run_id=run_id, iteration=iteration, purpose=purpose)
        paid = self._places("rewards", run_id=run_id, iteration=iteration)
        scans = (self._scan(place, f"{where} AND outcome >= {min_outcome}", ["episode_id"]) for place in paid)
        good = {episode_id for table in scans for episode_id in table["episode_id"].to_pylist()}
        for place in self._places("episodes", run_id=run_id, iteration=iteration) if good else ():
            for batch in self._batches(place, where):
                yield from (trace for trace in rows.traces_of(batch) if trace.episode_id in good and not trace.variant)

    def rewards_of(
        self, episode_id: str, *, run_id: str | None = None, iteration: int | None = None
    ) -> list[EpisodeRewards]:
        """Returns all rewards that an episode was ever given, sorted by credit version.

        Args: run_id, iteration: those of the episode, where they are known: one table is read then.
        """
        if run_id is not None and iteration is not None:
            places = [self._place("rewards", run_id, iteration)]
        else:
            near = self._hinted("rewards", episode_id, run_id)
            places = near + [p for p in self._places("rewards", run_id=run_id) if p not in near]
        where = _where(episode_id=episode_id)
        for place in places:
            found = self._scan(place, where, rows.REWARDS.names)
            if len(found):
                rewards = [r for batch in found.to_batches() for r in rows.rewards_of(batch)]
                return sorted(rewards, key=lambda r: r.credit_version)
        return []

    def count_rows(self, ref: TracesRef | RewardsRef) -> int:
        """Counts the rows that the ref pins."""
        if isinstance(ref, RewardsRef):
            return sum(1 for _ in self.read_rewards(ref))
        return self._open_pinned(ref).count_rows(_where_of(ref))

    def count_others(self, run_id: str) -> int:
        """Counts the stored episodes of other runs; it opens every table."""
        others = f"run_id != {_quote(run_id)}"
        names = ["episodes", *self._tables_of("episodes")]
        return sum(table.count_rows(others) for name in names if (table := self._open_if_there(name)) is not None)

    def tables(self, run_id: str, *, after: int = 0) -> list[str]:
        """Returns the names of the tables that hold rows of this run.

        Args: after: of iterations after this one only, and of iteration 0, to which any later moment may add.
        """
        names = [name for kind in KEYS for name in self._tables_of(kind, run_id=run_id)]
        names = [name for name in names if not 0 < iteration_of_table(name) <= after]
        # A process that died while it made a table leaves a folder without a version, which the next writer completes.
        names = [name for name in names if self._open_if_there(name) is not None]
        return [*names, *(kind for kind in KEYS if self._has_rows(kind))]

    def compact(self, *, drop_before: Mapping[str, int], margin_s: float = 60.0) -> None:
        """Merges small files, and drops versions that are older than these and than every tagged one.

        It is safe beside writers, and beside readers of these versions and of all later ones.

        Args:
            drop_before: version by table: these tables are compacted; 0 keeps every version.
            margin_s: versions that are this much older than the oldest kept one stay, too. Lance takes an age, not a
                version, and counts it from a moment that is a little later than the one at which the age is looked up.
        """
        for name, first in drop_before.items():
            table = self._open(name)
            # Merging takes long: it is done first, so that the ages below are still right when versions are dropped.
            _optimize(table, cleanup_older_than=FOR_EVER)
            ages = {v["version"]: _age(v["timestamp"]) for v in table.list_versions()}
            first_kept = min((v for v in ages if v >= first), default=table.version)
            kept_versions = {first_kept, *(tag["version"] for tag in table.tags.list().values())}
            oldest = max(ages.get(version, FOR_EVER) for version in kept_versions)
            _optimize(table, cleanup_older_than=oldest + timedelta(seconds=margin_s))

    def newest_versions(self, tables: Iterable[str] | None = None) -> dict[str, int]:
        """Returns the newest version by table, of these tables or of all."""
        opened = {name: self._open_if_there(name) for name in (self._all_tables() if tables is None else tables)}
        return {name: table.version for name, table in opened.items() if table is not None}

    def num_versions(self, tables: Iterable[str]) -> int:
        """Counts the versions that these tables keep."""
        return sum(len(self._open(name).list_versions()) for name in tables)

    def move_pins(self, refs: Iterable[TracesRef | RewardsRef], *, is_dry_run: bool = False) -> int:
        """Moves the tags of refs to the newest version, so that older versions can be dropped; returns how many moved.

        A ref stays readable and sees the same rows: rows are never changed, and a tag is not moved if rows of its key were
        added since.
        """
        num_moved = 0
        opened: dict[str, tuple[Table, Mapping[str, Any]] | None] = {}
        for ref in refs:
            name = self._place(_kind_of(ref), ref.run_id, ref.iteration)
            if name not in opened:
                table = self._open_if_there(name)
                opened[name] = None if table is None else (table, table.tags.list())
            if (found := opened[name]) is None:
                continue
            newest, tags = found
            pinned = tags.get(ref.tag)
            if pinned is None or pinned["version"] >= newest.version:
                continue
            if self._open_pinned(ref).count_rows(_where_of(ref)) == newest.count_rows(_where_of(ref)):
                num_moved += 1
                if not is_dry_run:
                    newest.tags.update(ref.tag, newest.version)
        return num_moved

    def stray_pins(
        self, run_id: str, known: Collection[str], *, older_than_s: float, tables: Iterable[str]
    ) -> dict[str, str]:
        """Returns table by tag: the tags of this run that no ref in `known` names and that are older than this.

        They were created by stages that died before their ref was recorded, or by hand.
        """
        purposes = "|".join(p.value for p in Purpose)
        pattern = re.compile(rf"{re.escape(plain(run_id))}-it\d+-({purposes})-")
        strays = {}
        for name in tables:
            table = self._open(name)
            ages = {v["version"]: _age(v["timestamp"]) for v in table.list_versions()}
            for tag, pinned in table.tags.list().items():
                is_old = ages.get(pinned["version"], FOR_EVER) > timedelta(seconds=older_than_s)
                if pattern.match(tag) and tag not in known and is_old:
                    strays[tag] = name
        return strays

    def drop_pins(self, tables: Mapping[str, str]) -> None:
        """Removes tags, given with their tables."""
        for tag, name in tables.items():
            self._open(name).tags.delete(tag)

    def completions_of(self, episode_ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Returns by episode the texts of its completions, in order; reads the turns, so ask for few."""
        hints = {hinted_iteration(episode_id) for episode_id in episode_ids}
        where = f"episode_id IN ({quoted(episode_ids)})"
        return {
            row["episode_id"]: tuple(turn["completion_text"] for turn in row["turns"])
            for iteration in hints
            for place in self._places("episodes", iteration=iteration)
            for row in self._scan(place, where, ["episode_id", "turns"]).to_pylist()
        }

    # ---- which table

    def _place(self, kind: str, run_id: str, iteration: int) -> str:
        """Names the table that holds this iteration's rows, whether it is there or not."""
        if self._has_rows(kind) and self._open(kind).count_rows(_where(run_id=run_id, iteration=iteration)):
            return kind
        return table_name(kind, run_id, iteration)

    def _places(self, kind: str, *, run_id: str | None = None, iteration: int | None = None) -> list[str]:
        """Names the tables that may hold such rows, those of later iterations first."""
        if run_id is not None and iteration is not None:
            return [self._place(kind, run_id, iteration)]
        names = self._tables_of(kind, run_id=run_id)
        names = [name for name in names if iteration is None or iteration_of_table(name) == iteration]
        return sorted(names, key=iteration_of_table, reverse=True) + ([kind] if self._has_rows(kind) else [])

    def _hinted(self, kind: str, episode_id: str, run_id: str | None) -> list[str]:
        """Names the tables of the iteration that the id begins with."""
        hinted = hinted_iteration(episode_id)
        return [] if hinted is None else self._places(kind, run_id=run_id, iteration=hinted)

    def _has_rows(self, kind: str) -> bool:
        """Says whether the table that is made with the store has rows, those of an earlier version."""
        if kind not in self._is_of_earlier_version:
            table = self._open_if_there(kind)
            if table is None:
                return False
            self._is_of_earlier_version[kind] = table.count_rows() > 0
        return self._is_of_earlier_version[kind]

    def _tables_of(self, kind: str, *, run_id: str | None = None) -> list[str]:
        """Names the tables of iterations, of this run or of all."""
        return [name for name in self._all_tables() if is_table_of(name, kind, run_id)]

    def _all_tables(self) -> list[str]:
        names: list[str] = []
        page = self._connect().list_tables(limit=PAGE)
        while True:
            names += page.tables
            if not page.page_token:
                return names
            page = self._connect().list_tables(page_token=page.page_token, limit=PAGE)

    # ---- rows of a table that may not be there

    def _batches(self, place: str, where: str, *, limit: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yields whole episode rows of a table; none where it is not there."""
        table = self._open_if_there(place)
        if table is not None:
            query = table.search().select(_names(table))
            query = query.where(where) if where else query
            yield from (query if limit is None else query.limit(limit)).to_batches(256)

    def _scan(self, place: str, where: str, columns: Sequence[str]) -> pa.Table:
        """Returns these columns of the matching rows; no row where the table is not there."""
        table = self._open_if_there(place)
        if table is None:
            schema = self.schemas[place.partition(".")[0]]
            return pa.schema([schema.field(name) for name in columns]).empty_table()
        query = table.search().select(list(columns))
        return (query.where(where) if where else query).to_arrow()

    def _listed(self, place: str, ids: Sequence[str]) -> list[dict[str, Any]]:
        """Returns the rows of these episodes without turns, in this order."""
        if not ids:
            return []
        table = self._open(place)
        names = [name for name in rows.LISTED if name in table.schema.names]
        query = table.search().where(f"episode_id IN ({quoted(ids)})").select(names)
        rows_by_id = {row["episode_id"]: row for row in query.to_list()}
        return [rows_by_id[i] for i in ids]

    def _find(self, where: str, *, limit: int, places: Sequence[str] = ("episodes",)) -> list[Trace]:
        traces: list[Trace] = []
        for place in places:
            for batch in self._batches(place, where, limit=limit - len(traces)):
                traces += rows.traces_of(batch)
            if len(traces) >= limit:
                break
        return traces

    def _find_by_id(self, episode_id: str, places: Sequence[str]) -> list[Trace]:
        """Returns the episode of this id, or else some of those whose ids begin with it."""
        traces = self._find(_where(episode_id=episode_id), limit=1, places=places)
        if not traces and episode_id:
            traces = self._find(f"starts_with(episode_id, {_quote(episode_id)})", limit=3, places=places)
        return traces

    def _insert(
        self, kind: str, table: pa.Table, *, run_id: str, iteration: int, replaced: Sequence[Cause] = ()
    ) -> int:
        place = self._open_or_create(self._place(kind, run_id, iteration), self.schemas[kind])
        # Without `use_index(False)` a merge looks keys up in an index that does not know rows of concurrent commits yet.
        merge = place.merge_insert(KEYS[kind]).use_index(False).when_not_matched_insert_all()
        if replaced:
            merge = merge.when_matched_update_all(where=f"target.cause IN ({quoted(replaced)})")
        return merge.execute(table, timeout=timedelta(minutes=5)).num_inserted_rows

    def _check_schema(self, name: str, table: Table, schema: pa.Schema) -> None:
        stored = table.schema
        other = [f.name for f in schema if f.name not in stored.names or stored.field(f.name).type != f.type]
        if other:
            raise ValueError(
                f"table {name} in {self.uri} was made by another version of Troupe (its columns {', '.join(other)} differ): "
                "it can be read, but nothing can be added to it; give the run a storage.root of its own"
            )

    def _connect(self) -> DBConnection:
        if self._connection is None or self._connection[0] != os.getpid():
            import lancedb

            self._connection = (os.getpid(), lancedb.connect(self.uri, storage_options=lancedb_options(self.uri)))
        return self._connection[1]

    def _open_if_there(self, name: str) -> Table | None:
        try:
            return self._open(name)
        except ValueError as error:
            if "not found" not in str(error):
                raise
            return None

    def _open_or_create(self, name: str, schema: pa.Schema) -> Table:
        """Opens the table, which is made if it is not there; several processes of a machine may do that at once.

        LanceDB lets two processes make the same table, and the later one empties it: `begin` makes the tables before
        processes of several machines write to them.
        """
        table = self._open_if_there(name)
        if table is not None:
            return table
        with self._one_at_a_time():
            try:
                return self._connect().create_table(name, schema=schema)
            except ValueError as error:
                if "already exists" not in str(error):
                    raise
                return self._open(name)

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

    def _open(self, name: str) -> Table:
        """Opens the table at its newest version."""
        return self._connect().open_table(name)

    def _open_pinned(self, ref: TracesRef | RewardsRef) -> Table:
        """Opens the table at the version that `ref` pins."""
        table = self._open_if_there(self._place(_kind_of(ref), ref.run_id, ref.iteration))
        tagged = None if table is None else table.tags.list().get(ref.tag)
        # a later version is right: `move_pins` moved the tag
        if table is None or tagged is None or tagged["version"] < ref.version:
            state = f"is at version {tagged['version']}" if tagged else "does not exist"
            raise ValueError(
                f"{ref.tag} at version {ref.version} was pinned in {ref.uri}, but the tag {state} in {self.uri}: "
                "open the store that the ref names, or run the stage that pinned it again"
            )
        table.checkout(tagged["version"])
        return table


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


def _pin(table: Table, count: int, *parts: str) -> tuple[str, int]:
    """Creates the tag of these rows, or takes the one that another process created first; returns tag and version."""
    digest = sha256("\x1f".join(parts).encode()).hexdigest()[:8]
    tag = plain("-".join((*parts, f"n{count}", digest)))
    try:
        table.tags.create(tag, table.version)
    except RuntimeError as error:
        if "already exists" not in str(error):
            raise
    return tag, table.tags.get_version(tag)


def _kind_of(ref: TracesRef | RewardsRef) -> str:
    return "episodes" if isinstance(ref, TracesRef) else "rewards"


def _count_unique(table: Table, key: str, where: str) -> int:
    """Counts rows; ValueError if a key is there twice, which the merges of `_insert` exclude."""
    values = _column(table, key, where)
    count = len(values)
    unique = pc.count_distinct(values).as_py()
    if count != unique:
        raise ValueError(f"{count} rows but {unique} different {key} where {where}: the table must not be trained on")
    return count


def _column(table: Table, name: str, where: str) -> pa.ChunkedArray:
    return table.search().where(where).select([name]).to_arrow()[name]


def _by_iteration(records: Iterable[R]) -> dict[tuple[str, int], list[R]]:
    """Groups records by run and iteration, which name their table."""
    groups: dict[tuple[str, int], list[R]] = {}
    for record in records:
        groups.setdefault((record.run_id, record.iteration), []).append(record)
    return groups


def _where_of(ref: TracesRef | RewardsRef) -> str:
    key: dict[str, Any] = {"run_id": ref.run_id, "iteration": ref.iteration, "purpose": ref.purpose}
    if isinstance(ref, RewardsRef):
        return _where(**key, credit_version=ref.credit_version)
    return _where(**key, team_key=ref.team_key) + _without(ref.excluded_groups)


def _without(groups: Sequence[str]) -> str:
    return f" AND group_id NOT IN ({quoted(groups)})" if groups else ""


def _with_status(statuses: Sequence[EpisodeStatus] | None) -> str:
    if statuses is None:
        return ""
    return f" AND status IN ({quoted(statuses)})" if statuses else " AND false"


def _played_by(policy_versions: Mapping[str, int]) -> list[str]:
    """Returns an SQL condition per model group: the column is a JSON object, in whose order the groups stand as written."""
    entries = [f"{json.dumps(group, ensure_ascii=False)}: {version}" for group, version in policy_versions.items()]
    return [
        f"(contains(policy_versions, {_quote(f'{entry},')}) OR contains(policy_versions, {_quote(entry + '}')}))"
        for entry in entries
    ]


def _with_cause(causes: Sequence[Cause] | None, table: Table) -> str:
    """Returns SQL for the episodes with these causes; a table of an earlier version knows statuses only."""
    if causes is None:
        return ""
    if "cause" not in table.schema.names:
        assert tuple(causes) == COUNTED, "the only causes that statuses tell"
        return _with_status(SOUND)
    return f" AND cause IN ({quoted(causes)})" if causes else " AND false"


def _names(table: Table) -> list[str]:
    """Returns the columns of an episode that a table has: one of an earlier version lacks the later ones."""
    there = set(table.schema.names)
    return [name for name in rows.EPISODES.names if name in there]


def _where(**equals: str | int | None) -> str:
    """Returns SQL for the conjunction of the values that are not None."""
    return " AND ".join(f"{name} = {_quote(value)}" for name, value in equals.items() if value is not None)


def _quote(value: str | int) -> str:
    return str(value) if isinstance(value, int) else "'" + str(value).replace("'", "''") + "'"


def quoted(values: Sequence[str]) -> str:
    """Returns values as SQL literals, separated by commas."""
    return ", ".join(_quote(value) for value in values)


def _age(timestamp: datetime) -> timedelta:
    aware = timestamp if timestamp.tzinfo else timestamp.astimezone(UTC)
    return datetime.now(UTC) - aware

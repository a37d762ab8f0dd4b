"""lookup: finds stored episodes and what they were credited with, by their properties and pinned or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import pyarrow as pa
import pyarrow.compute as pc

from stores.traces import rows
from stores.traces.tables import TraceTables, equals, has_tag, literal, played_by, quoted
from stores.types import EpisodeRewards, EpisodeStatus, Purpose, Trace, hinted_iteration

TIMED = ("started_at", "duration_s", "turns", "tool_calls")
"""The columns that say when an episode's events were."""
EPISODE, TURN, TOOL_CALL = "episode", "turn", "tool_call"
EVENT_TIMES = pa.schema(
    [("kind", pa.string()), ("name", pa.string()), ("start_s", pa.float64()), ("end_s", pa.float64())]
)


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


class TraceLookup:
    """The part of a trace store that finds episodes; `TraceStore` is the whole."""

    uri: str
    _tables: TraceTables

    def get_trace(self, episode_id: str, *, run_id: str | None = None) -> Trace:
        """Returns the episode with this id, or with the only id that starts with it.

        The iteration that the id begins with is looked at first. Only what is not there, such as an id of other software or
        fewer than four characters, is looked for in every iteration.

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

    def newest_episodes(self, *, limit: int, before: str = "", **asked: Unpack[Asked]) -> list[dict[str, Any]]:
        """Returns at most `limit` stored episodes with these properties as rows without turns.

        The newest iteration comes first, and in an iteration the episode that began last. The list is empty where nothing was
        ever stored. Of each iteration that the page reaches, the ids and times of the matching episodes are read, and the
        other columns only of those that are returned.

        Args: before: only those that come after this episode in the same list; ValueError where it is not in the list.
        """
        where, names = self._asked(asked)
        if before:
            here = " AND ".join(filter(None, (where, equals(episode_id=before))))
            likely = self._tables.hinted_names("episodes", before, asked.get("run_id"))
            ordered = [*(name for name in likely if name in names), *names]
            holder = next((n for n in ordered if self._newest_ids(n, here, asked.get("outcomes"))), None)
            if holder is None:
                raise ValueError(f"episode {before!r} is not in this list: begin without it")
            names = names[names.index(holder) :]
        page: list[dict[str, Any]] = []
        for name in names:
            ids = self._newest_ids(name, where, asked.get("outcomes"))
            ids = ids[ids.index(before) + 1 :] if before and name == names[0] else ids
            page += self._listed(name, ids[: limit - len(page)])
            if len(page) == limit:
                break
        return page

    def count_episodes(self, **asked: Unpack[Asked]) -> int:
        """Counts the episodes that `newest_episodes` lists without a limit."""
        where, names = self._asked(asked)
        return sum(len(self._newest_ids(name, where, asked.get("outcomes"))) for name in names)

    def count_others(self, run_id: str) -> int:
        """Counts the stored episodes of other runs; it opens every table."""
        others = f"run_id != {literal(run_id)}"
        opened = (self._tables.open_if_there(name) for name in self._tables.names_for("episodes"))
        return sum(table.count_rows(others) for table in opened if table is not None)

    def outcomes_of(self, episodes: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
        """Returns the outcomes by episode and credit version; episodes that were never credited are left out.

        Args: episodes: rows with `episode_id`, `run_id` and `iteration`, as those of `newest_episodes`.
        """
        ids: dict[str, list[str]] = {}
        for row in episodes:
            name = self._tables.name_for("rewards", row["run_id"], row["iteration"])
            ids.setdefault(name, []).append(row["episode_id"])
        outcomes: dict[str, dict[str, float]] = {}
        columns = ["episode_id", "credit_version", "outcome"]
        for name, own in ids.items():
            for row in self._tables.scan(name, f"episode_id IN ({quoted(own)})", columns).to_pylist():
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
        for name in names:
            batches = self._tables.batches(name, equals(episode_id=episode_id), rows.REWARDS.names)
            if found := [reward for batch in batches for reward in rows.rewards_of(batch)]:
                return sorted(found, key=lambda r: r.credit_version)
        return []

    def completions_of(self, episode_ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Returns by episode the texts of its completions, in order; reads the turns, so ask for few."""
        where = f"episode_id IN ({quoted(episode_ids)})"
        return {
            row["episode_id"]: tuple(turn["completion_text"] for turn in row["turns"])
            for iteration in {hinted_iteration(episode_id) for episode_id in episode_ids}
            for name in self._tables.names_for("episodes", iteration=iteration)
            for row in self._tables.scan(name, where, ["episode_id", "turns"]).to_pylist()
        }

    def event_times(self, *, run_id: str, iteration: int, since: float, until: float) -> pa.Table:
        """Returns when the stored episodes of an iteration, their turns and their tool calls began and ended.

        There is a row {kind, name, start_s, end_s} per event, in Unix seconds by the clock of the machine that played it. The
        kind is `episode`, `turn` or `tool_call`; the name is that of the turn's model group or of the tool, empty for an
        episode. There is no row where nothing is stored. The turns are read whole, since LanceDB reads no part of a nested
        column, but 256 episodes at a time.

        Args: since, until: only episodes of which a part lies between these Unix seconds.
        """
        name = self._tables.name_for("episodes", run_id, iteration)
        where = f"{equals(run_id=run_id, iteration=iteration)} AND started_at < {until} AND started_at + duration_s > {since}"
        batches = self._tables.batches(name, where, TIMED)
        return pa.concat_tables([EVENT_TIMES.empty_table(), *(part for batch in batches for part in _times(batch))])

    def _asked(self, asked: Asked) -> tuple[str, list[str]]:
        """Returns the condition, but for the outcomes, and the tables that may hold such episodes."""
        columns = equals(**{name: value for name, value in asked.items() if name not in ("agent", "outcomes")})  # type: ignore[arg-type]
        agent = asked.get("agent")
        names = self._tables.names_for("episodes", run_id=asked.get("run_id"), iteration=asked.get("iteration"))
        return " AND ".join(filter(None, [columns, "" if agent is None else has_tag("agents", agent)])), names

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
        found = self._tables.scan(name, f"episode_id IN ({quoted(ids)})", rows.LISTED).to_pylist()
        rows_by_id = {row["episode_id"]: row for row in found}
        return [rows_by_id[i] for i in ids if i in rows_by_id]  # others were removed meanwhile

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


def _times(batch: pa.RecordBatch) -> Iterator[pa.Table]:
    """Yields the `EVENT_TIMES` of episodes, of their turns and of their calls: whole columns at once, and no token is converted."""
    began = batch["started_at"]
    yield _timed(EPISODE, pa.array([""] * len(began), pa.string()), began, batch["duration_s"])
    for kind, name, events in ((TURN, "model_group", batch["turns"]), (TOOL_CALL, "tool", batch["tool_calls"])):
        each = pc.list_flatten(events)
        of_episode = began.take(pc.list_parent_indices(events))
        start = pc.add(of_episode, pc.struct_field(each, "start_s"))
        yield _timed(kind, pc.struct_field(each, name), start, pc.struct_field(each, "duration_s"))


def _timed(kind: str, name: pa.Array, start_s: pa.Array, duration_s: pa.Array) -> pa.Table:
    kinds = pa.array([kind] * len(start_s), pa.string())
    return pa.Table.from_arrays([kinds, name, start_s, pc.add(start_s, duration_s)], schema=EVENT_TIMES)

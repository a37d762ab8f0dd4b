"""maintain: what a run has stored -> the same, without what nothing needs any more.

    traces       small files merged; table versions dropped that no tag needs. Tags of old iterations move to the newest
                 version, which holds the same rows: the ref of every finished stage stays readable
    weights      versions of old iterations dropped, but no champion, no team with an alias, no parent, no version 0;
                 and what killed commits left
    checkpoints  those of dropped versions, and of tries that were never committed
    cache        this machine's copies of remote versions, all but the last used

Safe while the run goes on: what a stage may read now is newer than what is removed, and a table version is removed one
maintenance after it was replaced, so that its readers can finish. Two maintenances of a run at once are one: the second waits.

On a full disk weights, checkpoints and copies go first, since that takes no room; to merge files and drop table versions takes some.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.cluster.owner_links import stage_owner
from pipelines.run.kept_weights import checkpoint_files, is_of, maintained_versions, needed_checkpoints, weight_names
from pipelines.run.run import Run, absolute
from stores.files import list_files, remove_folder
from stores.journal.journal import DONE, RUNNING, StageKey, StageRow
from stores.journal.stage_results import Decided
from stores.logs import bound
from stores.traces.tables import iteration_of_table
from stores.types import Purpose, RewardsRef, TracesRef
from stores.weights.weight_cache import copies_folder, evict

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What may be removed; everything is decided before anything is."""

    last_old: int
    """Iterations up to this one are old."""
    settled: int
    """Iterations up to this one are left alone: earlier maintenances have done all that there is to do in their tables."""
    tables: list[str]
    """Tables of the trace store that are looked at."""
    old_refs: list[TracesRef | RewardsRef]
    stray_tags: dict[str, str]
    """Table by tag."""
    versions: dict[str, list[int]]
    """Model versions by model group."""
    leftovers: dict[str, int]
    """Bytes by folder."""
    checkpoints: dict[str, int]
    """Bytes by folder."""


def maintain(run: Run, *, is_dry_run: bool = False) -> dict[str, Any]:
    """Removes what nothing needs any more and reports what that did and freed, in JSON values; the journal keeps it.

    A dry run changes nothing and reports what would be removed. Raises OSError where the disk is so full that nothing of the
    run could make room for the rest.
    """
    if is_dry_run:
        return _report(run, plan(run))
    with bound(run=run.run_id, stage="maintain"):
        try:
            return _maintain(run)
        except OSError as error:
            if error.errno != errno.ENOSPC or not (freed := _make_room(run)):
                raise
            logger.warning("%s: disk full; freed %s first", error.filename, _megabytes(freed))
            return _maintain(run)


def described(report: Mapping[str, Any]) -> list[str]:
    """Describes what a maintenance did, or would do, in lines for a person."""
    traces, weights, checkpoints = (report[part] for part in ("traces", "weights", "checkpoints"))
    stores = ""
    if not report["is_dry_run"]:
        (versions_before, versions), (before, after) = traces["versions"], traces["bytes"]
        stores = f"; {versions_before} -> {versions} versions, {_megabytes(before)} -> {_megabytes(after)}"
        stores += " (what was replaced now goes next time)" if after > before else ""
    gone = ", ".join(weights["removed"]) or "none"
    did = "would free" if report["is_dry_run"] else "freed"
    return [
        f"traces: {traces['tags_moved']} tags moved, {len(traces['tags_dropped'])} dropped{stores}",
        f"weights: {gone} removed, {len(weights['leftovers'])} leftovers, {did} {_megabytes(weights['freed_bytes'])}",
        f"checkpoints: {checkpoints['removed']} removed, {did} {_megabytes(checkpoints['freed_bytes'])}",
        f"copies on this machine: {did} {_megabytes(report['cache']['freed_bytes'])}",
    ]


def plan(run: Run) -> Plan:
    """What a maintenance would remove now."""
    settings = run.config.maintain
    before = _last_maintenance(run)
    settled = 0 if before is None or before.ref is None else int(before.ref.get("settled", 0))
    tables = run.traces.tables(run.run_id, after=settled)
    rows = run.journal.stages(run.run_id)
    last_old = _last_old(rows, settings.keep_iterations, run.config.loop.max_lag)
    known = list(_refs(rows))
    kept = maintained_versions(run, rows, last_old)
    older_than_s = settings.leftover_hours * 3600
    tags = {ref.tag for ref in known}
    # A run that is trained on another one's traces pins rows in that one's tables.
    pinned_in = [*tables, *run.traces.tables_with(ref for ref in known if ref.run_id != run.run_id)]
    is_busy = any(map(_is_worked_on, rows))  # its tag may be of an old version, and its ref not kept yet
    newest = {group: max(versions, default=0) for group, versions in kept.items()}
    dropped = {
        group: [v for v in run.weights.versions(group) if v not in versions and v < newest[group]]
        for group, versions in kept.items()
    }
    mine = {group: [v for v in versions if is_of(run, group, v)] for group, versions in dropped.items()}
    return Plan(
        last_old=last_old,
        settled=settled,
        tables=tables,
        old_refs=[ref for ref in known if ref.iteration <= last_old and not 0 < ref.iteration <= settled],
        stray_tags={}
        if is_busy
        else run.traces.stray_pins(run.run_id, tags, older_than_s=older_than_s, tables=pinned_in),
        versions={group: versions for group, versions in mine.items() if versions},
        leftovers={
            folder: size
            for group in weight_names(run)
            for folder, size in run.weights.leftovers(group, older_than_s=older_than_s).items()
        },
        checkpoints=_checkpoints(run, kept, older_than_s=older_than_s),
    )


def _journal_name(run: Run) -> str:
    """Names where maintenances are kept: beside the run's own stages, which others list."""
    return f"{run.run_id}/maintain"


def _last_maintenance(run: Run) -> StageRow | None:
    done = [row for row in run.journal.stages(_journal_name(run)) if row.status == DONE]
    return done[-1] if done else None


def _maintain(run: Run) -> dict[str, Any]:
    run.traces.create()
    before = _last_maintenance(run)
    key = StageKey(_journal_name(run), 0 if before is None else before.iteration + 1, "maintain")
    return run.journal.once(key, lambda lease: _work(run, before), owner=stage_owner())


def _make_room(run: Run) -> int:
    """Removes what takes no room to remove, without the lease, for which there is none; returns the bytes.

    Whatever it removes another maintenance may be removing at the same time: each removal can be done twice.
    """
    reading = Run(run.config, is_read_only=True)  # not even the files that a journal needs to be opened find room
    chosen = plan(reading)
    freed = sum(_report(reading, chosen)[part]["freed_bytes"] for part in ("weights", "checkpoints"))
    return int(freed + _remove(reading, chosen))


def _remove(run: Run, chosen: Plan) -> int:
    """Removes weights, checkpoints and leftovers that were chosen, and this machine's copies; returns the bytes of the copies."""
    for folder in chosen.checkpoints:
        remove_folder(folder, keeps_folder=True)  # Ray Train may know it, and fails where it is gone
    for folder in chosen.leftovers:
        remove_folder(folder)
    rows = run.journal.stages(run.run_id)
    kept = maintained_versions(run, rows, chosen.last_old)  # somebody may have promoted since the plan
    for group, versions in chosen.versions.items():
        for version in set(versions) - kept[group]:
            run.weights.remove(group, version)
    return sum(evict(copy) for copy in copies_folder().glob("*"))


def _work(run: Run, before: StageRow | None) -> dict[str, Any]:
    chosen = plan(run)
    report = _report(run, chosen)
    report["cache"]["freed_bytes"] = _remove(run, chosen)
    traces, size_before = run.traces, _size(run.traces_uri)
    num_before = traces.num_versions(chosen.tables)
    is_settled = before is not None and (before.ended_at or 0) < time.time() - run.config.maintain.reader_grace_s
    drop_before = before.ref["newest"] if is_settled and before is not None and before.ref is not None else {}
    rows = run.journal.stages(run.run_id)
    # A stage that somebody went on with since the plan has taken the tag that it had.
    known = {ref.tag for ref in _refs(rows)}
    stray = (
        {} if any(map(_is_worked_on, rows)) else {tag: at for tag, at in chosen.stray_tags.items() if tag not in known}
    )
    traces.drop_pins(stray)
    margin_s = min(60.0, max(1.0, run.config.maintain.reader_grace_s))
    try:
        traces.compact(drop_before={name: drop_before.get(name, 0) for name in chosen.tables}, margin_s=margin_s)
    except OSError as error:
        logger.warning(
            "%s is not merged: %s; weights, checkpoints and copies are removed", error.filename, error.strerror
        )
        raise
    report["traces"] |= {"tags_moved": traces.move_pins(chosen.old_refs), "tags_dropped": sorted(stray)}
    num_versions = traces.num_versions(chosen.tables)
    report["traces"] |= {"versions": [num_before, num_versions], "bytes": [size_before, _size(run.traces_uri)]}
    freed = size_before - report["traces"]["bytes"][1]
    report["freed_bytes"] = freed + sum(report[part]["freed_bytes"] for part in ("weights", "checkpoints", "cache"))
    newest = traces.newest_versions(chosen.tables)
    last_old_before = 0 if before is None or before.ref is None else int(before.ref["last_old_iteration"])
    settled = int(max(chosen.settled, min(last_old_before, _last_calm(newest, drop_before))))
    return report | {"is_dry_run": False, "newest": newest, "settled": settled}


def _last_calm(newest: Mapping[str, int], newest_before: Mapping[str, int]) -> float:
    """Returns up to which iteration no table has changed since the last maintenance: what that one replaced is dropped."""
    changed = {iteration_of_table(name) for name, version in newest.items() if newest_before.get(name) != version}
    return min((number - 1 for number in changed if number > 0), default=math.inf)


def _report(run: Run, chosen: Plan) -> dict[str, Any]:
    """What would be done."""
    versions = {
        f"{group} v{version}": _size(run.weights.uri_of(group, version))
        for group, numbers in chosen.versions.items()
        for version in numbers
    }
    return {
        "run": run.run_id,
        "is_dry_run": True,
        "last_old_iteration": chosen.last_old,
        "traces": {
            "tags_moved": run.traces.move_pins(chosen.old_refs, is_dry_run=True),
            "tags_dropped": sorted(chosen.stray_tags),
        },
        "weights": {
            "removed": sorted(versions),
            "leftovers": sorted(chosen.leftovers),
            "freed_bytes": sum(versions.values()) + sum(chosen.leftovers.values()),
        },
        "checkpoints": {"removed": len(chosen.checkpoints), "freed_bytes": sum(chosen.checkpoints.values())},
        "cache": {"freed_bytes": 0},
    }


def _is_worked_on(row: StageRow) -> bool:
    """Whether somebody is at a stage; a killed process leaves its row as it was, with a lease that has ended."""
    return row.status == RUNNING and not row.is_free


def _last_old(rows: list[StageRow], keep_iterations: int, max_lag: int) -> int:
    """The newest iteration that is old; nothing is from `max_lag` iterations before an unfinished stage's on."""
    finished = max((row.iteration for row in rows if row.stage == Decided.STAGE and row.status == DONE), default=0)
    busy = min((row.iteration for row in rows if _is_worked_on(row)), default=finished + 1)
    return min(finished - keep_iterations, busy - 1) - max_lag


def _refs(rows: list[StageRow]) -> Iterator[TracesRef | RewardsRef]:
    """Every pinned set of rows that a finished stage refers to."""

    def find(value: Any) -> Iterator[TracesRef | RewardsRef]:
        if isinstance(value, list):
            yield from (ref for item in value for ref in find(item))
        elif isinstance(value, dict):
            if value.get("tag") and "num_episodes" in value:
                data = {**value, "purpose": Purpose(value["purpose"])}
                yield RewardsRef(**data) if "credit_version" in value else TracesRef(**data)
            else:
                yield from (ref for item in value.values() for ref in find(item))

    for row in rows:
        if row.status == DONE:
            yield from find(row.ref)


def _checkpoints(run: Run, kept: Mapping[str, set[int]], *, older_than_s: float) -> dict[str, int]:
    """Bytes by folder of the training states that no kept version resumes from and nobody has changed for so long."""
    # Later ones are committed, but not recorded: a stage that was stopped in between resumes from them.
    later = {group: {v for v in run.weights.versions(group) if v > max(kept[group], default=0)} for group in kept}
    needed = needed_checkpoints(run, {group: versions | later[group] for group, versions in kept.items()})
    limit = time.time() - older_than_s
    return {
        folder: sum(file.size_bytes for file in files)
        for folder, files in checkpoint_files(run).items()
        if absolute(folder) not in needed and max(file.changed_at for file in files) < limit
    }


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


def _size(uri: str) -> int:
    return sum(file.size_bytes for file in list_files(uri))

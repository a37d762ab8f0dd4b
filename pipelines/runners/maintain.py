"""maintain: what a run keeps -> the same, without what nobody needs any more.

    traces       small files merged; table versions dropped that no tag needs. Tags of old iterations move to the newest
                 version, which holds the same rows: the ref of every finished stage stays readable
    weights      versions of old iterations dropped, but no champion, no team with an alias, no parent, no version 0;
                 and what killed commits left
    checkpoints  those of dropped versions, and of tries that were never committed
    cache        this machine's copies of remote versions, all but the last used

Safe while the run goes on: what a stage may read now is newer than what goes, and a table version goes one maintenance
after it was replaced, so that who reads it can finish. Two maintenances of a run are one: the second waits for the first.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.cluster.owner_links import stage_owner
from pipelines.run.champions import history
from pipelines.run.run import Run
from stores.files import list_files, remove_folder
from stores.journal import DONE, RUNNING, StageKey, StageRow
from stores.logs import bound
from stores.types import Purpose, RewardsRef, TracesRef
from stores.weight_cache import cache_folder, evict
from train_loops.config import TEAM


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What may go; everything is decided before anything is removed."""

    last_old: int
    """Iterations up to this one are old."""
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
    """Tidies what the run keeps and returns what that did and freed, in JSON values; the journal keeps it.

    A dry run changes nothing and says what would go.
    """
    run.traces.create()
    name = f"{run.run_id}/maintain"  # beside the run's own stages, which others list
    done = [row for row in run.journal.stages(name) if row.status == DONE]
    before = done[-1] if done else None
    if is_dry_run:
        return _report(run, plan(run))
    key = StageKey(name, len(done), "maintain")
    with bound(run=run.run_id, stage="maintain"):
        return run.journal.once(key, lambda lease: _work(run, before), owner=stage_owner())


def described(report: Mapping[str, Any]) -> list[str]:
    """What a maintenance did, or would do, as lines for a person."""
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
    rows = run.journal.stages(run.run_id)
    last_old = _last_old(rows, settings.keep_iterations)
    known = list(_refs(rows))
    kept = kept_versions(run, rows, last_old)
    older_than_s = settings.leftover_hours * 3600
    tags = {ref.tag for ref in known}
    is_busy = any(row.status == RUNNING for row in rows)  # its tag may be of an old version, and its ref not kept yet
    newest = {group: max(versions, default=0) for group, versions in kept.items()}
    dropped = {
        group: [v for v in run.weights.versions(group) if v not in versions and v < newest[group]]
        for group, versions in kept.items()
    }
    mine = {group: [v for v in versions if _is_of(run, group, v)] for group, versions in dropped.items()}
    return Plan(
        last_old=last_old,
        old_refs=[ref for ref in known if ref.iteration <= last_old],
        stray_tags={} if is_busy else run.traces.stray_pins(run.run_id, tags, older_than_s=older_than_s),
        versions={group: versions for group, versions in mine.items() if versions},
        leftovers={
            place: size
            for group in _weight_names(run)
            for place, size in run.weights.leftovers(group, older_than_s=older_than_s).items()
        },
        checkpoints=_checkpoints(run, kept, older_than_s=older_than_s),
    )


def kept_versions(run: Run, rows: list[StageRow], last_old: int) -> dict[str, set[int]]:
    """By model group: versions that recent iterations trained or started from, champions, aliases, parents, and 0."""
    kept: dict[str, set[int]] = {group: {0} for group in _weight_names(run)}

    def keep(versions: Mapping[str, int]) -> None:
        for group in kept.keys() & versions.keys():
            kept[group].add(versions[group])

    for row in rows:
        if row.stage == "train" and row.ref is not None and row.iteration > last_old:
            is_team = "model_groups" in row.ref
            done = {**row.ref["model_groups"], TEAM: row.ref["team"]} if is_team else {row.model_group: row.ref}
            keep({group: ref["model"]["version"] for group, ref in done.items() if ref["model"] is not None})
    champions = {entry["team_version"] for entry in history(run)[-run.config.maintain.keep_champions :]}
    for team in run.registry.versions(run.team_name):
        if team.aliases or team.version in champions:
            keep(team.policy_versions)
    if run.journal.value(run.run_id, "champion") is not None:
        keep({group: ref.version for group, ref in run.champion().items()})
    for group, versions in kept.items():
        refs = [run.weights.ref(group, version) for version in versions]
        versions |= {p for ref in refs if ref is not None and (p := run.weights.manifest(ref).parent) is not None}
    for row in rows:
        if row.stage == "collect" and row.ref is not None and row.iteration > last_old:
            keep(row.ref["policy_versions"])  # what train starts from, though it may be champion no more
    return kept


def _weight_names(run: Run) -> list[str]:
    """Whose versions the run's weight store holds."""
    return [*run.config.model_groups, *([TEAM] if run.config.team_config is not None else [])]


def _work(run: Run, before: StageRow | None) -> dict[str, Any]:
    chosen = plan(run)
    report = _report(run, chosen)
    traces, num_before, size_before = run.traces, run.traces.num_versions(), _size(run.traces_uri)
    is_settled = before is not None and (before.ended_at or 0) < time.time() - run.config.maintain.readers_s
    drop_before = before.ref["newest"] if is_settled and before is not None and before.ref is not None else {}
    traces.drop_pins(chosen.stray_tags)
    margin_s = min(60.0, max(1.0, run.config.maintain.readers_s))
    traces.compact(drop_before=drop_before, margin_s=margin_s)
    report["traces"] |= {"tags_moved": traces.move_pins(chosen.old_refs)}
    report["traces"] |= {"versions": [num_before, traces.num_versions()], "bytes": [size_before, _size(run.traces_uri)]}
    kept = kept_versions(run, run.journal.stages(run.run_id), chosen.last_old)  # somebody may have promoted meanwhile
    for group, versions in chosen.versions.items():
        for version in set(versions) - kept[group]:
            run.weights.remove(group, version)
    for place in chosen.leftovers:
        remove_folder(place)
    for place in chosen.checkpoints:
        remove_folder(place, keeps_folder=True)  # Ray Train may know it, and fails where it is gone
    report["cache"]["freed_bytes"] = sum(evict(folder) for folder in cache_folder().glob("*"))
    freed = size_before - report["traces"]["bytes"][1]
    report["freed_bytes"] = freed + sum(report[part]["freed_bytes"] for part in ("weights", "checkpoints", "cache"))
    return report | {"is_dry_run": False, "newest": traces.newest_versions()}


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


def _last_old(rows: list[StageRow], keep_iterations: int) -> int:
    """The newest iteration that is old; nothing from an unfinished stage's iteration on is."""
    finished = max((row.iteration for row in rows if row.stage == "promote" and row.status == DONE), default=0)
    busy = min((row.iteration for row in rows if row.status == RUNNING), default=finished + 1)
    return min(finished - keep_iterations, busy - 1)


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


def _is_of(run: Run, group: str, version: int) -> bool:
    """Whether this run made the version: weights may be kept in one place for several runs."""
    ref = run.weights.ref(group, version)
    return ref is not None and run.weights.manifest(ref).run_id == run.run_id


def _checkpoints(run: Run, kept: Mapping[str, set[int]], *, older_than_s: float) -> dict[str, int]:
    """Bytes by folder of the training states that no kept version resumes from and nobody has changed for so long."""
    needed = set()
    for group, versions in kept.items():
        refs = [run.weights.ref(group, version) for version in versions]
        needed |= {run.weights.manifest(ref).checkpoint for ref in refs if ref is not None}
    found: dict[str, int] = {}
    changed_at: dict[str, float] = {}
    for group in run.config.model_groups:
        place = f"{run.folder}/checkpoints/{run.run_id}-{group}"
        for file in list_files(place):
            folder, _, rest = file.name.partition("/")
            if rest and re.fullmatch(rf"{re.escape(group)}-v\d+-[0-9a-f]{{8}}", folder):
                name = f"{place}/{folder}"
                found[name] = found.get(name, 0) + file.size_bytes
                changed_at[name] = max(changed_at.get(name, 0.0), file.changed_at)
    limit = time.time() - older_than_s
    return {name: size for name, size in found.items() if name not in needed and changed_at[name] < limit}


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"


def _size(place: str) -> int:
    return sum(file.size_bytes for file in list_files(place))

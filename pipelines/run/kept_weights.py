"""kept_weights: which model versions and checkpoints a run needs -> the others removed when an iteration ends.

    needed   version 0, and the references of KL terms; the newest `maintain.keep_versions`; what the next iteration trains from;
             what a collect that is not trained on yet was sampled with; the last champions; teams with an alias; what deployed apps
             serve or start with
    more     everything else, the oldest first, while weights and checkpoints are above `maintain.weights_limit_gb`

A checkpoint is needed by the newest versions and by what the next iteration may train from, since nothing else is resumed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from pipelines.run.champions import champion_version, history
from pipelines.run.run import Run, absolute
from stores.files import FileEntry, list_files, read_file, remove_folder
from stores.journal.journal import StageRow
from stores.journal.run_values import RunValue
from stores.journal.stage_results import Collected, Decided, Trained, TrainedTeam, result_of
from stores.store_faults import UnreadableStore
from stores.types import ModelVersionRef
from stores.weights.manifest import Manifest
from train_loops.config import TEAM

logger = logging.getLogger(__name__)

STATE_FILE = "serve_apps.json"
"""In the folder of the run that was first on a cluster: the cluster's list of Serve apps."""
DEPLOYED_FILE = "deployed.json"
"""In a run's folder: that list as the run last saw it, and the versions that the run was about to serve."""
Versions = dict[str, set[int]]
"""Version numbers by model group."""


def drop_unneeded(run: Run) -> int:
    """Removes what nothing needs while the run's weights and checkpoints are above the limit; returns the bytes removed.

    Versions of other runs in the same place stay.
    """
    limit_gb = run.config.maintain.weights_limit_gb
    if limit_gb is None:
        return 0
    sizes = version_sizes(run)
    folders = {folder: sum(file.size_bytes for file in files) for folder, files in checkpoint_files(run).items()}
    excess = sum(sizes.values()) + sum(folders.values()) - limit_gb * 1e9
    if excess <= 0:
        return 0
    freed = 0
    kept, resumed = needed_versions(run), resumed_versions(run)
    needed = needed_checkpoints(run, resumed)
    for folder in sorted(folders, key=version_of_checkpoint):
        # A model group's trainer may be writing the checkpoint of a version that is not committed yet.
        is_committed = version_of_checkpoint(folder) <= max(resumed[group_of_checkpoint(folder)], default=0)
        if freed < excess and absolute(folder) not in needed and is_committed:
            remove_folder(folder, keeps_folder=True)  # Ray Train may know it, and fails where it is gone
            freed += folders[folder]
    for group, version in sorted(sizes, key=lambda item: (item[1], item[0])):
        is_old = version not in kept[group] and version < max(kept[group])
        if freed < excess and is_old and is_of(run, group, version):
            freed += run.weights.remove(group, version)
            logger.info("removed version %d of %s, which nothing needs (maintain.weights_limit_gb)", version, group)
    return freed


def needed_versions(run: Run) -> Versions:
    """Returns the versions that stay at the end of an iteration: see the head of this file."""
    kept = resumed_versions(run)
    rows = run.journal.stages(run.run_id)
    _keep(kept, _released(run))
    _keep(kept, _collected(rows, after=_last_trained(rows)))
    _keep(kept, _deployed(run))
    for group, versions in kept.items():
        versions |= {0, *(manifest.reference for manifest in _manifests(run, group, versions))}
    return kept


def resumed_versions(run: Run) -> Versions:
    """Returns the versions that training may go on from: the newest, and the champion where a rejection goes back to it."""
    keep = run.config.maintain.keep_versions
    kept = {group: set(run.weights.versions(group)[-keep:]) for group in weight_names(run)}
    rows = run.journal.stages(run.run_id)
    oldest = _last_trained(rows)
    if max_lag := run.config.loop.max_lag:
        # Iterations are trained before earlier ones have passed the gate, whose versions sample those to come.
        unfinished = _first_undecided(rows)
        oldest = min(oldest, unfinished - max_lag)
        _keep(kept, _pinned_parents(run, rows, max(1, unfinished - max_lag)))
    _keep(kept, _trained(rows, after=oldest - 1))
    if run.config.promote.on_reject == "champion" and champion_version(run) is not None:
        _keep(kept, [{group: ref.version for group, ref in run.champion().items()}])
    return kept


def maintained_versions(run: Run, rows: Sequence[StageRow], last_old: int) -> Versions:
    """Returns the versions that `troupe maintain` keeps: those that recent iterations trained or started from, and parents.

    Args: last_old: the newest iteration that is not recent.
    """
    kept: Versions = {group: {0} for group in weight_names(run)}
    _keep(kept, _trained(rows, after=last_old))
    _keep(kept, _released(run))
    _keep(kept, _pinned_parents(run, rows, max(1, last_old + 1)))
    for group, versions in kept.items():
        manifests = _manifests(run, group, versions)
        versions |= {m.reference for m in manifests} | {m.parent for m in manifests if m.parent is not None}
    _keep(kept, _collected(rows, after=last_old))
    _keep(kept, _deployed(run))
    return kept


def _pinned_parents(run: Run, rows: Sequence[StageRow], first: int) -> list[Mapping[str, int]]:
    """What the iterations from `first` on train from, where the gate has said so and iterations overlap."""
    if not run.config.loop.max_lag:
        return []
    last = _first_undecided(rows) + run.config.loop.max_lag
    names = [RunValue.PARENTS.of(k) for k in range(first, last + 1)]
    return list(run.journal.values(run.run_id, names).values())


def _first_undecided(rows: Sequence[StageRow]) -> int:
    decided = {row.iteration for row in rows if row.stage == Decided.STAGE and row.ref is not None}
    return next(k for k in count(1) if k not in decided)


def weight_names(run: Run) -> list[str]:
    """Names whose versions the run's weight store holds: model groups, and the team's learner where there is one."""
    return [*run.config.model_groups, *([TEAM] if run.config.team_config is not None else [])]


def is_of(run: Run, group: str, version: int) -> bool:
    """Says whether this run made the version: weights may be kept in one place for several runs."""
    ref = run.weights.ref(group, version)
    if ref is None:  # a removal that was killed has left files, but no manifest
        removed = run.weights.removed(group, version)
        return removed is not None and removed[1].run_id == run.run_id
    return run.weights.manifest(ref).run_id == run.run_id


def version_sizes(run: Run) -> dict[tuple[str, int], int]:
    """Returns the bytes by model group and version, of whatever lies in the folders of versions."""
    sizes: dict[tuple[str, int], int] = {}
    for group in weight_names(run):
        for file in list_files(run.weights.uri_of(group, 0).rpartition("/")[0]):
            folder = file.name.partition("/")[0]
            if folder[:1] == "v" and folder[1:].isdigit():
                sizes[group, int(folder[1:])] = sizes.get((group, int(folder[1:])), 0) + file.size_bytes
    return sizes


def checkpoint_files(run: Run) -> dict[str, list[FileEntry]]:
    """Returns the files of every checkpoint of the run, by its folder."""
    files: dict[str, list[FileEntry]] = {}
    for group in run.config.model_groups:
        root = f"{run.folder}/checkpoints/{run.run_id}-{group}"
        for file in list_files(root):
            folder, _, rest = file.name.partition("/")
            if rest and re.fullmatch(rf"{re.escape(group)}-v\d+-[0-9a-f]{{8}}", folder):
                files.setdefault(f"{root}/{folder}", []).append(file)
    return files


def needed_checkpoints(run: Run, versions: Mapping[str, Collection[int]]) -> set[str]:
    """Returns the checkpoints that training from these versions resumes, each as `absolute` makes it of its folder.

    A run's folder that was moved and linked has two names: manifests, and lists of apps, have the one that it had then.
    """
    every = (manifest for group, numbers in versions.items() for manifest in _manifests(run, group, numbers))
    return {absolute(manifest.checkpoint) for manifest in every}


def _manifests(run: Run, group: str, versions: Collection[int]) -> list[Manifest]:
    """Of those that are there."""
    refs = (run.weights.ref(group, version) for version in versions)
    return [run.weights.manifest(ref) for ref in refs if ref is not None]


def group_of_checkpoint(folder: str) -> str:
    """Returns the model group whose training a checkpoint's folder holds."""
    return folder.rpartition("/")[2].rsplit("-", 2)[0]


def version_of_checkpoint(folder: str) -> int:
    """Returns the version whose training a checkpoint's folder holds."""
    return int(folder.rsplit("-", 2)[1].removeprefix("v"))


def _keep(kept: Versions, more: Iterator[Mapping[str, int]] | Sequence[Mapping[str, int]]) -> None:
    for versions in more:
        for group in kept.keys() & versions.keys():
            kept[group].add(versions[group])


def _last_trained(rows: Sequence[StageRow]) -> int:
    return max((row.iteration for row in rows if row.stage == Trained.STAGE and row.ref is not None), default=0)


def _trained(rows: Sequence[StageRow], *, after: int) -> Iterator[Mapping[str, int]]:
    for row in rows:
        if row.stage == Trained.STAGE and row.ref is not None and row.iteration > after:
            yield {group: model.version for group, model in _trained_models(row, row.ref).items()}


def _trained_models(row: StageRow, ref: Mapping[str, Any]) -> dict[str, ModelVersionRef]:
    """The versions that a train stage left, by model group; with the whole team's learner where there is one."""
    match result_of(row.stage, ref):
        case TrainedTeam(team=learner, model_groups=groups):
            models = {group: trained.model for group, trained in groups.items()}
            return models if learner.model is None else {**models, TEAM: learner.model}
        case Trained(model=model):
            return {row.model_group: model}
    raise AssertionError(f"{row.key} is no train stage")


def _collected(rows: Sequence[StageRow], *, after: int) -> Iterator[Mapping[str, int]]:
    """What sampled; without overlap train starts from it, and the champion may be another one by now."""
    for row in rows:
        if row.stage == Collected.STAGE and row.ref is not None and row.iteration > after:
            yield Collected.from_json(row.ref).policy_versions


def _released(run: Run) -> Iterator[Mapping[str, int]]:
    """The last champions, the present one included, and teams with an alias."""
    champions = {entry["team_version"] for entry in history(run)[-run.config.maintain.keep_champions :]}
    for team in run.registry.versions(run.team_name):
        if team.aliases or team.version in champions:
            yield team.policy_versions
    if champion_version(run) is not None:
        yield {group: ref.version for group, ref in run.champion().items()}


def _deployed(run: Run) -> Iterator[Mapping[str, int]]:
    """What the run's apps serve, and what a replica of them loads first when it starts again."""
    files = [f"{run.folder}/{name}" for name in (STATE_FILE, DEPLOYED_FILE)]
    apps = [_parsed(stored, file) for file in files if (stored := read_file(file))]

    def find(value: Any) -> Iterator[Mapping[str, int]]:
        if isinstance(value, list):
            for item in value:
                yield from find(item)
        elif isinstance(value, dict):
            if isinstance(value.get("uri"), str) and isinstance(value.get("version"), int):
                for group in weight_names(run):
                    if absolute(value["uri"]) == absolute(run.weights.uri_of(group, value["version"])):
                        yield {group: value["version"]}
            for item in value.values():
                yield from find(item)

    yield from find(apps)


def _parsed(stored: bytes, file: str) -> Any:
    try:
        return json.loads(stored)
    except ValueError as error:
        raise UnreadableStore(
            f"{file} is damaged, it is no JSON ({error}), so that nobody knows which versions are deployed: put a copy of it back, "
            "or deploy the run's team again"
        ) from None

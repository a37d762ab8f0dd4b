"""pipelines.extensions.maintain on real stores: what finished stages refer to stays readable, the rest goes, and nobody is disturbed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from played_run import GROUP, PROBE, Play
from pyarrow.fs import FileType, LocalFileSystem
from stage_records import collected, finish, trained
from typer.testing import CliRunner

from pipelines.cli.main import app
from pipelines.config.run_config import load_config
from pipelines.extensions.maintain import maintain as maintaining
from pipelines.extensions.maintain.maintain import maintain, plan
from pipelines.report.inspect import export_version
from pipelines.run.kept_weights import (
    DEPLOYED_FILE,
    checkpoint_files,
    drop_unneeded,
    maintained_versions,
    needed_versions,
    version_of_checkpoint,
)
from pipelines.run.run import Run
from stores.files import list_files, open_filesystem, read_file, write_file
from stores.journal.run_values import RunValue
from stores.journal.schema import STAGES
from stores.traces.tables import TraceTables, iteration_of_table, table_name
from stores.types import Purpose, RewardsRef, Trace, TracesRef

pytestmark = pytest.mark.test

SMALL = Path(__file__).parents[3] / "e2e" / "small.yaml"


S3 = pytest.param("s3", marks=[pytest.mark.needs_program("psql"), pytest.mark.nightly])
EVERYWHERE = pytest.mark.parametrize("run", ["local", S3], indirect=True)


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that keeps two iterations and one earlier champion, on this disk, or where a test is for `EVERYWHERE` on S3 and PostgreSQL."""
    place = getattr(request, "param", "local")
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path / "cache"))
    tracking, artifacts = request.getfixturevalue("mlflow_sqlite" if place == "local" else "mlflow_postgres")
    changes: dict[str, Any] = {
        "run": f"kept-{place}-{time.time_ns()}",
        "storage.root": str(tmp_path / "runs") if place == "local" else request.getfixturevalue("s3_uri"),
        "storage.journal": f"sqlite:///{tmp_path}/journal.db",
        "storage.mlflow": tracking,
        "storage.artifacts": artifacts,
        "maintain": {
            "keep_iterations": 2,
            "keep_champions": 1,
            "reader_grace_s": 0,
            "leftover_hours": 1,
            "weights_limit_gb": 0,
        },
    }
    opened = Run(load_config(SMALL, changes))
    opened.open()
    return opened


def refs(run: Run) -> list[TracesRef | RewardsRef]:
    stages = {row.stage: row for row in run.journal.stages(run.run_id)}
    assert stages, "nothing was played"
    found: list[TracesRef | RewardsRef] = []
    for row in run.journal.stages(run.run_id):
        if row.stage == "collect" and row.ref:
            found.append(TracesRef(**row.ref["traces"]))
        if row.stage == "score" and row.ref:
            found.append(RewardsRef(**row.ref["rewards"]))
    return found


def contents(run: Run) -> list[Any]:
    """Everything that finished stages refer to."""
    return [
        sorted(run.traces.read_traces(r), key=lambda t: t.episode_id)
        if isinstance(r, TracesRef)
        else sorted(run.traces.read_rewards(r), key=lambda x: x.episode_id)
        for r in refs(run)
    ]


def size_of(place: str) -> int:
    return sum(file.size_bytes for file in list_files(place))


@EVERYWHERE
def test_what_finished_stages_refer_to_stays_and_the_rest_goes(run: Run, play: Play) -> None:
    played(run, play, 7)
    before, size_before = contents(run), size_of(run.folder)
    leftover = f"{run.weights.uri_of(GROUP, 99)}/model.safetensors"
    write_file(leftover, b"x" * 1000)

    shown = maintain(run, is_dry_run=True)
    assert shown["is_dry_run"] and shown["traces"]["tags_moved"] == 0, "nobody has written to these tables since"
    assert shown["weights"]["removed"] == [f"{GROUP} v1"], "0, champion 4, previous 3, its parent 2, kept 5 and 6"
    assert shown["weights"]["leftovers"] == [] and contents(run) == before
    assert size_of(run.folder) == size_before + 1000

    first = maintain(run)
    assert first["traces"]["tags_moved"] == 4, "those of episodes, whose small files were merged; rewards came at once"
    assert first["weights"]["freed_bytes"] > 100_000
    assert run.weights.versions(GROUP) == [0, 2, 3, 4, 5, 6]
    assert contents(run) == before
    time.sleep(1.5)  # versions a second older than the oldest kept one stay
    play(run, 7)
    play(run, 8)
    before = contents(run)
    second = maintain(run)
    assert second["traces"]["versions"][1] < second["traces"]["versions"][0]
    assert second["traces"]["bytes"][1] < second["traces"]["bytes"][0]
    assert size_of(run.traces_uri) == second["traces"]["bytes"][1]
    assert contents(run) == before
    assert run.weights.versions(GROUP) == [0, 2, 3, 4, 6, 7, 8]
    for version in run.weights.versions(GROUP):
        run.weights.verify(run.weights.ref(GROUP, version))
    assert [row.iteration for row in run.journal.stages(f"{run.run_id}/maintain")] == [0, 1]


@EVERYWHERE
def test_leftovers_go_when_they_are_old(run: Run, play: Play) -> None:
    played(run, play, 2)
    checkpoints = f"{run.folder}/checkpoints/{run.run_id}-{GROUP}"
    for name in (f"{GROUP}-v1-0123abcd/policy.json", "checkpoint_manager_snapshot.json"):
        write_file(f"{checkpoints}/{name}", b"{}")
    write_file(f"{run.weights.uri_of(GROUP, 9)}/try-0123456789ab/model.safetensors", b"x" * 10)
    write_file(f"{run.weights.uri_of(GROUP, 1)}/notes.txt", b"beside a manifest")
    assert plan(run).leftovers == plan(run).checkpoints == {}, "they may belong to somebody who is at it"
    impatient = with_settings(run, leftover_hours=1e-9)
    chosen = plan(impatient)
    assert list(chosen.leftovers.values()) == [10]
    assert list(chosen.checkpoints) == [f"{checkpoints}/{GROUP}-v1-0123abcd"]
    maintain(impatient)
    left = {file.name for file in list_files(run.folder)}
    assert not any("try-0123456789ab" in name or "0123abcd/policy" in name for name in left)
    assert any(name.endswith("checkpoint_manager_snapshot.json") for name in left)
    filesystem, path = open_filesystem(f"{checkpoints}/{GROUP}-v1-0123abcd")
    emptied = (filesystem or LocalFileSystem()).get_file_info(path)
    assert emptied.type is FileType.Directory, "Ray Train may want to remove it"
    assert any(name.endswith(f"{GROUP}-v1-00000001/policy.json") for name in left)
    assert run.weights.versions(GROUP) == [0, 1]


def played(run: Run, play: Play, count: int) -> None:
    for k in range(count):
        play(run, k)


def checkpoints_left(run: Run) -> list[int]:
    return sorted(version_of_checkpoint(folder) for folder in checkpoint_files(run))


def with_settings(run: Run, **changes: Any) -> Run:
    return Run(run.config.model_copy(update={"maintain": run.config.maintain.model_copy(update=changes)}))


@pytest.mark.nightly
@EVERYWHERE
def test_at_the_end_of_an_iteration_only_what_is_needed_stays(run: Run, play: Play) -> None:
    played(run, play, 8)
    assert drop_unneeded(with_settings(run, weights_limit_gb=None)) == 0
    assert drop_unneeded(with_settings(run, weights_limit_gb=1.0)) == 0, "small models keep everything"
    size_before = size_of(run.folder)
    freed = drop_unneeded(run)
    assert size_of(run.weights_uri) + size_of(f"{run.folder}/checkpoints") > 0
    assert freed > 100_000 and size_of(run.folder) < size_before - freed * 0.9
    assert run.weights.versions(GROUP) == [0, 3, 4, 7], "the first, previous and present champion, the newest"
    assert checkpoints_left(run) == [7]
    assert drop_unneeded(run) == 0
    run.weights.verify(run.weights.ref(GROUP, 7))
    assert run.parents(8)[GROUP].version == 7
    play(run, 8)
    drop_unneeded(run)
    assert run.weights.versions(GROUP) == [0, 3, 4, 8] and checkpoints_left(run) == [8]
    assert contents(run), "episodes and rewards stay"


def test_a_checkpoint_that_another_model_group_is_writing_stays(run: Run, play: Play) -> None:
    one = run.config.model_groups[GROUP]
    groups = {GROUP: one, "other": one.model_copy(update={"agents": ("finalizer",)})}
    overlapping = Run(run.config.model_copy(update={"model_groups": groups}))
    played(run, play, 3)
    being_written = f"{run.folder}/checkpoints/{run.run_id}-other/other-v2-0123abcd/policy.safetensors"
    write_file(being_written, b"{}")
    assert drop_unneeded(overlapping) > 0
    assert checkpoints_left(overlapping) == [2, 2] and read_file(being_written) is not None


@pytest.mark.nightly
def test_more_versions_stay_where_the_settings_say_so(run: Run, play: Play) -> None:
    played(run, play, 8)
    size = sum(file.size_bytes for file in list_files(run.weights.uri_of(GROUP, 7)))
    drop_unneeded(with_settings(run, weights_limit_gb=6.5 * size / 1e9))
    assert run.weights.versions(GROUP) == [0, 3, 4, 5, 6, 7], "the oldest go first"
    play(run, 8)
    drop_unneeded(with_settings(run, keep_versions=2))
    assert run.weights.versions(GROUP) == [0, 3, 4, 7, 8] and checkpoints_left(run) == [7, 8]


@pytest.mark.nightly
def test_what_an_app_serves_or_starts_with_stays(run: Run, play: Play) -> None:
    played(run, play, 8)
    assert plan(run).versions == {GROUP: [1]}
    ref = asdict(run.weights.ref(GROUP, 5))
    served = {"version": 1, "uri": run.weights.uri_of(GROUP, 1), "manifest_sha256": ""}
    apps = {"x": {"args": {"model": ref}, "deployments": [{"user_config": {"adapters": {GROUP: served}}}]}}
    write_file(f"{run.folder}/serve_apps.json", json.dumps({"revision": 1, "apps": apps}).encode())
    assert plan(run).versions == {}, "`troupe maintain` keeps it as well"
    drop_unneeded(run)
    assert run.weights.versions(GROUP) == [0, 1, 3, 4, 5, 7]


@pytest.mark.nightly
def test_what_a_run_deployed_on_another_runs_cluster_stays(run: Run, play: Play) -> None:
    played(run, play, 8)
    deployed = {"apps": {}, "next": {GROUP: asdict(run.weights.ref(GROUP, 5))}}
    write_file(f"{run.folder}/{DEPLOYED_FILE}", json.dumps(deployed).encode())
    drop_unneeded(run)
    assert 5 in run.weights.versions(GROUP) and 6 not in run.weights.versions(GROUP)


def test_what_a_run_needs_stays_where_its_folder_was_moved_and_linked(run: Run, play: Play, tmp_path: Path) -> None:
    played(run, play, 6)
    deployed = {"apps": {}, "next": {GROUP: asdict(run.weights.ref(GROUP, 1))}}
    write_file(f"{run.folder}/{DEPLOYED_FILE}", json.dumps(deployed).encode())
    old, new = tmp_path / "runs", tmp_path / "moved"
    old.rename(new)
    old.symlink_to(new)
    moved = Run(run.config)
    moved.begin()
    assert moved.folder.startswith(str(new))
    assert version_of_checkpoint(max(checkpoint_files(moved))) == 5
    assert not [f for f in plan(with_settings(moved, leftover_hours=1e-9)).checkpoints if "-v5-" in f]
    drop_unneeded(moved)
    assert checkpoints_left(moved) == [5], "training resumes it"
    assert moved.weights.versions(GROUP) == [0, 1, 3, 4, 5], "an app is about to serve version 1"


def test_a_removal_that_was_killed_is_finished_by_the_next(run: Run, play: Play) -> None:
    played(run, play, 8)
    file = f"{run.weights.uri_of(GROUP, 6)}/model.safetensors"
    data = read_file(file)
    assert data is not None
    run.weights.remove(GROUP, 6)
    write_file(file, data)  # as where the process died between manifest and folder
    drop_unneeded(run)
    assert read_file(file) is None


@pytest.mark.nightly
def test_training_that_goes_back_to_the_champion_finds_its_checkpoint(run: Run, play: Play) -> None:
    played(run, play, 8)
    back = Run(
        run.config.model_copy(update={"promote": run.config.promote.model_copy(update={"on_reject": "champion"})})
    )
    drop_unneeded(back)
    assert back.parents(8)[GROUP].version == 4 and checkpoints_left(run) == [4, 7]


@pytest.mark.nightly
def test_a_removed_version_is_named_with_the_setting_that_keeps_it_and_stays_in_the_lineage(
    run: Run, play: Play, tmp_path: Path
) -> None:
    lineage_of_team = pytest.importorskip("pipelines.extensions.lineage.lineage").lineage_of_team
    played(run, play, 8)
    refs = {k: run.weights.ref(GROUP, k) for k in range(8)}
    version, team = run.load_team("candidate")
    before = lineage_of_team(run, version, team)
    drop_unneeded(run)
    for fails in (
        lambda: export_version(run, GROUP, 5, tmp_path / "out"),
        lambda: run.weights.manifest(refs[5]),
        lambda: run.model_ref(GROUP, 5),
    ):
        with pytest.raises(ValueError, match=r"version 5 of .*was removed.*maintain\.keep_versions"):
            fails()
    with pytest.raises(ValueError, match="no version 9 of model group"):
        export_version(run, GROUP, 9, tmp_path / "out")
    export_version(run, GROUP, 4, tmp_path / "kept")
    after = lineage_of_team(run, version, team)
    assert (
        [m["version"] for m in after["models"][GROUP]]
        == [m["version"] for m in before["models"][GROUP]]
        == [*range(7, -1, -1)]
    )
    assert [m["version"] for m in after["models"][GROUP] if "was removed" in m["note"]] == [6, 5, 2, 1]
    assert run.weights.leftovers(GROUP, older_than_s=-1) == {}


@pytest.mark.nightly
def test_the_versions_that_an_iteration_collected_with_stay_until_it_has_trained(run: Run, play: Play) -> None:
    played(run, play, 7)
    assert plan(run).versions == {GROUP: [1]}
    finish(run, 7, collected(policy_versions={GROUP: 1}))  # the champion of that time
    assert plan(run).versions == {}


@pytest.mark.nightly
def test_iterations_in_which_nothing_is_left_to_do_are_not_looked_at_again(run: Run, play: Play) -> None:
    played(run, play, 7)
    before = contents(run)
    settled = [maintain(run)["settled"] for _ in range(3)]
    assert settled == sorted(settled) and settled[-1] == plan(run).settled > 0
    assert all(iteration_of_table(name) > settled[-1] for name in plan(run).tables)
    assert all(ref.iteration > settled[-1] for ref in plan(run).old_refs)
    assert contents(run) == before


@pytest.mark.nightly
def test_an_iteration_that_somebody_works_on_is_left_alone(run: Run, play: Play) -> None:
    played(run, play, 7)
    entered, leave = threading.Event(), threading.Event()

    def work(lease: Any) -> dict[str, Any]:
        entered.set()
        leave.wait(60)
        return {}

    busy = threading.Thread(target=run.journal.once, args=(run.key(2, "evaluate"), work))
    busy.start()
    assert entered.wait(30)
    try:
        chosen = plan(run)
        assert chosen.last_old == 1
        assert {ref.iteration for ref in chosen.old_refs} == {1}
    finally:
        leave.set()
        busy.join()
    assert plan(run).last_old == 4


@pytest.mark.nightly
def test_readers_and_writers_go_on_meanwhile(run: Run, play: Play, make_trace: Callable[..., Trace]) -> None:
    for k in range(5):
        play(run, k)
        if k == 2:
            time.sleep(3.1)  # what is this much older than the oldest kept version stays, too
    before, faults, stop = contents(run), [], threading.Event()
    num_read, num_written = [0], [0]

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def loop() -> None:
            try:
                while not stop.is_set():
                    work()
            except (AssertionError, RuntimeError, ValueError, OSError) as error:
                faults.append(error)

        return threading.Thread(target=loop)

    def read() -> None:
        assert contents(run) == before
        num_read[0] += 1

    def write() -> None:
        where = {"run_id": run.run_id, "iteration": 9, "purpose": Purpose.TRAIN, "team_key": "next"}
        num_written[0] += run.traces.write_episodes([make_trace(1000 + num_written[0], **where)])

    patient = with_settings(run, reader_grace_s=3)
    threads = [guarded(read), guarded(write)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    reports = []
    while len(reports) < 3 and time.monotonic() < deadline and not faults:
        reports.append(maintain(patient))
        time.sleep(3.2)
    stop.set()
    for thread in threads:
        thread.join()
    assert faults == []
    assert num_read[0] > 2 and num_written[0] > 2
    assert contents(run) == before
    stored = run.traces.stored_ids(run_id=run.run_id, iteration=9, purpose=Purpose.TRAIN, team_key="next")
    assert len(stored) == num_written[0]
    table = TraceTables(run.traces_uri, run.traces.schemas).open(table_name("episodes", run.run_id, 9))
    assert min(v["version"] for v in table.list_versions()) > 1


@pytest.mark.nightly
def test_the_command_prints_what_it_did_as_a_ref(run: Run, play: Play, tmp_path: Path) -> None:
    played(run, play, 4)
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(run.config.model_dump(mode="json")))
    asked = CliRunner().invoke(app, ["maintain", "--run", str(config), "--dry-run"])
    assert asked.exit_code == 0, asked.output
    shown = json.loads(asked.output.splitlines()[-1])
    assert shown["is_dry_run"] and shown["traces"]["tags_moved"] == 0
    assert "traces: 0 tags moved, 0 dropped" in asked.output and "weights: none removed" in asked.output
    done = CliRunner().invoke(app, ["maintain", "--run", str(config)])
    assert done.exit_code == 0, done.output
    assert "versions, " in done.output and "checkpoints: 0 removed, freed 0.0 MB" in done.output
    unknown = CliRunner().invoke(app, ["maintain", "--run", "nowhere", "--root", str(tmp_path / "none")])
    assert unknown.exit_code == 2


def test_tags_that_no_ref_names_go_when_they_are_old_and_nobody_is_at_it(
    run: Run, play: Play, make_trace: Callable[..., Trace]
) -> None:
    played(run, play, 2)
    where = {"run_id": run.run_id, "iteration": 0, "purpose": Purpose.AD_HOC, "team_key": "by-hand"}
    run.traces.write_episodes([make_trace(50, **where)])
    stray = run.traces.pin_episodes(**where)
    other = run.traces.pin_episodes(**{**where, "run_id": f"{run.run_id}-2"})
    assert plan(run).stray_tags == {}, "somebody may just be reading it"
    impatient = with_settings(run, leftover_hours=1e-9)
    assert plan(impatient).stray_tags == {stray.tag: table_name("episodes", run.run_id, 0)}
    before = contents(run)
    assert maintain(impatient)["traces"]["tags_dropped"] == [stray.tag]
    assert contents(run) == before
    assert list(run.traces.read_traces(other)) == []
    with pytest.raises(ValueError, match="does not exist"):
        list(run.traces.read_traces(stray))


def test_a_tag_that_a_stage_has_taken_again_since_the_plan_stays(
    run: Run, play: Play, make_trace: Callable[..., Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    played(run, play, 3)
    where = {"run_id": run.run_id, "iteration": 3, "purpose": Purpose.TRAIN, "team_key": "team-3"}
    run.traces.write_episodes([make_trace(i, **where) for i in range(4)])

    def stopped(lease: Any) -> dict[str, Any]:
        run.traces.pin_episodes(**where)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.journal.once(run.key(3, "collect"), stopped)
    impatient = with_settings(run, leftover_hours=1e-9)
    remove = maintaining._remove

    def remove_while_the_stage_goes_on(own: Run, chosen: Any) -> Any:
        pinned = run.traces.pin_episodes(**where)
        run.journal.once(run.key(3, "collect"), lambda lease: collected(traces=pinned).to_json())
        return remove(own, chosen)

    monkeypatch.setattr(maintaining, "_remove", remove_while_the_stage_goes_on)
    assert plan(impatient).stray_tags
    assert maintain(impatient)["traces"]["tags_dropped"] == []
    assert len(list(run.traces.read_traces(run.iteration(3).collected.traces))) == 4


def test_a_killed_stage_holds_no_maintenance(run: Run, play: Play) -> None:
    played(run, play, 3)
    run.journal._acquire(run.key(2, "measure"), "somebody", 0.01, 1)
    with run.journal._connect() as connection:
        connection.execute(STAGES.update().where(STAGES.c.stage == "measure").values(process="another-machine 1 1"))
    for k in range(3, 7):
        play(run, k)
    assert plan(run).last_old == 4


def test_the_checkpoint_of_a_version_that_is_committed_and_not_recorded_stays(
    run: Run, play: Play, tiny_model: Path
) -> None:
    played(run, play, 4)
    checkpoint = f"{run.folder}/checkpoints/{run.run_id}-{GROUP}/{GROUP}-v4-{4:08x}"
    write_file(f"{checkpoint}/policy.json", b"{}")
    at = {"model_group": GROUP, "version": 4, "parent": 3, "run_id": run.run_id, "iteration": 4}
    run.weights.commit(tiny_model, **at, probe=PROBE, checkpoint=checkpoint)
    long_ago = time.time() - 3 * 86_400
    for path in Path(run.folder, "checkpoints").rglob("*"):
        os.utime(path, (long_ago, long_ago))
    maintain(run)
    assert [file.name for file in list_files(checkpoint)] == ["policy.json"], (
        "the stage that is repeated resumes from it"
    )


def test_where_iterations_overlap_the_versions_that_sample_those_to_come_stay(run: Run, play: Play) -> None:
    played(run, play, 7)
    lagging = Run(run.config.model_copy(update={"loop": run.config.loop.model_copy(update={"max_lag": 2})}))
    again = run.weights.ref(GROUP, 6)
    run.journal.once(run.key(7, "train", GROUP), lambda lease: trained(model=again).to_json())
    champions = {0, 3, 4}
    assert needed_versions(run)[GROUP] == champions | {6}
    assert needed_versions(lagging)[GROUP] == champions | {5, 6}, "iterations 8 and 9 are sampled by 5 and 6"
    lagging.journal.pin_value(run.run_id, RunValue.PARENTS.of(8), {GROUP: 1})
    assert needed_versions(lagging)[GROUP] == champions | {5, 6, 1}, "what a decision of the gate named"


def test_what_the_kl_terms_of_training_to_come_compare_with_stays(
    run: Run, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    played(run, play, 7)
    lagging = Run(run.config.model_copy(update={"loop": run.config.loop.model_copy(update={"max_lag": 2})}))
    lagging.journal.pin_value(run.run_id, RunValue.PARENTS.of(8), {GROUP: 2})
    manifest = lagging.weights.manifest
    compared = {2: 1, 3: 2}
    monkeypatch.setattr(
        lagging.weights, "manifest", lambda ref: replace(manifest(ref), reference=compared.get(ref.version, 0))
    )
    rows = lagging.journal.stages(run.run_id)
    assert {1, 2} <= needed_versions(lagging)[GROUP], "of the version that iteration 8 trains from"
    assert {1, 2} <= maintained_versions(lagging, rows, 6)[GROUP]

"""A damaged or unwritable table of a trace store is named with its run and iteration; nothing is made anew over it."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from mounts import in_small_disk, on_full_disk, on_read_only_mount
from records import build_trace

from stores.store_faults import UnreadableStore
from stores.traces.store import TraceStore
from stores.types import Purpose, TracesRef

pytestmark = pytest.mark.test

KEY = {"run_id": "run", "iteration": 3, "purpose": Purpose.TRAIN, "team_key": "team"}
NAME = r"table episodes\.run\.it3 \(iteration 3 of run 'run'\) in .*traces is damaged \("
WAY_OUT = r"put a copy of .*traces/episodes\.run\.it3\.lance back"
USE = """
import json, sys
from stores.traces.store import TraceStore
store, said = TraceStore(sys.argv[1]), {}
for name, work in {
    "read": lambda: len(store.find_traces(run_id="run")),
    "absent": lambda: store.newest_episodes(limit=5, run_id="other"),
    "write": lambda: store.begin(run_id="run", iteration=9),
}.items():
    try:
        said[name] = work()
    except OSError as error:
        said[name] = [error.errno, error.filename]
print(json.dumps(said))
"""


@pytest.fixture
def ref(tmp_path: Path) -> TracesRef:
    """The pin of six episodes."""
    store = TraceStore(str(tmp_path / "traces"))
    store.create()
    store.write_episodes([build_trace(i) for i in range(6)])
    return store.pin_episodes(**KEY)


@pytest.fixture
def table(ref: TracesRef) -> Path:
    """The folder of their table."""
    return Path(ref.uri) / "episodes.run.it3.lance"


def cut_data(table: Path) -> None:
    for file in (table / "data").iterdir():
        os.truncate(file, file.stat().st_size // 2)


def lose_data(table: Path) -> None:
    for file in (table / "data").iterdir():
        file.unlink()


def overwrite_data(table: Path) -> None:
    for file in (table / "data").iterdir():
        file.write_bytes(b"garbage" * (file.stat().st_size // 7))


def manifests(table: Path) -> list[Path]:
    return sorted((table / "_versions").glob("*.manifest"))


def lose_manifests(table: Path) -> None:
    for file in manifests(table):
        file.unlink()


def cut_manifests(table: Path) -> None:
    for file in manifests(table):
        os.truncate(file, 100)


def zero_manifests(table: Path) -> None:
    for file in manifests(table):
        file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize("damage", [cut_data, lose_data, overwrite_data, lose_manifests, cut_manifests, zero_manifests])
def test_who_reads_a_damaged_table_is_told_which_and_what_to_do(
    damage: Callable[[Path], None], ref: TracesRef, table: Path
) -> None:
    store = TraceStore(ref.uri)
    store.write_episodes([build_trace(0, iteration=4)])
    damage(table)
    for read in (
        lambda: store.find_traces(run_id="run"),
        lambda: store.get_trace(build_trace(0).episode_id, run_id="run"),
        lambda: list(store.read_traces(ref)),
    ):
        with pytest.raises(UnreadableStore, match=NAME) as fault:
            read()
        assert fault.match(WAY_OUT)
    assert len(store.find_traces(run_id="run", iteration=4)) == 1, "other iterations can be read"


@pytest.mark.parametrize("damage", [lose_manifests, cut_manifests, zero_manifests])
def test_a_writer_does_not_begin_a_damaged_table_anew(
    damage: Callable[[Path], None], ref: TracesRef, table: Path
) -> None:
    damage(table)
    before = {file: file.read_bytes() for file in table.rglob("*") if file.is_file()}
    with pytest.raises(UnreadableStore, match=NAME):
        TraceStore(ref.uri).write_episodes([build_trace(7)])
    assert {file: file.read_bytes() for file in table.rglob("*") if file.is_file()} == before


def test_reading_makes_no_store(tmp_path: Path) -> None:
    store = TraceStore(str(tmp_path / "nowhere"))
    assert store.find_traces() == store.newest_episodes(limit=3) == []
    with pytest.raises(ValueError, match=r"no episode 'x' in .*nowhere"):
        store.get_trace("x")
    assert list(tmp_path.iterdir()) == []


def test_episodes_are_read_on_a_read_only_mount_and_a_full_disk_and_writers_are_told_why(ref: TracesRef) -> None:
    for run, number in ((on_read_only_mount, errno.EROFS), (on_full_disk, errno.ENOSPC)):
        done = run(Path(ref.uri), [sys.executable, "-c", USE, ref.uri])
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["read"] == 6 and said["absent"] == []
        assert said["write"][0] == number and said["write"][1].startswith(ref.uri)


@pytest.mark.nightly
def test_a_stage_that_met_a_full_disk_goes_on_without_loss_once_there_is_room(tmp_path: Path) -> None:
    folder, tests = tmp_path / "run", Path(__file__).parents[1]
    folder.mkdir()
    scene = Path(__file__).with_name("stage_on_full_disk.py")
    command = ["env", f"PYTHONPATH={tests.parent}:{tests}", sys.executable, scene, folder, "both"]
    done = in_small_disk(folder, command, size_mib=4, cwd=tests.parent, timeout_s=120)
    assert done.returncode == 0, done.stderr
    full, again = map(json.loads, done.stdout.splitlines())
    assert full["errno"] == errno.ENOSPC and full["file"].startswith(str(folder))
    assert again == {"was_stored": 20, "num_episodes": 40}

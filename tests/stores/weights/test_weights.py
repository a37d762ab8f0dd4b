"""stores.weights.store on a local folder and on S3."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mounts import on_full_disk
from safetensors.numpy import save_file

from stores.files import open_filesystem
from stores.types import ModelVersionRef
from stores.weights import weight_cache
from stores.weights.manifest import Manifest, Probe, read_safetensors_header, verify_folder
from stores.weights.store import WeightStore
from stores.weights.weight_cache import CACHED_S, copies_folder, evict, fetch
from stores.weights.weight_files import Folder

pytestmark = pytest.mark.test

PROBE = Probe(sequences=((1, 2, 3), (4, 5)), logprobs=((-0.1, -1 / 3), (-2.5e-7,)))


@pytest.fixture(params=["local", "file", pytest.param("s3", marks=pytest.mark.nightly)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> WeightStore:
    if request.param == "s3":
        return WeightStore(request.getfixturevalue("s3_uri"))
    return WeightStore({"local": str(tmp_path / "w"), "file": f"file://{tmp_path}/w"}[request.param])


def _commit(store: WeightStore, folder: Path, *, version: int = 1, **changes: Any) -> ModelVersionRef:
    about = {"parent": version - 1 or None, "run_id": "run", "iteration": 4, "probe": PROBE, "note": "first"}
    return store.commit(folder, model_group="solver", version=version, **{**about, **changes})


def test_a_version_comes_back_whole_and_says_what_it_is(store: WeightStore, tiny_model: Path, tmp_path: Path) -> None:
    assert store.ref("solver", 1) is None and store.versions("solver") == []
    ref = _commit(store, tiny_model)
    manifest = store.manifest(ref)
    assert ref == store.ref("solver", 1)
    assert (ref.model_group, ref.version, ref.uri) == ("solver", 1, store.uri_of("solver", 1))
    assert (manifest.parent, manifest.run_id, manifest.iteration, manifest.probe) == (None, "run", 4, PROBE)
    assert manifest.is_tied and manifest.tensors["model.embed_tokens.weight"][0] == "F32"
    assert manifest.size_bytes == sum(p.stat().st_size for p in tiny_model.iterdir())
    copy = store.fetch(ref, tmp_path / "cache")
    assert {p.name for p in copy.iterdir()} == {p.name for p in tiny_model.iterdir()} | {"manifest.json"}
    assert all((copy / p.name).read_bytes() == p.read_bytes() for p in tiny_model.iterdir())
    assert store.fetch(ref, tmp_path / "cache") == copy
    store.verify(ref)


def test_a_file_of_the_model_is_no_leftover_whatever_its_name(
    store: WeightStore, tiny_model: Path, tmp_path: Path
) -> None:
    """On a local disk `troupe maintain` took it for an unfinished try, and failed to remove it as a folder."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "try-it.md").write_text("Ask it something.")
    ref = _commit(store, folder)
    assert "try-it.md" in store.manifest(ref).files and store.leftovers("solver", older_than_s=-1) == {}


def test_the_first_commit_of_a_version_stays(store: WeightStore, tiny_model: Path) -> None:
    ref = _commit(store, tiny_model)
    assert _commit(store, tiny_model, note="second") == ref
    assert store.manifest(ref).note == "first"
    assert _commit(store, tiny_model, version=12) != ref
    assert store.versions("solver") == [1, 12]


def test_a_version_without_a_manifest_does_not_exist(store: WeightStore, tiny_model: Path) -> None:
    ref = _commit(store, tiny_model)
    with pytest.raises(ValueError, match=r"never committed"):
        store.manifest(replace(ref, uri=store.uri_of("solver", 2)))
    with pytest.raises(ValueError, match=r"was replaced; take a new ref"):
        store.manifest(replace(ref, manifest_sha256="0" * 64))


def test_a_folder_without_weights_is_not_committed(store: WeightStore, tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model.safetensors has \d+ bytes, its header says \d+: the file was cut"):
        _commit(store, folder)
    weights.unlink()
    with pytest.raises(ValueError, match=r"holds no .safetensors file"):
        _commit(store, folder)
    assert store.versions("solver") == []


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_verify_names_the_file_that_is_not_what_was_committed(tmp_path: Path, tiny_model: Path, damage: str) -> None:
    store = WeightStore(str(tmp_path / "w"))
    ref = _commit(store, tiny_model)
    path = store.fetch(ref) / "model.safetensors"
    if damage == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with pytest.raises(ValueError, match=r"model.safetensors (is missing|has sha256)"):
        store.verify(ref)


def test_commits_that_race_leave_one_whole_version(store: WeightStore, tiny_model: Path) -> None:
    refs: list[ModelVersionRef] = []
    writers = [
        threading.Thread(target=lambda n=n: refs.append(_commit(store, tiny_model, note=f"writer {n}")))
        for n in range(6)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    if not store.uri.startswith(
        "s3://"
    ):  # there two tries at the same moment are kept apart by the stage's lease, and one may fail
        assert len(refs) == 6 and len(set(refs)) == 1
        assert [p.name for p in Path(store.uri, "solver").iterdir()] == ["v1"]
    last = store.ref("solver", 1)
    assert last in refs
    store.verify(last)


@pytest.mark.nightly
def test_a_late_try_leaves_a_committed_version_on_s3_as_it_is(s3_uri: str, tiny_model: Path) -> None:
    store = WeightStore(s3_uri)
    late = Folder.at(store.uri_of("solver", 1))
    with late.open_new() as writer:
        writer.put(tiny_model / "model.safetensors", "model.safetensors")
        ref = _commit(store, tiny_model)
        writer.put(tiny_model / "config.json", "model.safetensors")
        writer.finish(b"{}")
    assert store.ref("solver", 1) == ref
    store.verify(ref)


def test_processes_that_fetch_the_same_version_copy_it_once(
    s3_uri: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = _commit(WeightStore(s3_uri), tiny_model)
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path))
    code = "import sys; from stores.weights.weight_cache import fetch; from stores.types import ModelVersionRef as R; import json\n"
    code += "folder = fetch(R(**json.loads(sys.argv[1]))); print(folder, folder.stat().st_ino)"
    asked = [sys.executable, "-c", code, json.dumps(asdict(ref))]
    racers = [subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert len({racer.communicate(timeout=60)[0] for racer in racers}) == 1
    (copy,) = tmp_path.glob("weights/*/v1-*")
    verify_folder(copy, WeightStore(s3_uri).manifest(ref))


def test_a_copy_that_lost_files_is_fetched_again(s3_uri: str, tiny_model: Path, tmp_path: Path) -> None:
    """Cleaners of /tmp take files that nobody has read for days, and leave their folder."""
    store = WeightStore(s3_uri)
    ref = _commit(store, tiny_model)
    copy = store.fetch(ref, tmp_path)
    (copy / "model.safetensors").unlink()
    assert fetch(ref, tmp_path, with_tensors=False) == copy, "all that is asked for is there"
    assert store.fetch(ref, tmp_path) == copy
    verify_folder(copy, store.manifest(ref))
    assert not list(copy.parent.glob(".evict-*"))


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_copy_that_a_power_cut_damaged_is_fetched_again(
    s3_uri: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """A cut one by whoever wants it; one of the right size by `verify`, which alone reads it."""
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path))
    store = WeightStore(s3_uri)
    ref = _commit(store, tiny_model)
    weights = store.fetch(ref) / "model.safetensors"
    weights.write_bytes(b"" if damage == "cut" else bytes(weights.stat().st_size))
    store.fetch(ref) if damage == "cut" else store.verify(ref)
    verify_folder(weights.parent, store.manifest(ref))


def test_a_copy_that_is_used_while_others_are_removed_stays(
    s3_uri: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = WeightStore(s3_uri).fetch(_commit(WeightStore(s3_uri), tiny_model), tmp_path)
    os.utime(copy, (1, 1))

    def used_meanwhile(folder: Path) -> int:
        os.utime(folder)
        return 5

    monkeypatch.setattr(weight_cache, "size_of", used_meanwhile)
    assert (evict(copy.parent, num_kept=0), copy.exists()) == (0, True)


@pytest.mark.nightly
def test_a_machine_keeps_the_copies_that_were_used_last(s3_uri: str, tiny_model: Path, tmp_path: Path) -> None:
    store = WeightStore(s3_uri)
    refs = [_commit(store, tiny_model, version=k) for k in range(1, 8)]
    copies = [store.fetch(ref, tmp_path) for ref in refs]
    assert all(copy.exists() for copy in copies), "all were used just now"
    for age, copy in enumerate([copies[0], *reversed(copies[1:])]):
        os.utime(copy, (time.time() - CACHED_S - age,) * 2)
    assert evict(copies[0].parent) > 0
    assert [copy.exists() for copy in copies] == [True] + [False] * 3 + [True] * 3
    small = fetch(refs[1], tmp_path, with_tensors=False)
    assert (small / "tokenizer.json").is_file() and not list(small.glob("*.safetensors"))
    assert fetch(refs[6], tmp_path, with_tensors=False) == copies[6]
    assert (copies[6] / "model.safetensors").is_file()


def test_a_failed_commit_leaves_nothing_behind(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "config.json").write_text("{")
    store = WeightStore(str(tmp_path / "w"))
    with pytest.raises(json.JSONDecodeError):
        _commit(store, folder)
    assert list((tmp_path / "w" / "solver").iterdir()) == []


def test_a_manifest_survives_json_to_the_last_digit(tmp_path: Path, tiny_model: Path) -> None:
    store = WeightStore(str(tmp_path / "w"))
    manifest = store.manifest(_commit(store, tiny_model, parent=7, checkpoint="runs/x/checkpoint_3"))
    assert Manifest.from_text(manifest.to_text()) == manifest
    with pytest.raises(ValueError, match="Manifest cannot be read: model_group: is missing"):
        Manifest.from_text('{"version": 1}')
    with pytest.raises(ValueError, match=r"one logprob fewer than tokens: need \[1\], got \[2\]"):
        Probe(sequences=((1, 2),), logprobs=((-1.0, -2.0),))


def test_the_header_of_a_safetensors_file_is_read_without_torch(tmp_path: Path, tiny_model: Path) -> None:
    from safetensors import safe_open

    path = tiny_model / "model.safetensors"
    with safe_open(path, framework="np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        expected = {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    assert read_safetensors_header(path) == expected
    (tmp_path / "text.safetensors").write_text("this is not a tensor file at all")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        read_safetensors_header(tmp_path / "text.safetensors")


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden"])
def test_a_model_group_that_cannot_name_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a folder"):
        WeightStore(str(tmp_path)).uri_of(name, 1)


def test_a_version_that_does_not_fit_on_the_disk_is_named_and_leaves_nothing(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "weights").mkdir()
    commit = (
        "import sys; from stores.weights.manifest import Probe; from stores.weights.store import WeightStore\n"
        "probe = Probe(sequences=((1, 2),), logprobs=((-0.1,),))\n"
        "store = WeightStore(sys.argv[1])\n"
        "try: store.commit(sys.argv[2], model_group='g', version=1, parent=None, run_id='r', iteration=1, probe=probe)\n"
        "except OSError as error: print(error.errno, error.filename, sorted(store.versions('g')))\n"
        "import os; print([n for n in os.listdir(sys.argv[1] + '/g') if n[:1] != '.' or os.listdir(sys.argv[1] + '/g/' + n)])\n"
    )
    store = tmp_path / "weights"
    done = on_full_disk(store, [sys.executable, "-c", commit, store, tiny_model], spare_kib=200)
    named = f"{errno.ENOSPC} {store}/g/v1/"
    assert done.stdout.startswith(named) and done.stdout.endswith("[]\n[]\n"), done.stdout + done.stderr


def _plain(folder: Path) -> Path:
    """A folder with config and weights."""
    folder.mkdir(parents=True)
    save_file({"w": np.zeros(4, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def test_a_version_of_another_run_is_not_taken_for_ones_own(store: WeightStore, tmp_path: Path) -> None:
    ref = _commit(store, _plain(tmp_path / "model"), run_id="first")
    assert _commit(store, tmp_path / "model", run_id="first") == ref
    with pytest.raises(
        ValueError, match=r"storage\.weights: .*solver/v1 is of run 'first', and 'second' .*: give each run"
    ):
        _commit(store, tmp_path / "model", run_id="second")


def test_hidden_files_and_weights_of_other_layouts_are_no_part_of_a_version(tmp_path: Path) -> None:
    """A cloned folder has its weights twice, in `.git/lfs`, too; every version trained from it had them again."""
    folder = _plain(tmp_path / "model")
    (folder / ".git" / "lfs").mkdir(parents=True)
    shutil.copy(folder / "model.safetensors", folder / ".git" / "lfs" / "object")
    (folder / "original").mkdir()
    save_file({"w": np.zeros(4, np.float16)}, folder / "original" / "model.safetensors")
    (folder / "original" / "params.json").write_text("{}")
    store = WeightStore(str(tmp_path / "w"))
    manifest = store.manifest(_commit(store, folder))
    assert sorted(manifest.files) == ["config.json", "model.safetensors", "original/params.json"]
    assert manifest.tensors == {"w": ("F32", (4,))}


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_verify_sees_what_a_remote_store_lost_though_a_copy_is_here(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore("mock://bucket/verify-" + damage)  # pyarrow's own, in the memory of this process
    ref = _commit(store, _plain(tmp_path / "model"))
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path / "cache"))
    store.verify(ref)
    filesystem, path = open_filesystem(f"{ref.uri}/{store.manifest(ref).folder}/model.safetensors")
    assert filesystem is not None
    if damage == "missing":
        filesystem.delete_file(path)
    else:
        with filesystem.open_output_stream(path) as file:
            file.write(b"cut")
    with pytest.raises(ValueError, match=r"model.safetensors is missing|holds 5 bytes, the manifest says \d+"):
        store.verify(ref)


def test_users_of_one_machine_have_copies_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one could not write beside those of the first: PermissionError on /tmp/troupe."""
    monkeypatch.delenv("TROUPE_CACHE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert copies_folder() == tmp_path / f"troupe-{os.getuid()}" / "weights"
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ValueError, match="troupe-12345 belongs to another user"):  # made by this user, beside the first
        copies_folder()


@pytest.mark.parametrize("name", ["solver#1", "solver?1"])
def test_a_model_group_at_whose_name_the_path_of_a_uri_would_end_is_refused(tmp_path: Path, name: str) -> None:
    """Its versions all had one folder, and a read of the first said `Not a regular file`."""
    with pytest.raises(ValueError, match=r"model group 'solver.1' cannot name a folder: use letters"):
        WeightStore("s3://bucket/weights").uri_of(name, 0)
    assert WeightStore(str(tmp_path)).uri_of(name, 0) == f"{tmp_path}/{name}/v0"

"""Verdicts and the list of apps, without an engine; what needs engines is in test_policy_app.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_apps.config import ServeConfig
from serve_apps.engines.port import AdapterRoom
from serve_apps.policy.app_list import AppList, Apps, with_user_config
from serve_apps.policy.deployment import PolicyAppSpec, _is_same, _retargeted, app_entry
from serve_apps.policy.policy_app import PolicyArgs
from serve_apps.policy.proof import judge, max_difference, telling
from serve_apps.policy.proving import Target, _probes, _proof
from stores.types import ModelVersionRef
from stores.weights.manifest import Probe
from stores.weights.store import WeightStore

pytestmark = pytest.mark.test

NEW = ((-1.0, -2.0), (-3.0,))
OLD = ((-1.5, -2.0), (-3.0,))


class RecordingAppList(AppList):
    """An AppList whose deploys go nowhere, and fail on demand."""

    deployed: list[Apps]
    is_refusing = False

    def _deploy(self, apps: Apps) -> None:
        if self.is_refusing:
            raise RuntimeError("Serve refuses")
        self.deployed = [*getattr(self, "deployed", []), apps]


NEAR, STEP, NOISE = ((-1.00001, -2.0), (-3.0,)), ((-1.0, -2.0005), (-3.0,)), ((-1.0005, -2.0), (-3.0,))
NAN = ((float("nan"), -2.0), (-3.0,))


@pytest.mark.parametrize(
    ("served", "new", "old", "verdict"),
    [
        (NEAR, NEW, OLD, "proven"),  # near the new version, and nearer than to the old
        (OLD, NEW, OLD, "failed"),
        (NAN, NEW, OLD, "failed"),
        (NEAR, NEW, None, "proven"),  # without another version to tell it apart from only noise is proven
        (NOISE, NEW, None, "failed"),
        (NOISE, NEW, OLD, "proven"),
        (STEP, STEP, NEW, "proven"),  # a small step within the tolerance is still told apart
        (NEW, STEP, NEW, "failed"),
        (NEW, NEW, NEAR, "indistinguishable"),  # versions nearer than the noise
        (NEAR, NEW, NEAR, "indistinguishable"),
    ],
)
def test_a_replica_is_judged_by_its_distance_to_both_versions(served: Any, new: Any, old: Any, verdict: str) -> None:
    judged, to_new, to_old = judge(served, new, None if old is None else served, old, tolerance=1e-3, noise=2e-5)
    assert judged == verdict
    if (served, new, old) == (NEAR, NEW, OLD):
        assert (to_new, to_old) == (pytest.approx(1e-5), pytest.approx(0.49999))


def test_a_replica_nearer_to_the_old_version_fails_though_it_is_within_the_tolerance_of_the_new() -> None:
    assert judge([[9e-4]], [[0.0]], [[5e-5]], [[0.0]], tolerance=1e-3, noise=2e-5)[0] == "failed"
    assert judge([[5e-5]], [[0.0]], [[9e-4]], [[0.0]], tolerance=1e-3, noise=2e-5)[0] == "proven"


@pytest.mark.parametrize(
    ("reported", "verdict"),
    [((2, "b"), "proven"), ((1, "b"), "failed"), ((2, "a"), "failed"), ((None, None), "failed")],
)
def test_a_replica_that_reports_other_weights_fails_whatever_its_logprobs(
    reported: tuple[int | None, str | None], verdict: str
) -> None:
    model = ModelVersionRef(model_group="g", version=2, uri="", manifest_sha256="b")
    status = {"replica_id": "r", "pid": 1, "version": reported[0], "manifest_sha256": reported[1]}
    proof = _proof(Target(app="app", model=model), status, ("proven", 0.0, 0.5), seconds=1.0)
    assert (proof.verdict, proof.version, proof.max_difference_new) == (verdict, reported[0], 0.0)


def test_an_app_goes_on_with_any_version_but_not_where_what_it_starts_with_is_gone_or_unknown(
    tiny_model: Path, tmp_path: Path
) -> None:
    store, probe = WeightStore(str(tmp_path)), Probe(sequences=((1, 2),), logprobs=((-0.5,),))
    specs = [
        PolicyAppSpec(
            name="app",
            model_group="g",
            model=store.commit(
                tiny_model, model_group="g", version=version, parent=None, run_id="r", iteration=version, probe=probe
            ),
            serve=ServeConfig(),
        )
        for version in (0, 1)
    ]
    running = app_entry(specs[0])
    assert _is_same(running, specs[1])
    assert not _is_same(running, replace(specs[1], serve=ServeConfig(num_replicas=2)))
    args = running["args"]
    earlier = {**running, "args": {**args, "serve": {**args["serve"], "of_an_earlier_version": 1}}}
    assert not _is_same(earlier, specs[1]), "a list that is older than this Troupe"
    store.remove("g", 0)
    assert not _is_same(running, specs[1]), "removed"
    store.commit(tiny_model, model_group="g", version=0, parent=None, run_id="r, again", iteration=0, probe=probe)
    assert not _is_same(running, specs[1]), "replaced"


def test_the_telling_sequence_is_the_one_that_differs_most_from_every_other_version() -> None:
    new = ((-1.0,), (-2.0,), (-3.0,))
    base = ((-9.0,), (-2.2,), (-3.0,))  # far on the first, near on the second
    before = ((-1.1,), (-2.3,), (-7.0,))  # far on the third, where the base is the same
    assert telling(new, [base]) == (0, 1)
    assert telling(new, [before]) == (2, 1)
    assert telling(new, [base, before]) == (1, 1)
    assert telling(new, []) == (0, 1)
    assert telling(new, [new]) == (0, 1), "nothing differs"


def test_the_shortest_beginning_that_tells_nearly_as_well_is_enough_but_never_a_handful_of_tokens() -> None:
    new = ((0.0,) * 40,) * 3
    far_late = (0.0,) * 30 + (1.0,) * 10
    near_early = (0.0,) * 20 + (0.8,) + (0.0,) * 19
    too_near = (0.7,) + (0.0,) * 39
    assert telling(new, [(far_late, near_early, too_near)]) == (1, 21), (
        "0.8 of the largest difference is nearly as good"
    )
    assert telling(new, [(far_late, too_near, too_near)]) == (0, 31)
    at_once = (0.9,) + (0.0,) * 39
    assert telling(new, [(far_late, near_early, at_once)]) == (2, 16)
    elsewhere = (new[0], near_early, new[2])
    assert telling(new, [(far_late, near_early, at_once), elsewhere]) == (1, 21), "told from all the others"


def test_an_adapter_is_proven_on_one_sequence_and_a_whole_model_on_all(tiny_model: Path, tmp_path: Path) -> None:
    store, sequences = WeightStore(str(tmp_path)), ((1, 2), (3, 4), (5, 6))

    def commit(group: str, version: int, logprobs: list[float], base: ModelVersionRef | None = None) -> ModelVersionRef:
        probe = Probe(sequences=sequences, logprobs=tuple((x,) for x in logprobs))
        return store.commit(tiny_model, model_group=group, version=version, parent=None, run_id="r", iteration=version,
                            probe=probe, base=base)  # fmt: skip

    base = commit("shared", 0, [-1.0, -1.0, -1.0])
    old, new = commit("g", 0, [-1.0, -1.5, -2.0], base), commit("g", 1, [-1.2, -1.1, -2.5], base)
    on, told_from = _probes(Target(app="app", model=new, before=old), store)
    assert told_from is not None
    assert (on.sequences, on.logprobs, told_from.logprobs) == (((5, 6),), ((-2.5,),), ((-2.0,),))
    assert _probes(Target(app="app", model=base), store) == (store.manifest(base).probe, None)


def test_a_sync_of_one_adapter_leaves_the_others_of_its_app(tiny_model: Path, tmp_path: Path) -> None:
    store, probe = WeightStore(str(tmp_path)), Probe(sequences=((1, 2),), logprobs=((-0.5,),))
    refs = {
        (group, version): store.commit(
            tiny_model, model_group=group, version=version, parent=None, run_id="r", iteration=version, probe=probe
        )
        for group in ("shared", "solver", "verifier")
        for version in (0, 1)
    }
    room = AdapterRoom(model_groups=("solver", "verifier"), max_rank=4, target_modules=("q_proj",))
    spec = PolicyAppSpec(
        name="app",
        model_group="shared",
        model=refs["shared", 0],
        serve=ServeConfig(),
        adapters={group: refs[group, 0] for group in room.model_groups},
        room=room,
    )
    entry = app_entry(spec)
    apps = _retargeted({"app": entry}, [Target(app="app", model=refs["solver", 1])])
    served = apps["app"]["deployments"][0]["user_config"]["adapters"]
    assert {group: about["version"] for group, about in served.items()} == {"solver": 1, "verifier": 0}
    assert PolicyArgs.from_dict(json.loads(json.dumps(entry["args"]))) == spec.args
    assert _is_same(entry, spec)
    assert not _is_same(entry, replace(spec, model=refs["shared", 1])), "another base is another app"
    assert not _is_same(entry, replace(spec, room=replace(room, max_rank=8)))


def test_probes_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths differ"):
        max_difference(NEW, ((-1.0,), (-3.0,)))


def test_the_list_of_apps_changes_by_compare_and_swap_and_survives_its_process(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "apps.json")
    apps = RecordingAppList(path)
    assert apps.replace(0, {"a": {"name": "a"}})
    assert not apps.replace(0, {"b": {"name": "b"}}), "somebody changed the list meanwhile"
    assert apps.replace(1, {"a": {"name": "a"}, "b": {"name": "b"}})
    assert RecordingAppList(path).read() == (2, {"a": {"name": "a"}, "b": {"name": "b"}})
    assert [sorted(d) for d in apps.deployed] == [["a"], ["a", "b"]]


def test_a_list_that_serve_refuses_is_not_kept(tmp_path: Path) -> None:
    apps = RecordingAppList(str(tmp_path / "apps.json"))
    apps.is_refusing = True
    with pytest.raises(RuntimeError, match="Serve refuses"):
        apps.replace(0, {"a": {}})
    assert apps.read() == (0, {})


def test_a_list_that_could_not_be_written_is_not_kept_so_that_whoever_tries_again_writes_it(tmp_path: Path) -> None:
    folder = tmp_path / "a file"
    folder.touch()
    apps = RecordingAppList(str(tmp_path / "apps.json"))
    apps._path = str(folder / "apps.json")
    with pytest.raises(OSError, match="a file"):
        apps.replace(0, {"a": {}})
    assert apps.read() == (0, {})
    folder.unlink()
    assert apps.replace(0, {"a": {}})
    assert RecordingAppList(apps._path).read() == (1, {"a": {}})


def test_another_version_changes_the_user_config_only() -> None:
    entry = {"name": "a", "args": {"x": 1}, "deployments": [{"name": "Policy", "user_config": {"version": 1}}]}
    assert with_user_config(entry, {"version": 2}) == {
        "name": "a",
        "args": {"x": 1},
        "deployments": [{"name": "Policy", "user_config": {"version": 2}}],
    }

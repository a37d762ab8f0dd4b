"""A policy app on real engines: tokens, versions, proofs, faults. One app for the whole file, with two replicas."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from safetensors.torch import load_file, save_file

from serve_apps.config import CallConfig, ServeConfig
from serve_apps.policy.app_list import change, open_list
from serve_apps.policy.deployment import (
    PolicyAppSpec,
    _changed,
    _retargeted,
    ensure_apps,
    served_models,
    sync_apps,
)
from serve_apps.policy.live_settings import put_to_sleep, set_low_priority, wake_apps
from serve_apps.policy.proof import Limits, SyncError
from serve_apps.policy.proving import Target, prove_apps
from serve_apps.policy.replicas import Broadcast, handle_of
from serve_apps.policy.serve_client import ServeClient
from stores.types import Completion, GenerateRequest, ModelVersionRef, Sampling
from stores.weights.manifest import Probe
from stores.weights.store import WeightStore
from tests.serve_apps.controller_death import kill_controller
from tests.serve_apps.deployed_apps import remove_apps, replica_statuses

pytestmark = pytest.mark.nightly

APP = "policy-test"
SEQUENCES = tuple(tuple((i * 37 + j * 11) % 300 + 3 for j in range(32)) for i in range(3))
# Longer than several KV blocks, so that the prefix cache holds something that a new version must not find.
PROMPTS = [[(i * 7 + j * 3) % 300 + 3 for j in range(140)] for i in range(6)]
LIMITS = Limits(tolerance=1e-3, noise=2e-5)
NUM_REPLICAS = 2


def hf_logprobs(
    folder: str | Path, sequences: Sequence[Sequence[int]], temperature: float = 1.0
) -> tuple[tuple[float, ...], ...]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = []
    for tokens in sequences:
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([tokens])).logits[0] / temperature, dim=-1)
        rows.append(tuple(float(logprobs[i, token]) for i, token in enumerate(tokens[1:])))
    return tuple(rows)


@dataclass
class Served:
    """The app and the versions that its tests move between."""

    store: WeightStore
    source: Path
    scratch: Path

    def commit(self, version: int, *, noise: float, seed: int = 0, probe_of: int | None = None,
               fault: str = "") -> ModelVersionRef:  # fmt: skip
        """A version with perturbed weights and their own probe, or with a fault."""
        folder = self.scratch / f"v{version}"
        shutil.copytree(self.source, folder)
        tensors = load_file(folder / "model.safetensors")
        generator = torch.Generator().manual_seed(seed)
        tensors = {name: t + noise * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
        good = folder / "model.safetensors"
        save_file(tensors, good, metadata={"format": "pt"})
        of = self.ref(probe_of).uri if probe_of is not None else folder
        probe = Probe(sequences=SEQUENCES, logprobs=hf_logprobs(of, SEQUENCES))
        if fault == "nan":
            tensors["model.norm.weight"][0] = float("nan")
        if fault == "shape":
            tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
        save_file(tensors, good, metadata={"format": "pt"})
        with pytest.MonkeyPatch.context() as patch:
            if fault == "nan":  # as a store of another program would have it
                patch.setattr("stores.weights.store.refuse_not_finite", lambda *_, **__: None)
            return self.store.commit(
                folder, model_group="g", version=version, parent=None, run_id="r", iteration=version, probe=probe
            )

    def ref(self, version: int) -> ModelVersionRef:
        ref = self.store.ref("g", version)
        assert ref is not None
        return ref

    def sync(self, new: int, old: int | None = None, timeout_s: float = 60) -> list[Any]:
        return sync_apps([self.target(new, old)], self.store, timeout_s=timeout_s)

    def target(self, new: int, old: int | None = None) -> Target:
        return Target(app=APP, model=self.ref(new), before=None if old is None else self.ref(old), limits=LIMITS)

    def prove(self, new: int, old: int) -> list[Any]:
        return prove_apps([self.target(new, old)], self.store)

    def versions(self) -> list[int]:
        return [version for version, _ in served_models({"g": APP})["g"].values()]


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, ray_local: None) -> Iterator[Served]:
    scratch = tmp_path_factory.mktemp("served")
    served = Served(WeightStore(str(scratch / "weights")), tiny_model, scratch)
    first = served.commit(0, noise=0.0)
    served.commit(1, noise=0.02, seed=1)
    config = ServeConfig(num_replicas=NUM_REPLICAS, kv_cache_gib=0.2, max_num_seqs=64, health_check_period_s=2)
    spec = PolicyAppSpec(name=APP, model_group="g", model=first, serve=config)
    ensure_apps([spec], state_file=scratch / "apps.json", timeout_s=240)
    yield served
    remove_apps([APP])


def ask(requests: Sequence[GenerateRequest]) -> list[Any]:
    async def main() -> list[Any]:
        client = ServeClient({"g": APP}, CallConfig(batch_max=8))
        return await asyncio.gather(*(client.generate(r) for r in requests), return_exceptions=True)

    return asyncio.run(main())


def requests(max_tokens: int = 24, temperature: float = 1.0) -> list[GenerateRequest]:
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
    return [
        GenerateRequest(request_id=f"r{i}", model_group="g", prompt_token_ids=p, sampling=sampling, seed=i)
        for i, p in enumerate(PROMPTS)
    ]


def largest_error(folder: str, answers: Sequence[Completion], temperature: float = 1.0) -> float:
    """Largest |difference| of the answers' logprobs to a plain forward of the weights in `folder`."""
    full = [[*prompt, *a.token_ids] for prompt, a in zip(PROMPTS, answers, strict=True)]
    exact = hf_logprobs(folder, full, temperature)
    return max(
        abs(x - y)
        for prompt, a, row in zip(PROMPTS, answers, exact, strict=True)
        for x, y in zip(a.logprobs, row[len(prompt) - 1 :], strict=True)
    )


def test_tokens_come_with_the_logprobs_of_a_plain_forward_and_seeds_decide_them(served: Served) -> None:
    served.sync(0)
    first, second = ask(requests()), ask(requests())
    assert largest_error(served.ref(0).uri, first) < 1e-3
    assert [a.token_ids for a in first] == [a.token_ids for a in second]
    assert {a.policy_version for a in first} == {0} and not any(a.is_version_mixed for a in first)
    assert all(len(a.token_ids) == 24 if a.finish_reason == "length" else a.token_ids[-1] == 2 for a in first)


def test_logprobs_are_those_of_the_tempered_distribution_that_was_sampled(served: Served) -> None:
    served.sync(1)
    answers = ask(requests(temperature=0.5))
    assert largest_error(served.ref(1).uri, answers, temperature=0.5) < 1e-3
    assert largest_error(served.ref(1).uri, answers, temperature=1.0) > 0.01


def test_a_sync_changes_every_replica_in_place_and_proves_each(served: Served) -> None:
    served.sync(0)
    before = {s["pid"] for s in replica_statuses(APP)}
    # Fills the prefix caches with keys and values of version 0. Of one more time than there are replicas, one meets a full one.
    cached = [[a.num_cached_tokens for a in ask(requests())] for _ in range(NUM_REPLICAS + 1)]
    assert [128] * len(PROMPTS) in cached, "4 full blocks of each prompt"
    proofs = served.sync(1, old=0)
    assert [p.verdict for p in proofs] == ["proven"] * NUM_REPLICAS
    assert {p.pid for p in proofs} == before, "nothing restarted"
    assert all(p.max_difference_new < 1e-4 < 0.05 < p.max_difference_old for p in proofs)
    answers = ask(requests())
    assert {a.policy_version for a in answers} == {1}
    assert [a.num_cached_tokens for a in answers] == [0] * len(PROMPTS), "nothing of version 0 is left"
    assert largest_error(served.ref(1).uri, answers) < 1e-3, "tied head and prefix cache are of the new version"


def test_a_completion_that_spans_a_change_is_marked(served: Served) -> None:
    served.sync(0)

    async def main() -> list[Any]:
        client = ServeClient({"g": APP}, CallConfig())
        change = asyncio.ensure_future(asyncio.to_thread(served.sync, 1))
        tasks = []
        while not change.done():  # however fast the engine is, requests are under way when the weights change
            tasks += [asyncio.ensure_future(client.generate(r)) for r in requests(max_tokens=350)]
            await asyncio.wait({change, *tasks[-4:]}, return_when=asyncio.FIRST_COMPLETED)
        return await asyncio.gather(*tasks)

    answers = asyncio.run(main())
    mixed = [a for a in answers if a.is_version_mixed]
    assert mixed and {a.policy_version for a in mixed} == {1}
    assert not any(a.is_version_mixed for a in ask(requests()))


def test_every_replica_is_asked_while_serve_hands_out_settings(served: Served) -> None:
    """Serve takes a replica off its list while it hands it a new `user_config`: a proof must not miss that replica."""
    served.sync(0)
    asked_by_serve = []
    for _ in range(8):
        change(open_list(), lambda apps: apps | {APP: _changed(apps[APP])})
        for _ in range(10):
            try:
                asked_by_serve.append(len(handle_of(APP).broadcast("statuses").results(timeout_s=10)))
            except DeploymentUnavailableError:
                asked_by_serve.append(0)
            (first,), (second,) = Broadcast(APP, "statuses").answers(2)
            assert first["pid"] != second["pid"]
    assert min(asked_by_serve) < 2, "Serve's own broadcast now waits for all of them: Broadcast can go"
    with pytest.raises(TimeoutError, match=rf"2 of 3 replicas of app '{APP}' answered 'statuses' in 0.3 s"):
        Broadcast(APP, "statuses").answers(3, timeout_s=0.3)


@pytest.mark.parametrize(("version", "fault", "message"), [(10, "nan", "not finite"), (11, "shape", "has shape")])
def test_bad_weights_are_kept_out_and_the_old_ones_serve_on(
    served: Served, version: int, fault: str, message: str
) -> None:
    served.sync(0)
    served.commit(version, noise=0.02, probe_of=0, fault=fault)
    with pytest.raises(SyncError, match=rf"refused version {version} and keeps 0.*{message}"):
        served.sync(version, old=0)
    assert {(s["state"], s["version"]) for s in replica_statuses(APP)} == {("bad", 0)}
    assert largest_error(served.ref(0).uri, ask(requests())) < 1e-3
    assert {p.verdict for p in served.sync(1, old=0)} == {"proven"}
    assert {s["state"] for s in replica_statuses(APP)} == {"ok"}


def test_a_version_that_storage_kept_from_the_replicas_is_taken_when_the_sync_is_repeated(served: Served) -> None:
    served.sync(0)
    weights = Path(served.commit(13, noise=0.02, seed=13).uri) / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    change(open_list(), lambda apps: _retargeted(apps, [served.target(13, old=0)]))
    while [s["state"] for s in replica_statuses(APP)] != ["bad", "bad"]:  # Serve tells one after the other
        time.sleep(0.1)
    weights.write_bytes(content)
    assert {p.verdict for p in served.sync(13, old=0)} == {"proven"}


def test_a_damaged_version_is_refused_before_anything_is_published(served: Served) -> None:
    served.sync(0)
    ref = served.commit(12, noise=0.02)
    with open(Path(ref.uri) / "model.safetensors", "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"ruin")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        served.sync(12, old=0)
    assert {(s["state"], s["wanted_version"]) for s in replica_statuses(APP)} == {("ok", 0)}


def test_a_skipped_sync_and_a_wrong_push_do_not_pass_as_the_new_version(served: Served) -> None:
    served.sync(0)
    with pytest.raises(SyncError, match="should serve version 1, says 0") as caught:
        served.prove(1, old=0)
    assert [p.verdict for p in caught.value.proofs] == ["failed"] * NUM_REPLICAS
    served.commit(20, noise=0.0, probe_of=1)  # claims to be version 1's policy, holds version 0's weights
    with pytest.raises(SyncError, match="should serve version 20, says 20; max"):
        served.sync(20, old=0)


def test_versions_that_no_probe_tells_apart_rest_on_their_hashes(served: Served) -> None:
    served.sync(0)
    served.commit(30, noise=1e-9)
    assert {p.verdict for p in served.sync(30, old=0)} == {"indistinguishable"}
    assert served.versions() == [30, 30]


def test_an_app_stands_back_through_syncs_and_restarts_until_it_comes_forward(served: Served) -> None:
    served.sync(0)
    before = {s["pid"] for s in replica_statuses(APP)}
    assert not any(s["low_priority"] for s in replica_statuses(APP))
    set_low_priority([APP], True, timeout_s=60)
    assert all(s["low_priority"] for s in replica_statuses(APP)) and {s["pid"] for s in replica_statuses(APP)} == before
    served.sync(1, old=0)
    assert all(s["low_priority"] for s in replica_statuses(APP)), "another version does not change the priority"
    os.kill(replica_statuses(APP)[0]["pid"], signal.SIGKILL)
    set_low_priority([APP], True, timeout_s=240)  # waits for the one that Serve starts in its place
    assert len({s["pid"] for s in replica_statuses(APP)} & before) == 1
    if os.getuid() == 0:
        there = {s["pid"] for s in replica_statuses(APP)}
        set_low_priority([APP], False, timeout_s=60)
        assert {s["pid"] for s in replica_statuses(APP)} == there, "nothing restarted"
    else:
        set_low_priority([APP], False, timeout_s=240)
    assert not any(s["low_priority"] for s in replica_statuses(APP)) and set(served.versions()) == {1}


def test_calls_to_engines_that_sleep_wait_and_those_under_way_go_on_with_an_empty_cache(served: Served) -> None:
    served.sync(1)

    async def main() -> list[Any]:
        client = ServeClient({"g": APP}, CallConfig())
        under_way = [asyncio.ensure_future(client.generate(r)) for r in requests(max_tokens=350)]
        await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        until = time.time() + 600
        apps = await asyncio.to_thread(put_to_sleep, [APP, "not-deployed"], until=until, timeout_s=60)
        assert apps == [APP]
        late = [asyncio.ensure_future(client.generate(r)) for r in requests(max_tokens=350)]
        answered, _ = await asyncio.wait(late, timeout=6)  # three health checks
        assert not answered
        statuses = await asyncio.to_thread(replica_statuses, APP)
        assert [(s["asleep_until"], s["version"]) for s in statuses] == [(until, 1)] * NUM_REPLICAS
        assert serve.status().applications[APP].status.value == "RUNNING"
        await asyncio.to_thread(wake_apps, [APP], timeout_s=60)
        return [*await asyncio.gather(*under_way), *await asyncio.gather(*late)]

    before = {s["pid"] for s in replica_statuses(APP)}
    answers = asyncio.run(main())
    assert {s["pid"] for s in replica_statuses(APP)} == before
    half = len(PROMPTS)
    assert {a.policy_version for a in answers} == {1} and not any(a.is_version_mixed for a in answers)
    assert max(largest_error(served.ref(1).uri, part) for part in (answers[:half], answers[half:])) < 1e-3


def test_a_sync_wakes_engines_and_a_replica_that_starts_again_sleeps_on_until_its_deadline(served: Served) -> None:
    served.sync(0)
    put_to_sleep([APP], until=time.time() + 600, timeout_s=60)
    os.kill(replica_statuses(APP)[0]["pid"], signal.SIGKILL)
    put_to_sleep([APP], until=time.time() + 601, timeout_s=240)  # waits for the one that Serve starts in its place
    proofs = served.sync(1, old=0)
    assert [p.verdict for p in proofs] == ["proven"] * NUM_REPLICAS
    assert [s["asleep_until"] for s in replica_statuses(APP)] == [None] * NUM_REPLICAS
    put_to_sleep([APP], until=time.time() + 3, timeout_s=60)
    answers = ask(requests())  # nobody wakes them: they wake by themselves
    assert {a.policy_version for a in answers} == {1}


def test_idle_engines_leave_the_cores_to_the_trainer(served: Served) -> None:
    roots = [psutil.Process(s["pid"]) for s in replica_statuses(APP)]
    family = [p for root in roots for p in (root, *root.children(recursive=True))]

    def used_s() -> float:
        return sum(sum(p.cpu_times()[:2]) for p in family)

    before = used_s()
    time.sleep(3)
    assert used_s() - before < 0.3, "two idle replicas use less than a tenth of a core"


@pytest.mark.parametrize("part", ["replica", "engine"])
def test_a_killed_replica_loses_no_request_and_returns_with_the_synced_version(served: Served, part: str) -> None:
    served.sync(1)
    victim = psutil.Process(replica_statuses(APP)[0]["pid"])
    family = victim.children(recursive=True)
    (engine,) = (p for p in family if "EngineCore" in p.name())

    async def main() -> list[Any]:
        client = ServeClient({"g": APP}, CallConfig(batch_max=1))
        calls = [replace(r, seed=seed) for seed in range(4) for r in requests(max_tokens=350)]
        engine.suspend()  # or the victim might be done with its calls before it is killed
        tasks = [asyncio.ensure_future(client.generate(call)) for call in calls]
        while not await asyncio.to_thread(_num_running, victim.pid):  # a router that is late passes it over
            tasks.append(asyncio.ensure_future(client.generate(calls[len(tasks) % len(calls)])))
        os.kill(victim.pid if part == "replica" else engine.pid, signal.SIGKILL)
        if part == "replica":
            engine.resume()
        return await asyncio.gather(*tasks)

    answers = asyncio.run(main())
    assert len(answers) >= 4 * len(PROMPTS) and max(a.num_attempts for a in answers) >= 2
    deadline = time.monotonic() + 240
    while not _is_replaced(victim.pid) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert served.versions() == [1, 1]
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, "the engine of a killed replica does not stay behind"
    proofs = served.prove(1, old=0)
    assert [p.verdict for p in proofs] == ["proven"] * NUM_REPLICAS


def test_a_busy_machine_repeats_no_call_though_all_together_take_longer_than_the_limit(served: Served) -> None:
    """200 tasks of two turns, the second prompt of the first completion, on engines that other processes leave little to."""
    served.sync(1)
    config = CallConfig(call_timeout_s=10)
    sampling = Sampling(max_tokens=350)

    async def main() -> tuple[list[int], Any]:
        client = ServeClient({"g": APP}, config, capacity={APP: 64 * NUM_REPLICAS})

        async def turn(task: int, prompt: list[int]) -> Completion:
            return await client.generate(
                GenerateRequest(
                    request_id=f"t{task}", model_group="g", prompt_token_ids=prompt, sampling=sampling, seed=task
                )
            )

        async def episode(task: int) -> int:
            first = await turn(task, PROMPTS[task % len(PROMPTS)])
            second = await turn(task, [*PROMPTS[task % len(PROMPTS)][:20], *first.token_ids[:100]])
            return first.num_attempts + second.num_attempts

        return list(await asyncio.gather(*(episode(task) for task in range(200)))), client.counts

    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * (os.cpu_count() or 1))]
    began = time.monotonic()
    try:
        attempts, counts = asyncio.run(main())
    finally:
        for process in others:
            process.kill()
            process.wait()
    assert time.monotonic() - began > config.call_timeout_s, "else a limit of the whole would not be passed"
    assert sum(attempts) <= 1.01 * 400
    assert (counts.num_calls, counts.num_late + counts.num_lost) == (400, sum(attempts) - 400)


def test_an_engine_that_stands_still_is_noticed_while_its_replica_lives(served: Served) -> None:
    served.sync(1)
    victim = psutil.Process(replica_statuses(APP)[0]["pid"])
    (engine,) = (p for p in victim.children(recursive=True) if "EngineCore" in p.name())

    async def main() -> tuple[list[Any], Any]:
        client = ServeClient({"g": APP}, CallConfig(call_timeout_s=10, batch_max=1))
        engine.suspend()
        tasks = [asyncio.ensure_future(client.generate(r)) for r in requests(max_tokens=32) * 2]
        try:
            async with asyncio.timeout(40):
                while not client.counts.num_late:
                    await asyncio.sleep(0.1)
        finally:
            engine.resume()
        return await asyncio.gather(*tasks), client.counts

    answers, counts = asyncio.run(main())
    assert max(a.num_attempts for a in answers) == 2 and counts.num_late >= 1 and counts.num_lost == 0


def test_a_sync_after_each_of_two_deaths_of_the_serve_controller_finds_the_same_engines(served: Served) -> None:
    served.sync(0)
    before = {status["pid"] for status in replica_statuses(APP)}
    for new, old in ((1, 0), (0, 1)):
        kill_controller()
        proofs = served.sync(new, old)
        assert {proof.pid for proof in proofs} == before
        assert [proof.verdict for proof in proofs] == ["proven"] * NUM_REPLICAS


def test_an_app_that_serve_gave_up_in_the_middle_of_a_sync_is_deployed_again(served: Served) -> None:
    served.sync(1)
    served.commit(40, noise=0.02, seed=40)
    start = Path(served.ref(0).uri)  # what a replica loads first
    aside = start.rename(start.with_name("aside"))
    seen: list[str] = []

    def give_back() -> None:
        deadline = time.monotonic() + 200
        while "DEPLOY_FAILED" not in seen and time.monotonic() < deadline:
            time.sleep(0.1)
            seen.append(serve.status().applications[APP].status.value)
        aside.rename(start)

    helper = threading.Thread(target=give_back)
    os.kill(replica_statuses(APP)[0]["pid"], signal.SIGKILL)
    helper.start()
    try:
        proofs = served.sync(40, timeout_s=300)
    finally:
        helper.join()
    assert "DEPLOY_FAILED" in seen
    assert [p.verdict for p in proofs] == ["proven"] * NUM_REPLICAS


def _num_running(pid: int) -> int:
    """The number of calls that the replica's engine has not answered."""
    return sum(status["num_running"] for status in replica_statuses(APP) if status["pid"] == pid)


def _is_replaced(pid: int) -> bool:
    """True once two replicas answer and none is the process `pid`."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        pids = {s["pid"] for s in replica_statuses(APP)}
    except (RayError, RayServeException, TimeoutError):
        return False
    return len(pids) == 2 and pid not in pids

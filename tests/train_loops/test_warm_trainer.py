"""The warm trainer on real Ray Train: jobs, a killed worker, a killed supervisor, stored results, bad jobs."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from safetensors.torch import load_file
from synthetic_traces import GROUP, rewards_of, sample_traces

from stores.files import read_file
from stores.journal.stage_results import TrainAnswer
from stores.traces.shown_advantages import ADVANTAGES_FILE
from stores.traces.store import TraceStore
from stores.types import ModelVersionRef, Purpose, Trace
from stores.weights.store import WeightStore
from tests.chaos import victims
from train_loops.config import (
    AdaptiveKLConfig,
    CriticConfig,
    DeepSpeedConfig,
    LossConfig,
    OptimizerConfig,
    TrainConfig,
)
from train_loops.engine.deepspeed_engine import Engine, join_workers, load_critic, load_policy
from train_loops.engine.models import Models
from train_loops.engine.run_checkpoints import CarriedState, resume
from train_loops.engine.warmstart import adopt
from train_loops.train_job import TrainJob
from train_loops.worker.trainer_handle import PROCESS_SETTINGS, TrainerHandle, TrainJobError, attach
from train_loops.worker.trainer_supervisor import _backend

pytestmark = pytest.mark.nightly

CONFIG = TrainConfig(optimizer=OptimizerConfig(lr=1e-3), microbatch_tokens=256, num_epochs=2, cpus_per_worker=0.1)


@dataclass
class Bench:
    """One store of each kind, a trainer, and the jobs it is given."""

    root: Path
    traces: TraceStore
    weights: WeightStore
    storage: str
    """Where Ray Train keeps checkpoints."""

    def store(self, name: str) -> WeightStore:
        """Another weight store."""
        return WeightStore(str(self.root / name))

    def attach(self, config: TrainConfig = CONFIG, run_name: str = "warm") -> TrainerHandle:
        return attach(name="shared", run_name=run_name, storage_path=self.storage, train=config)

    def job(
        self,
        parent: ModelVersionRef,
        *,
        run_id: str = "run",
        config: TrainConfig = CONFIG,
        change: Any = None,
        sampler: ModelVersionRef | None = None,
    ) -> TrainJob:
        """Samples from `sampler`, or else the parent, and jobs the parent's next version."""
        iteration, sampler = parent.version + 1, sampler or parent
        traces, _ = sample_traces(
            self.weights.fetch(sampler), run_id=run_id, iteration=iteration, version=sampler.version, num_tasks=4
        )
        traces = [change(t) for t in traces] if change else traces
        self.traces.write_episodes(traces)
        self.traces.write_rewards([rewards_of(t) for t in traces])
        key = {"run_id": run_id, "iteration": iteration, "purpose": Purpose.TRAIN}
        pinned = self.traces.pin_episodes(**key, team_key=f"v{sampler.version}")
        rewards = self.traces.pin_rewards(**key, credit_version="c1", traces=pinned)
        return TrainJob(
            job_id=f"{run_id}-{iteration}",
            run_id=run_id,
            iteration=iteration,
            model_group=GROUP,
            seed=iteration,
            parent=parent,
            version=iteration,
            traces=pinned,
            rewards=rewards,
            credit_kind="returns",
            train=config,
            traces_uri=self.traces.uri,
            weights_uri=self.weights.uri,
            sampled_by=sampler.version,
        )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, ray_local: None) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("bench")
    bench = Bench(root, TraceStore(str(root / "traces")), WeightStore(str(root / "weights")), str(root / "train"))
    bench.traces.create()
    yield bench
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith("trainer:shared:"):
            ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]), no_restart=True)


def weights(bench: Bench, ref: ModelVersionRef) -> torch.Tensor:
    tensors = load_file(bench.weights.fetch(ref) / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def shift_tokens(trace: Trace) -> Trace:
    turns = [replace(t, completion_token_ids=[(i + 1) % 300 for i in t.completion_token_ids]) for t in trace.turns]
    return replace(trace, turns=tuple(turns))


def test_zero_3_by_two_workers_resumes_on_one_at_stage_0_with_the_losses_of_one(bench: Bench, tiny_model: Path) -> None:
    one = CONFIG.model_copy(update={"algorithm": "ppo", "critic": CriticConfig(), "num_minibatches": 2})
    two = one.model_copy(update={"num_workers": 2, "deepspeed": DeepSpeedConfig(zero_stage=3)})
    ref = adopt(tiny_model, store=bench.store("weights-of-two"), model_group=GROUP, run_id="z3")
    alone = bench.store("weights-of-one")
    parent = adopt(tiny_model, store=alone, model_group=GROUP, run_id="z3")
    sharded = replace(bench, weights=bench.store("weights-of-two"))

    # Two workers at ZeRO-3; a job that is refused does not leave one of them waiting for the other.
    began = time.monotonic()
    handle = sharded.attach(two, run_name="z3")
    first_job = sharded.job(ref, run_id="z3", config=two)
    first = handle.run_job(first_job, 300)
    v1 = first.model
    print(f"two workers: first job after {time.monotonic() - began:.1f} s")
    began = time.monotonic()
    with pytest.raises(TrainJobError, match="trainer and engine differ"):
        handle.run_job(sharded.job(v1, run_id="bad", config=two, change=shift_tokens), 300)
    print(f"two workers: refused after {time.monotonic() - began:.1f} s")

    # One worker at stage 0 goes on from their checkpoint; and does all of it by itself, in another store.
    second_job = sharded.job(v1, run_id="z3", config=one)
    handle = sharded.attach(one, run_name="z3")
    resumed = handle.run_job(second_job, 300)
    pids = handle.status()["pids"]
    place = {"weights_uri": alone.uri, "train": one}
    expected = [handle.run_job(replace(first_job, **place, parent=parent), 300)]
    expected.append(handle.run_job(replace(second_job, **place, parent=expected[0].model), 300))
    for by_two, by_one in zip((first, resumed), expected, strict=True):
        for name in ("train/loss", "train/critic_loss", "train/grad_norm"):
            print(f"{name}: two workers, ZeRO-3: {by_two.metrics[name]:.8f}  one: {by_one.metrics[name]:.8f}")
            assert by_two.metrics[name] == pytest.approx(by_one.metrics[name], rel=1e-3)
        assert by_two.metrics["train/is_state_lost"] == by_one.metrics["train/is_state_lost"] == 0
        assert (
            weights(sharded, by_two.model) - weights(replace(bench, weights=alone), by_one.model)
        ).abs().max() < 5e-5

    # Other settings of learning: the same process, and the optimizer's state goes on.
    other = TrainConfig(optimizer=OptimizerConfig(lr=5e-4), deepspeed=DeepSpeedConfig(zero_stage=2), num_minibatches=4)
    third_job = sharded.job(resumed.model, run_id="z3", config=other)
    newest = {"weights_uri": alone.uri, "parent": expected[1].model}  # two checkpoints are kept: of `expected`
    third = sharded.attach(other, run_name="z3").run_job(replace(third_job, **newest), 120)
    assert (third.metrics["train/steps"], third.metrics["train/is_state_lost"]) == (4, 0)
    assert handle.status()["pids"] == pids
    handle.stop()


def test_the_reference_becomes_the_newest_version_by_schedule_also_in_a_trainer_that_starts_again(
    bench: Bench, tiny_model: Path
) -> None:
    config = CONFIG.model_copy(update={"loss": LossConfig(kl_in_loss_coef=0.1, reference_every=2)})
    bench = replace(bench, weights=bench.store("weights-compared"))
    ref, compared = adopt(tiny_model, store=bench.weights, model_group=GROUP, run_id="compared"), []
    handle = bench.attach(config, run_name="compared")
    for version in range(1, 5):
        if version == 4:
            handle.stop()
            handle = bench.attach(config, run_name="compared")
        done = handle.run_job(bench.job(ref, run_id="compared", config=config), 240)
        ref = done.model
        compared.append((bench.weights.manifest(ref).reference, done.metrics["train/kl_ref_k3"] < 1e-9))
    assert compared == [(0, True), (0, False), (2, True), (2, False)]
    handle.stop()


def test_a_trainer_stays_warm_survives_kills_and_refuses_bad_jobs(bench: Bench, tiny_model: Path) -> None:
    ref = adopt(tiny_model, store=bench.weights, model_group=GROUP, run_id="run")
    began = time.monotonic()
    handle = bench.attach()
    handle.wait_ready(300)
    print(f"cold start {time.monotonic() - began:.1f} s")

    began_at = time.time()
    first = handle.run_job(bench.job(ref), 120)
    assert first.metrics["train/logprob_gap_max"] < 1e-5
    assert first.metrics["train/steps"] == 2 and set(first.agents) == {"solver", "verifier"}
    assert list(first.parts) == ["load", "read", "learn", "store"]
    assert began_at <= first.parts["load"][0] < first.parts["store"][1] <= time.time()
    v1 = first.model
    bench.weights.verify(v1)
    manifest = bench.weights.manifest(v1)
    assert ADVANTAGES_FILE in manifest.files
    assert manifest.parent == 0 and Path(manifest.checkpoint, "policy.json").is_file()
    assert manifest.probe.sequences == bench.weights.manifest(ref).probe.sequences
    assert manifest.probe.logprobs != bench.weights.manifest(ref).probe.logprobs
    pids = handle.status()["pids"]

    # Warm: the same process, and the next job starts from memory.
    job = bench.job(v1)
    began = time.monotonic()
    second = handle.run_job(job, 120)
    print(f"warm job {time.monotonic() - began:.2f} s {second.metrics}")
    v2 = second.model
    assert handle.status()["pids"] == pids
    assert second.metrics["train/logprob_gap_max"] < 1e-5

    # The same job again, from another handle: the stored result, no training.
    again = bench.attach().run_job(job, 120)
    assert again.model == second.model
    assert again.metrics["train/loss"] == second.metrics["train/loss"]
    assert again.parts is None, "nothing was done"

    # Rows that the parent did not sample: refused with the reason, by the same process.
    with pytest.raises(TrainJobError, match="trainer and engine differ") as error:
        handle.run_job(bench.job(v2, run_id="bad", change=shift_tokens), 120)
    assert error.value.kind == "MismatchError"

    # A step that leaves no finite weight: no version is made of it, and the parent goes on below.
    far = CONFIG.model_copy(update={"optimizer": OptimizerConfig(lr=1e300)})
    with pytest.raises(TrainJobError, match=rf"version 3 of {GROUP} is not stored: tensor .* lower the learning rate"):
        handle.run_job(bench.job(v2, run_id="far", config=far), 120)
    assert bench.weights.ref(GROUP, 3) is None
    assert handle.status()["pids"] == pids

    # Killed in the middle: the job ends with the version that an unkilled trainer makes, digit for digit.
    job = bench.job(v2)
    done: list[TrainAnswer] = []
    began = time.monotonic()
    waiting = threading.Thread(target=lambda: done.append(handle.run_job(job, 240)))
    waiting.start()
    while not handle.status()["handed_out"]:
        time.sleep(0.01)
    os.kill(pids[0], signal.SIGKILL)
    waiting.join(240)
    print(f"job with a killed worker {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began > 2, "the job ended before the kill"
    [third] = done
    assert handle.status()["pids"] != pids
    assert third.metrics["train/steps"] == 2

    # The same jobs in another run, by a new trainer that has to load checkpoints: same weights, same optimizer.
    other = WeightStore(str(bench.root / "weights-of-a-copy"))
    for old in (ref, v1, v2):
        m = bench.weights.manifest(old)
        about = {"model_group": GROUP, "version": m.version, "parent": m.parent, "run_id": m.run_id}
        copied = other.commit(
            bench.weights.fetch(old), iteration=m.iteration, probe=m.probe, checkpoint=m.checkpoint, **about
        )
    bench.attach().stop()
    time.sleep(1)
    handle = bench.attach()
    unkilled = handle.run_job(replace(job, weights_uri=other.uri, parent=copied), 240)
    assert unkilled.metrics["train/loss"] == third.metrics["train/loss"]
    assert unkilled.metrics["train/grad_norm"] == third.metrics["train/grad_norm"]
    assert torch.equal(weights(bench, unkilled.model), weights(bench, third.model))
    assert not torch.equal(weights(bench, third.model), weights(bench, second.model))
    handle.stop()
    time.sleep(1)
    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)]
    assert not any(name.startswith("trainer:shared:") for name in names)


def test_jobs_on_rows_of_an_earlier_version_and_of_the_parent_in_turn_keep_the_engines(
    bench: Bench, tiny_model: Path
) -> None:
    warm = replace(bench, weights=bench.store("weights-of-a-lag"))
    ref = adopt(tiny_model, store=warm.weights, model_group=GROUP, run_id="lag")
    handle = warm.attach(run_name="lag")
    jobs, done, pids = [], [], []
    for is_behind in (False, True, False, True):
        parent = done[-1].model if done else ref
        sampler = warm.weights.ref(GROUP, parent.version - 1) if is_behind else parent
        jobs.append(warm.job(parent, run_id="lag", sampler=sampler))
        done.append(handle.run_job(jobs[-1], 300))
        pids.append(handle.status()["pids"])
        figures, note = done[-1].metrics, warm.weights.manifest(done[-1].model).note
        assert ("train/policy_gap_mean" in figures) == ("train/importance_weight" in figures) == is_behind
        assert ("train/logprob_gap_mean" in figures) != is_behind
        assert note == "dr_mas on 64 rows" + f" sampled by v{parent.version - 1}" * is_behind
    assert pids == pids[:1] * 4
    load_s = [result.metrics["train/load_s"] for result in done]
    print(f"seconds to load: {load_s}")
    assert max(load_s[1:]) < load_s[0] / 4, "the engines stay, whoever sampled"

    # Each job by a trainer of its own, which loads the parent's checkpoint: the same weights, digit for digit.
    cold = replace(bench, weights=bench.store("weights-of-a-cold-lag"))
    last = adopt(tiny_model, store=cold.weights, model_group=GROUP, run_id="lag")
    settings = CONFIG.model_copy(update={"keep_warm": False})
    for job, by_warm in zip(jobs, done, strict=True):
        by_cold = cold.attach(settings, run_name="cold-lag").run_job(
            replace(job, weights_uri=cold.weights.uri, parent=last), 300
        )
        assert by_cold.metrics["train/grad_norm"] == by_warm.metrics["train/grad_norm"]
        assert torch.equal(weights(cold, by_cold.model), weights(warm, by_warm.model))
        last = by_cold.model
        time.sleep(1)


@pytest.mark.test
def test_workers_wait_for_worker_0_as_long_as_a_job_may_take() -> None:
    train = CONFIG.model_copy(update={"num_workers": 2, "job_timeout_s": 7200.0})
    group = _backend(train.model_dump(mode="json", include=PROCESS_SETTINGS))
    assert group is not None and group.timeout_s == 7200


def test_what_a_checkpoint_that_is_gone_leaves_to_start_afresh_is_named(tiny_model: Path, tmp_path: Path) -> None:
    join_workers()
    settings, fresh = CONFIG.deepspeed, CarriedState(kl_coef=0.1)
    policy = Engine(load_policy(tiny_model, settings), optimizer=CONFIG.optimizer, config=settings)
    critic = Engine(load_critic(tiny_model, settings), optimizer=CONFIG.optimizer, config=settings)
    stored = {"kl_coef": 0.5, "num_critic_jobs": 2}
    for folder, engines in {"both": {"policy": policy, "critic": critic}, "policy": {"policy": policy}}.items():
        (tmp_path / folder).mkdir()
        for tag, engine in engines.items():
            engine.save(tmp_path / folder, tag=tag, state=stored)

    def resumed(folder: str, models: Models, **loss: Any) -> tuple[CarriedState, list[str]]:
        uri = str(tmp_path / folder) if folder else ""
        return resume(uri, models, state=fresh, loss=LossConfig(kl_in_reward_coef=0.1, **loss))

    models, critic_jobs = Models(policy=policy, critic=critic), CarriedState(kl_coef=0.1, num_critic_jobs=2)
    assert resumed("", models) == (fresh, [])
    assert resumed("both", models) == (critic_jobs, [])
    adapted = resumed("both", models, adaptive_kl=AdaptiveKLConfig())
    assert adapted == (CarriedState(kl_coef=0.5, num_critic_jobs=2), [])
    assert resumed("policy", models) == (fresh, ["critic"]), "a critic that starts afresh has its warm-up again"
    assert resumed("policy", Models(policy=policy)) == (critic_jobs, []), "of a value head on the policy's trunk"
    assert resumed("gone", models) == (fresh, ["optimizer", "critic"])
    assert resumed("gone", Models(policy=policy)) == (fresh, ["optimizer"])
    assert resumed("both", Models(policy=critic)) == (fresh, ["optimizer"])  # of another model


def test_another_place_replaces_the_trainer_and_a_critic_is_resumed_from_s3(
    bench: Bench, tiny_model: Path, s3_uri: str
) -> None:
    ppo = TrainConfig(
        algorithm="ppo",
        optimizer=OptimizerConfig(lr=1e-3),
        critic=CriticConfig(warmup_iterations=1),
        loss=LossConfig(kl_in_reward_coef=0.5, adaptive_kl=AdaptiveKLConfig(target=1.0, horizon=100)),
        num_minibatches=2,
    )
    ppo_bench = replace(bench, weights=WeightStore(f"{s3_uri}/weights"), storage=f"{s3_uri}/train")
    ref = adopt(tiny_model, store=ppo_bench.weights, model_group=GROUP, run_id="ppo")
    other = bench.attach()
    handle = ppo_bench.attach(ppo, run_name="ppo")
    first = handle.run_job(ppo_bench.job(ref, run_id="ppo", config=ppo), 240)
    with pytest.raises(ray.exceptions.RayActorError):
        other.status()
    v1 = first.model
    assert torch.equal(weights(ppo_bench, first.model), weights(ppo_bench, ref))
    assert "warm-up" in ppo_bench.weights.manifest(v1).note
    handle.stop()
    time.sleep(1)
    second = ppo_bench.attach(ppo, run_name="ppo").run_job(ppo_bench.job(v1, run_id="ppo", config=ppo), 240)
    v2 = second.model
    assert not torch.equal(weights(ppo_bench, second.model), weights(ppo_bench, first.model))
    before, critic = (
        json.loads(read_file(f"{ppo_bench.weights.manifest(version).checkpoint}/critic.json") or b"")
        for version in (v1, v2)
    )
    assert 0.5 > before["state"]["kl_coef"] > critic["state"].pop("kl_coef") > 0, "adapted in both jobs"
    assert critic["state"] == {"version": 2, "num_critic_jobs": 2} and critic["num_steps"] == 4
    ppo_bench.attach(ppo, run_name="ppo").stop()


def test_a_controller_killed_while_workers_start_leaves_no_reservation_behind(bench: Bench) -> None:
    # More than half of the CPUs: another start has room only once those of the dead one are free.
    more_than_half = ray.cluster_resources()["CPU"] / 2 + 0.5
    handle = bench.attach(CONFIG.model_copy(update={"cpus_per_worker": more_than_half}), run_name="large")
    while ray.available_resources()["CPU"] > more_than_half:
        time.sleep(0.02)
    assert handle.status()["pids"] == {}
    killed = victims.find("ray::TrainController", [os.getpid()])
    assert killed
    victims.kill(killed)
    handle.wait_ready(90)
    handle.stop()

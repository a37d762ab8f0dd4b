"""Two adapters of one base on a real engine: tokens, versions, proofs, faults; and an engine that adapters never reach."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_apps.config import CallConfig, ServeConfig
from serve_apps.engines.port import AdapterRoom
from serve_apps.policy.deployment import (
    PolicyAppSpec,
    ensure_apps,
    served_models,
    sync_apps,
)
from serve_apps.policy.proof import Limits, SyncError
from serve_apps.policy.proving import Target, prove_apps
from serve_apps.policy.serve_client import ServeClient
from stores.types import Completion, GenerateRequest, ModelVersionRef, Sampling
from stores.weights.manifest import Probe
from stores.weights.store import WeightStore
from tests.serve_apps.deployed_apps import remove_apps, replica_statuses
from train_loops.config import LoraConfig

pytestmark = pytest.mark.nightly

APP, DEAF = "adapters-test", "deaf-test"
GROUPS = ("solver", "verifier")
LORA = LoraConfig(rank=4, target_modules=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"))
SEQUENCES = tuple(tuple((i * 37 + j * 11) % 300 + 3 for j in range(32)) for i in range(3))
# Longer than a KV block, so that the prefix cache holds something that a new version must not find.
PROMPTS = [[(i * 7 + j * 3) % 300 + 3 for j in range(140)] for i in range(4)]


def trainer_logprobs(
    base: str, adapter: str | None, sequences: Sequence[Sequence[int]]
) -> tuple[tuple[float, ...], ...]:
    """What a trainer makes of the sequences: base and adapter in peft."""
    from train_loops.config import DeepSpeedConfig
    from train_loops.engine.adapters import load_adapted
    from train_loops.engine.deepspeed_engine import load_model

    model = (
        load_model(base, DeepSpeedConfig()) if adapter is None else load_adapted(base, adapter, DeepSpeedConfig()).model
    )
    rows = []
    for tokens in sequences:
        with torch.no_grad():
            logprobs = model.eval()(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)
        rows.append(tuple(float(logprobs[i, token]) for i, token in enumerate(tokens[1:])))
    return tuple(rows)


@dataclass
class Served:
    """The store, and the apps on one base."""

    store: WeightStore
    base: ModelVersionRef
    scratch: Path
    refs: dict[tuple[str, int], ModelVersionRef] = field(default_factory=dict)

    def commit(self, group: str, version: int, *, noise: float, fault: str = "") -> ModelVersionRef:
        """An adapter with noise in B, or with a fault."""
        from train_loops.config import DeepSpeedConfig
        from train_loops.engine.adapters import make_adapter
        from train_loops.engine.deepspeed_engine import load_model

        folder = self.scratch / f"{group}-{version}"
        seed = GROUPS.index(group) * 100 + version
        make_adapter(load_model(self.base.uri, DeepSpeedConfig()), LORA, seed=seed, out=folder)
        file = folder / "adapter_model.safetensors"
        tensors, generator = load_file(file), torch.Generator().manual_seed(seed)
        for name in [name for name in tensors if ".lora_B." in name]:
            tensors[name] = noise * torch.randn(tensors[name].shape, generator=generator)
        save_file(tensors, file, metadata={"format": "pt"})
        logprobs = trainer_logprobs(self.base.uri, str(folder), SEQUENCES)
        if fault == "nan":
            tensors[min(tensors)][0, 0] = float("nan")
        if fault == "shape":
            tensors[min(tensors)] = tensors[min(tensors)][:, :-1].clone()
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.MonkeyPatch.context() as patch:
            if fault == "nan":  # as a store of another program would have it
                patch.setattr("stores.weights.store.refuse_not_finite", lambda *_, **__: None)
            self.refs[group, version] = self.store.commit(
                folder, model_group=group, version=version, parent=None, run_id="r", iteration=version,
                probe=Probe(sequences=SEQUENCES, logprobs=logprobs), base=self.base,
            )  # fmt: skip
        return self.refs[group, version]

    def targets(self, versions: Mapping[str, int], old: int | None = None, app: str = APP) -> list[Target]:
        before = {group: None if old is None else self.refs[group, old] for group in versions}
        limits = Limits(tolerance=1e-3, noise=2e-5)
        return [Target(app=app, model=self.refs[g, v], before=before[g], limits=limits) for g, v in versions.items()]

    def sync(self, versions: Mapping[str, int], old: int | None = None, app: str = APP) -> list[Any]:
        return sync_apps(self.targets(versions, old, app), self.store, timeout_s=60)

    def spec(self, name: str, **engine: Any) -> PolicyAppSpec:
        return PolicyAppSpec(
            name=name,
            model_group="shared",
            model=self.base,
            serve=ServeConfig(kv_cache_gib=0.2, max_num_seqs=64, engine=engine),
            adapters={group: self.refs[group, 0] for group in GROUPS},
            room=AdapterRoom(model_groups=GROUPS, max_rank=4, target_modules=LORA.target_modules),
        )


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, ray_local: None) -> Iterator[Served]:
    from train_loops.engine.warmstart import adopt

    scratch = tmp_path_factory.mktemp("adapters")
    store = WeightStore(str(scratch / "weights"))
    served = Served(
        store, adopt(tiny_model, store=store, model_group="shared", run_id="r", sequences=SEQUENCES), scratch
    )
    for group in GROUPS:
        for version, noise in ((0, 0.0), (1, 0.1), (2, 0.1)):
            served.commit(group, version, noise=noise)
    specs = [served.spec(APP), served.spec(DEAF, lora_target_modules=["o_proj"])]
    ensure_apps(specs, state_file=scratch / "apps.json", timeout_s=240)
    yield served
    remove_apps([APP, DEAF])


def ask(groups: Sequence[str], max_tokens: int = 16) -> dict[str, list[Any]]:
    """Every prompt to every group, all at once."""

    async def main() -> dict[str, list[Any]]:
        client = ServeClient(dict.fromkeys(GROUPS, APP), CallConfig())
        calls = {
            group: [
                client.generate(
                    GenerateRequest(request_id=f"{group}{i}", model_group=group, prompt_token_ids=prompt,
                                    sampling=Sampling(max_tokens=max_tokens), seed=i)
                )
                for i, prompt in enumerate(PROMPTS)
            ]
            for group in groups
        }  # fmt: skip
        gathered = [asyncio.gather(*of_group, return_exceptions=True) for of_group in calls.values()]
        return dict(zip(calls, await asyncio.gather(*gathered), strict=True))

    return asyncio.run(main())


def largest_error(served: Served, ref: ModelVersionRef, answers: Sequence[Completion]) -> float:
    """Largest |difference| of the answers' logprobs to the trainer's."""
    full = [[*prompt, *a.token_ids] for prompt, a in zip(PROMPTS, answers, strict=True)]
    exact = trainer_logprobs(served.base.uri, ref.uri, full)
    return max(
        abs(x - y)
        for prompt, a, row in zip(PROMPTS, answers, exact, strict=True)
        for x, y in zip(a.logprobs, row[len(prompt) - 1 :], strict=True)
    )


def test_each_group_answers_through_its_own_adapter_with_the_trainers_logprobs(served: Served) -> None:
    served.sync({"solver": 1, "verifier": 1})
    answers = ask(GROUPS)
    for group in GROUPS:
        assert largest_error(served, served.refs[group, 1], answers[group]) < 1e-4
        assert {a.policy_version for a in answers[group]} == {1} and not any(a.is_version_mixed for a in answers[group])
    assert largest_error(served, served.refs["solver", 1], answers["verifier"]) > 0.01, "they are two policies"


def test_a_sync_loads_adapters_in_place_and_proves_each_through_itself(served: Served) -> None:
    served.sync({"solver": 1, "verifier": 1})
    before = {s["pid"] for s in replica_statuses(APP)}
    ask(GROUPS)  # fills the prefix cache with keys and values of version 1
    proofs = served.sync({"solver": 2, "verifier": 2}, old=1)
    assert sorted((p.model_group, p.version, p.verdict) for p in proofs) == [
        ("solver", 2, "proven"), ("verifier", 2, "proven")
    ]  # fmt: skip
    assert {p.pid for p in proofs} == before, "nothing restarted"
    assert all(p.max_difference_new < 1e-4 < 0.05 < p.max_difference_old for p in proofs)
    answers = ask(GROUPS)
    for group in GROUPS:
        assert largest_error(served, served.refs[group, 2], answers[group]) < 1e-4, "nothing cached is of version 1"


def test_requests_under_way_end_with_the_version_they_began_with(served: Served) -> None:
    served.sync({"solver": 1, "verifier": 1})

    async def main() -> list[Completion]:
        client = ServeClient(dict.fromkeys(GROUPS, APP), CallConfig())
        change = asyncio.ensure_future(asyncio.to_thread(served.sync, {"solver": 2}, 1))
        tasks: list[asyncio.Task[Completion]] = []
        while not change.done():
            tasks += [
                asyncio.ensure_future(
                    client.generate(
                        GenerateRequest(request_id=f"r{i}", model_group="solver", prompt_token_ids=prompt,
                                        sampling=Sampling(max_tokens=200), seed=i)
                    )
                )
                for i, prompt in enumerate(PROMPTS)
            ]  # fmt: skip
            await asyncio.wait({change, *tasks[-4:]}, return_when=asyncio.FIRST_COMPLETED)
        await change
        return await asyncio.gather(*tasks)

    answers = asyncio.run(main())
    assert {a.policy_version for a in answers} <= {1, 2} and not any(a.is_version_mixed for a in answers)
    for start in range(0, len(answers), len(PROMPTS)):
        batch = answers[start : start + len(PROMPTS)]
        for version in {a.policy_version for a in batch}:
            if len({a.policy_version for a in batch}) == 1:
                assert largest_error(served, served.refs["solver", version], batch) < 1e-4


@pytest.mark.parametrize(("version", "fault", "message"), [(10, "nan", "not finite"), (11, "shape", "has shape")])
def test_a_bad_adapter_is_kept_out_and_the_old_one_serves_on(
    served: Served, version: int, fault: str, message: str
) -> None:
    served.sync({"solver": 1, "verifier": 1})
    served.commit("solver", version, noise=0.1, fault=fault)
    with pytest.raises(SyncError, match=rf"'solver' refused version {version} and keeps 1.*{message}"):
        served.sync({"solver": version, "verifier": 2}, old=1)
    assert sorted((s["model_group"], s["state"], s["version"]) for s in replica_statuses(APP)) == [
        ("solver", "bad", 1), ("verifier", "ok", 2)
    ]  # fmt: skip
    assert largest_error(served, served.refs["solver", 1], ask(["solver"])["solver"]) < 1e-4
    assert {p.verdict for p in served.sync({"solver": 2}, old=1)} == {"proven"}


def test_adapters_that_never_reach_the_engine_fail_the_sync(served: Served) -> None:
    """The engine of this app takes adapters and applies them to no layer, without a word: it answers as the base does."""
    assert {p.verdict for p in served.sync({"solver": 0, "verifier": 0}, app=DEAF)} <= {"proven", "indistinguishable"}
    with pytest.raises(SyncError) as caught:
        served.sync({"solver": 1, "verifier": 1}, old=0, app=DEAF)
    failed = {p.model_group: p for p in caught.value.proofs if p.verdict == "failed"}
    assert set(failed) == set(GROUPS)
    assert all(
        p.version == 1 and p.max_difference_new > 0.01 > 1e-4 > (p.max_difference_old or 0) for p in failed.values()
    )
    assert "model group 'solver' should serve version 1, says 1" in str(caught.value)


def test_a_replica_that_is_started_again_has_the_synced_adapters(served: Served) -> None:
    import signal
    import time

    served.sync({"solver": 2, "verifier": 1})
    (pid,) = {s["pid"] for s in replica_statuses(APP)}
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 240
    apps = dict.fromkeys(GROUPS, APP)
    while time.monotonic() < deadline:
        models = {group: [v for v, _ in found.values()] for group, found in served_models(apps).items()}
        if models == {"solver": [2], "verifier": [1]} and {s["pid"] for s in replica_statuses(APP)} != {pid}:
            break
        time.sleep(0.5)
    proofs = prove_apps(served.targets({"solver": 2, "verifier": 1}), served.store)
    assert {p.verdict for p in proofs} == {"proven"}

"""One replica of a policy app without Ray, on the engine of transformers: requests, versions, proofs, faults, sleep."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import serve
from safetensors.torch import load_file, save_file

from serve_apps.config import ServeConfig
from serve_apps.engines.port import Piece
from serve_apps.engines.transformers_engine import TransformersEngine
from serve_apps.policy.deployment import user_config
from serve_apps.policy.policy_app import Policy, PolicyArgs
from serve_apps.policy.proof import judge
from stores.types import GenerateRequest, ModelVersionRef, Sampling
from stores.weights.manifest import Probe
from stores.weights.store import WeightStore

pytestmark = pytest.mark.fast

SETTINGS = ServeConfig(engine_kind="transformers", max_model_len=64)
SEQUENCES = ((5, 9, 30, 7, 22, 8, 41, 12), (3, 8, 8, 100, 7))


class Versions:
    """Versions of one model group in a store, each with other weights and the probe of a plain forward."""

    def __init__(self, source: Path, scratch: Path) -> None:
        self.source, self.scratch = source, scratch
        self.store = WeightStore(str(scratch / "weights"))

    def commit(self, version: int) -> ModelVersionRef:
        folder = shutil.copytree(self.source, self.scratch / str(version))
        file, generator = folder / "model.safetensors", torch.Generator().manual_seed(version)
        tensors = load_file(file)
        moved = {name: t + 0.02 * version * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
        save_file(moved, file, metadata={"format": "pt"})
        logprobs = asyncio.run(TransformersEngine(SETTINGS, folder, version=0).probe({"g": SEQUENCES}))["g"]
        probe = Probe(sequences=SEQUENCES, logprobs=tuple(map(tuple, logprobs)))
        return self.store.commit(
            folder, model_group="g", version=version, parent=None, run_id="r", iteration=version, probe=probe
        )


@pytest.fixture(scope="module")
def versions(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Versions, list[ModelVersionRef]]:
    versions = Versions(tiny_model, tmp_path_factory.mktemp("replica"))
    return versions, [versions.commit(version) for version in range(3)]


@pytest.fixture(autouse=True)
def replica_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(replica_tag="one", app_name="app"))


def played(first: ModelVersionRef, scene: Callable[[Any], Awaitable[None]]) -> None:
    async def main() -> None:
        args = PolicyArgs(model_group="g", model=first, serve=SETTINGS)
        replica = Policy.func_or_class(args.to_dict())  # type: ignore[attr-defined]
        await replica.reconfigure(user_config(first))
        async with asyncio.timeout(60):
            await scene(replica)

    asyncio.run(main())


def requests(num: int, max_tokens: int = 8) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id="", model_group="g", prompt_token_ids=[5, 6, i], sampling=Sampling(max_tokens=max_tokens), seed=i
        )
        for i in range(num)
    ]


async def answers(replica: Any, asked: list[GenerateRequest]) -> dict[int, Piece]:
    return {
        place: piece
        async for message in replica.generate(asked)
        if isinstance(message, list)
        for place, piece in message
    }


def test_requests_come_back_by_their_places_and_one_that_does_not_fit_fails_alone(versions: Any) -> None:
    async def scene(replica: Any) -> None:
        pieces = await answers(replica, [*requests(3), *requests(1, max_tokens=80)])
        assert sorted(pieces) == [0, 1, 2, 3]
        assert {pieces[i].policy_version for i in range(3)} == {0}
        assert pieces[3].finish_reason == "context" and "max_model_len = 64 by 19" in pieces[3].error
        again = await answers(replica, requests(3))
        assert [again[i] for i in range(3)] == [pieces[i] for i in range(3)], "seeds decide"
        (status,) = await replica.statuses()
        assert (status["num_running"], status["version"], status["state"]) == (0, 0, "ok")

    played(versions[1][0], scene)


def test_a_new_version_is_served_in_place_and_proven_by_its_probe(versions: Any) -> None:
    kept, refs = versions

    async def scene(replica: Any) -> None:
        before = await answers(replica, requests(1))
        await replica.reconfigure(user_config(refs[1]))
        (status,), logprobs = await replica.probe({"g": SEQUENCES})
        assert (status["version"], status["manifest_sha256"]) == (1, refs[1].manifest_sha256)
        old, new = (kept.store.manifest(ref).probe.logprobs for ref in refs[:2])
        verdict, to_new, to_old = judge(logprobs["g"], new, logprobs["g"], old, tolerance=1e-3, noise=2e-5)
        assert verdict == "proven" and to_new < 1e-5 < 1e-2 < to_old
        after = await answers(replica, requests(1))
        assert after[0].policy_version == 1 and after[0].logprobs != before[0].logprobs

    played(refs[0], scene)


def test_a_damaged_version_is_kept_out_until_its_storage_answers(versions: Any) -> None:
    _, refs = versions
    weights = Path(refs[2].uri) / "model.safetensors"
    content = weights.read_bytes()

    async def scene(replica: Any) -> None:
        weights.unlink()
        await replica.reconfigure(user_config(refs[2]))
        (status,) = await replica.statuses()
        assert (status["state"], status["version"], status["wanted_version"]) == ("bad", 0, 2) and status["error"]
        assert (await answers(replica, requests(1)))[0].policy_version == 0
        weights.write_bytes(content)
        await replica.retry()
        (status,) = await replica.statuses()
        assert (status["state"], status["version"]) == ("ok", 2)

    played(refs[0], scene)


def test_requests_wait_while_a_replica_sleeps_and_it_wakes_by_itself_at_its_deadline(versions: Any) -> None:
    _, refs = versions

    async def scene(replica: Any) -> None:
        until = time.time() + 0.5
        await replica.reconfigure(user_config(refs[0]) | {"asleep_until": until})
        (status,) = await replica.statuses()
        assert status["asleep_until"] == until
        pieces = await answers(replica, requests(1))
        assert pieces[0].token_ids and time.time() >= until
        (status,) = await replica.statuses()
        assert status["asleep_until"] is None

    played(refs[0], scene)

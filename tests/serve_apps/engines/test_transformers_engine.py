"""The engine of transformers on a tiny model: streams, seeds, forms, refusals, new weights, adapters, sleep."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_apps.config import ServeConfig
from serve_apps.engines.port import REFUSED, AdapterRoom, Piece
from serve_apps.engines.transformers_engine import NOTHING_LEFT, TransformersEngine
from stores.types import GenerateRequest, ModelVersionRef, Sampling

pytestmark = pytest.mark.fast

SETTINGS = ServeConfig(engine_kind="transformers")
REQUEST = GenerateRequest(
    request_id="r", model_group="g", prompt_token_ids=[5, 6, 7], sampling=Sampling(max_tokens=12), seed=3
)
SEQUENCE = [[5, 9, 30, 7, 22, 8]]


def ref(version: int, group: str = "g") -> ModelVersionRef:
    return ModelVersionRef(model_group=group, version=version, uri="u", manifest_sha256=f"{version}" * 64)


def change(file: Path, **values: Any) -> None:
    """Writes values into a file of JSON."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


async def pieces(engine: TransformersEngine, request: GenerateRequest) -> list[Piece]:
    return [piece async for piece in engine.generate(request)]


def played(folder: Path, scene: Callable[[TransformersEngine], Awaitable[Any]], **more: Any) -> Any:
    return asyncio.run(scene(TransformersEngine(SETTINGS, folder, version=0, **more)))  # type: ignore[arg-type]


def test_a_stream_has_the_tokens_of_the_whole_one_by_one(tiny_model: Path) -> None:
    async def scene(engine: TransformersEngine) -> None:
        (whole,) = await pieces(engine, REQUEST)
        streamed = await pieces(engine, replace(REQUEST, is_streamed=True, top_logprobs=2))
        assert [token for piece in streamed for token in piece.token_ids] == whole.token_ids
        assert [value for piece in streamed for value in piece.logprobs] == whole.logprobs
        assert {len(piece.token_ids) for piece in streamed} == {1}
        assert all(len(top) == 2 for piece in streamed for top in piece.top_logprobs)
        assert [piece.finish_reason for piece in streamed][:-1] == [""] * (len(streamed) - 1)
        assert streamed[-1].finish_reason == whole.finish_reason in ("stop", "length")
        (other,) = await pieces(engine, replace(REQUEST, seed=4))
        assert other.token_ids != whole.token_ids

    played(tiny_model, scene)


def test_who_leaves_ends_the_sampling(tiny_model: Path) -> None:
    async def scene(engine: TransformersEngine) -> None:
        long = replace(REQUEST, is_streamed=True, sampling=Sampling(max_tokens=400), settings={"ignore_eos": True})
        stream = engine.generate(long)
        await anext(stream)
        assert set(engine.progress()) == {"r"}
        await stream.aclose()
        async with asyncio.timeout(2):  # its 400 tokens take longer
            await pieces(engine, replace(REQUEST, sampling=Sampling(max_tokens=1)))
        assert not engine.progress()

    played(tiny_model, scene)


def test_nothing_is_kept_of_a_request_whose_caller_left_within_a_token(tiny_model: Path) -> None:
    async def scene(engine: TransformersEngine) -> None:
        long = replace(REQUEST, is_streamed=True, sampling=Sampling(max_tokens=400), settings={"ignore_eos": True})
        for number in range(30):
            stream = engine.generate(replace(long, request_id=str(number)))
            await anext(stream)
            await stream.aclose()
        await pieces(engine, replace(REQUEST, sampling=Sampling(max_tokens=1)))
        assert not engine.progress()

    played(tiny_model, scene)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_token_ids": [5, 100_000]}, "token id 100000 is out of vocabulary"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"settings": {"bad_words": ["x"]}}, "bad_words is no setting that this engine knows"),
        ({"settings": {"logit_bias": {100_000: 1.0}}}, "token id 100000 is out of vocabulary"),
        ({"settings": {"allowed_token_ids": [-1]}}, "token id -1 is out of vocabulary"),
        ({"settings": {"stop_token_ids": [100_000], "min_tokens": 1}}, "token id 100000 is out of vocabulary"),
        ({"settings": {"min_tokens": 13}}, "take 0 <= min_tokens <= max_tokens"),
        ({"sampling": Sampling(max_tokens=0)}, "at least 1 max_tokens"),
        ({"settings": {"min_tokens": 1, "allowed_token_ids": [2]}}, "leave no token that may come next"),
        ({"sampling": Sampling(max_tokens=1, constraint='{"regex": "(", "end_ids": [2]}')}, "no grammar of the form"),
    ],
)
def test_a_request_that_cannot_run_is_refused_alone(tiny_model: Path, change: dict[str, Any], message: str) -> None:
    async def scene(engine: TransformersEngine) -> list[Piece]:
        bad, good = await asyncio.gather(pieces(engine, replace(REQUEST, **change)), pieces(engine, REQUEST))
        assert good[0].token_ids
        return bad

    (piece,) = played(tiny_model, scene)
    assert piece.finish_reason == REFUSED and message in piece.error


def test_ends_are_tokens_of_the_model_and_of_the_request_after_the_least_number(tiny_model: Path) -> None:
    async def scene(engine: TransformersEngine) -> None:
        bias = {"logit_bias": {2: 100.0}}
        (ended,) = await pieces(engine, replace(REQUEST, settings=bias))
        assert (ended.token_ids, ended.finish_reason) == ([2], "stop")
        (later,) = await pieces(engine, replace(REQUEST, settings=bias | {"min_tokens": 3}))
        assert len(later.token_ids) == 4 and later.token_ids[-1] == 2 not in later.token_ids[:-1]
        own = {"logit_bias": {9: 100.0}, "stop_token_ids": [9], "ignore_eos": True}
        (named,) = await pieces(engine, replace(REQUEST, settings=own))
        assert (named.token_ids, named.finish_reason) == ([9], "stop")

    played(tiny_model, scene)


def test_a_finished_form_that_must_go_on_ends(tiny_model: Path) -> None:
    form = Sampling(max_tokens=12, constraint='{"regex": "ab", "end_ids": [2]}')

    async def scene(engine: TransformersEngine) -> None:
        (whole,) = await pieces(engine, replace(REQUEST, sampling=form))
        (piece,) = await pieces(engine, replace(REQUEST, sampling=form, settings={"min_tokens": 8}))
        assert whole.finish_reason == "stop" and [*piece.token_ids, 2] == whole.token_ids
        assert (piece.finish_reason, piece.error) == (REFUSED, NOTHING_LEFT)

    played(tiny_model, scene)


def test_new_weights_serve_from_the_next_request_on_and_bad_ones_are_kept_out(tiny_model: Path, tmp_path: Path) -> None:
    folders = [shutil.copytree(tiny_model, tmp_path / name) for name in ("next", "nan", "shape", "config")]
    for folder in folders:
        file = folder / "model.safetensors"
        tensors = {name: tensor + 0.02 for name, tensor in load_file(file).items()}
        if folder.name == "nan":
            tensors["model.norm.weight"][0] = float("nan")
        if folder.name == "shape":
            tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
        if folder.name == "config":
            change(folder / "config.json", intermediate_size=256)
        save_file(tensors, file, metadata={"format": "pt"})

    async def scene(engine: TransformersEngine) -> None:
        before = await engine.probe({"g": SEQUENCE})
        for folder, message in zip(folders[1:], ("not finite", "has shape", "does not fit"), strict=True):
            with pytest.raises(ValueError, match=message):
                await engine.load(ref(1), folder)
        assert await engine.probe({"g": SEQUENCE}) == before
        await engine.load(ref(1), folders[0])
        assert await engine.probe({"g": SEQUENCE}) != before
        (piece,) = await pieces(engine, REQUEST)
        assert piece.policy_version == 1

    played(tiny_model, scene)


def test_groups_answer_by_their_adapters_and_a_new_version_replaces_the_old(tiny_model: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folders = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(tiny_model)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
        model.save_pretrained(tmp_path / str(seed))
        folders.append(tmp_path / str(seed))
    room = AdapterRoom(model_groups=("a", "b"), max_rank=4, target_modules=("q_proj",))

    async def scene(engine: TransformersEngine) -> None:
        base = (await engine.probe({"a": SEQUENCE}))["a"]
        await engine.load(ref(1, "a"), folders[0])
        await engine.load(ref(1, "b"), folders[1])
        first = await engine.probe({"a": SEQUENCE, "b": SEQUENCE, "nobody": SEQUENCE})
        assert first["nobody"] == base and first["a"] != base != first["b"] != first["a"]
        await engine.load(ref(2, "a"), folders[2])
        second = await engine.probe({"a": SEQUENCE, "b": SEQUENCE})
        assert second["b"] == first["b"] and second["a"] not in (first["a"], base)
        answers = [(await pieces(engine, replace(REQUEST, model_group=group)))[0] for group in "ab"]
        assert [answer.policy_version for answer in answers] == [2, 1]

    played(tiny_model, scene, room=room)


def test_an_adapter_that_does_not_fit_leaves_no_trace(tiny_model: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(tmp_path / "good")
    bad = shutil.copytree(tmp_path / "good", tmp_path / "bad")
    change(bad / "adapter_config.json", rank_pattern={"v_proj": 8})
    room = AdapterRoom(model_groups=("a", "b"), max_rank=8, target_modules=("q_proj", "v_proj"))

    async def scene(engine: TransformersEngine) -> None:
        for _ in range(2):  # the first adapter of the base, and one beside another
            before = await engine.probe({"a": SEQUENCE, "b": SEQUENCE})
            with pytest.raises(ValueError, match="does not fit"):
                await engine.load(ref(1, "b"), bad)
            assert await engine.probe({"a": SEQUENCE, "b": SEQUENCE}) == before
            await engine.load(ref(1, "a"), tmp_path / "good")
        await engine.load(ref(1, "b"), tmp_path / "good")
        after = await engine.probe({"a": SEQUENCE, "b": SEQUENCE})
        assert after["b"] == after["a"] == before["a"] != before["b"]

    played(tiny_model, scene, room=room)


def test_a_gpu_is_given_back_while_it_sleeps(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(None))

    async def scene(engine: TransformersEngine) -> None:
        await engine.sleep()
        assert not given_back
        engine._settings = SETTINGS.model_copy(update={"gpus": 1})
        await engine.sleep()
        assert len(given_back) == 1

    played(tiny_model, scene)


def test_requests_wait_while_it_sleeps(tiny_model: Path) -> None:
    async def scene(engine: TransformersEngine) -> None:
        await engine.sleep()
        waiting = asyncio.ensure_future(pieces(engine, REQUEST))
        await asyncio.wait({waiting}, timeout=0.05)
        assert not waiting.done()
        await engine.wake()
        assert (await waiting)[0].token_ids

    played(tiny_model, scene)

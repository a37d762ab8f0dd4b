"""engine_answers: a kind of engine, a model folder -> its answers to requests of many kinds, as JSON on stdout.

python -m tests.serve_apps.engines.engine_answers KIND FOLDER NEXT_FOLDER < PROMPTS
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve_apps.config import ServeConfig
from serve_apps.engines.port import Engine, Piece, engine_class
from stores.traces.conventions import constraint_of
from stores.types import GenerateRequest, ModelVersionRef, Sampling

LENGTH = 16
"""Tokens of a greedy completion."""
TOP = 5
ONE: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 0.3},
    "top_p": {"temperature": 0.9, "top_p": 0.3},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.9},
    "filters": {"temperature": 1.4, "top_k": 40, "top_p": 0.9, "min_p": 0.1},
    "choice": {"constraint": constraint_of([35, 9, 40])},
    "filtered choice": {"constraint": constraint_of([35, 9, 40]), "top_p": 0.3},
    "form": {"constraint": json.dumps({"regex": "[0-9]{2}", "end_ids": [2]})},
    "never": {
        "constraint": json.dumps({"regex": ".{2,60}", "end_ids": [2], "never": [0, 1]}),
        "settings": {"logit_bias": {0: 50.0, 1: 50.0}},
    },
    "repetition": {"settings": {"repetition_penalty": 1.7}},
    "bias": {"settings": {"logit_bias": {7: 4.0, 11: -2.5}}},
    "allowed": {"settings": {"allowed_token_ids": [5, 9, 11, 23]}},
    "min_tokens": {"settings": {"min_tokens": 1, "logit_bias": {2: 50.0}}},
}
"""Settings under which the first token's distribution is told, whatever is sampled from it."""


def main(kind: str, folder: Path, next_folder: Path, prompts: Sequence[list[int]]) -> None:
    """Prints what an engine answers with the weights of `folder`, and its proof with those of `next_folder`."""
    settings = ServeConfig(engine_kind=kind, max_model_len=256, max_num_seqs=32, kv_cache_gib=0.3)
    os.environ |= engine_class(kind).environment(settings, threads=2)
    engine = engine_class(kind)(settings, folder, version=0)
    answers = asyncio.run(_answers(engine, next_folder, prompts))
    print("ANSWERS " + json.dumps(answers), flush=True)
    engine.close()
    os._exit(0)  # threads of an engine are not waited for


async def _answers(engine: Engine, next_folder: Path, prompts: Sequence[list[int]]) -> dict[str, Any]:
    await engine.begin()
    greedy = await asyncio.gather(*(_one(engine, f"g{i}", ids, {"temperature": 0.0}) for i, ids in enumerate(prompts)))
    first = {
        name: await asyncio.gather(
            *(_one(engine, f"{name}{i}", ids, settings, only_first=True) for i, ids in enumerate(prompts[:4]))
        )
        for name, settings in ONE.items()
    }
    before = await engine.probe({"g": prompts[:8]})
    version = ModelVersionRef(model_group="g", version=1, uri=str(next_folder), manifest_sha256="1" * 64)
    await engine.load(version, next_folder)
    after = await engine.probe({"g": prompts[:8]})
    swapped = await _one(engine, "swapped", prompts[0], {"temperature": 0.0})
    return {"greedy": greedy, "first": first, "probes": [before["g"], after["g"]], "swapped": swapped}


async def _one(
    engine: Engine, request_id: str, prompt: list[int], settings: dict[str, Any], *, only_first: bool = False
) -> dict[str, Any]:
    more = {name: value for name, value in settings.items() if name != "settings"}
    request = GenerateRequest(
        request_id=request_id,
        model_group="g",
        prompt_token_ids=prompt,
        sampling=Sampling(max_tokens=1 if only_first else LENGTH, **more),
        seed=7,
        settings=settings.get("settings", {}),
        top_logprobs=TOP if only_first else 0,
    )
    pieces: list[Piece] = [piece async for piece in engine.generate(request)]
    (piece,) = pieces
    assert not piece.error, (request_id, piece.error)
    if only_first:
        top = {str(token): value for token, value in piece.top_logprobs[0].items() if value > -1e30}
        return {"top": top, "allowed": list(piece.allowed_logprobs)}
    return {
        "token_ids": list(piece.token_ids),
        "logprobs": list(piece.logprobs),
        "reason": piece.finish_reason,
        "version": piece.policy_version,
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.load(sys.stdin))

"""engine_answers: a model folder -> what a vLLM engine answers to a fixed mix of requests, with or without drafts, as JSON on stdout.

python -m tests.serve_apps.policy.engine_answers FOLDER 0|1
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from serve_apps.config import ServeConfig, SpeculationConfig
from serve_apps.policy.drafter import DRAFTS
from serve_apps.policy.engine_settings import engine_arguments, engine_environment

MAX_MODEL_LEN = 64
NUM_PASSES = 4


def mix() -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts and sampling of many kinds: some get drafts, others must not."""
    plain: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.2, "logprobs": 3},
    ]
    special: list[dict[str, Any]] = [
        {"temperature": 1.0, "allowed_token_ids": [5, 9, 11], "max_tokens": 1, "logprobs": 3},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.0, "logit_bias": {7: 5.0}},
        {"temperature": 1.0, "repetition_penalty": 1.5},
        {"temperature": 1.0, "min_tokens": 8},
        {"temperature": 1.0, "frequency_penalty": 0.5},
        {"temperature": 1.0, "prompt_logprobs": 0, "max_tokens": 1},
    ]
    requests = []
    for number, settings in enumerate([*plain, *plain, *plain, *special]):
        prompt = [3 + (number * 7 + place) % 40 for place in range(6)]
        requests.append((prompt, {"max_tokens": 24, "seed": 100 + number, "logprobs": 0, **settings}))
    cached = [
        3 + place % 40 for place in range(33)
    ]  # but for its last token it is in the prefix cache from the second pass on
    requests.append(
        (cached, {"max_tokens": 12, "seed": 6, "logprobs": 0, "temperature": 1.0, "repetition_penalty": 1.3})
    )
    requests.append(
        (list(range(3, MAX_MODEL_LEN - 5)), {"max_tokens": 8, "seed": 5, "logprobs": 0, "temperature": 0.3})
    )
    return requests


def main(folder: Path, has_drafts: bool) -> None:
    """Prints {"answers": [pass][request] [token ids, logprobs], "counts"}."""
    config = ServeConfig(
        max_model_len=MAX_MODEL_LEN,
        kv_cache_gib=0.1,
        max_num_seqs=32,
        speculation=SpeculationConfig() if has_drafts else None,
    )
    os.environ |= engine_environment(config, threads=1)
    from vllm import LLM, SamplingParams

    llm = LLM(**engine_arguments(config, folder))
    if has_drafts:
        llm.llm_engine.input_processor.speculative_config = None
        llm.collective_rpc("troupe_speculate")
    answers = []
    for _ in range(NUM_PASSES):
        requests = mix()
        params = [
            SamplingParams(detokenize=False, extra_args={DRAFTS: ["agent", f"task {number}"]}, **settings)
            for number, (_, settings) in enumerate(requests)
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in requests], params, use_tqdm=False)
        answers.append([_answer(output.outputs[0]) for output in outputs])
    counts = llm.collective_rpc("troupe_draft_counts")[0] if has_drafts else {}
    print("ANSWERS " + json.dumps({"answers": answers, "counts": counts}), flush=True)


def _answer(completion: Any) -> list[Any]:
    own = [position[token].logprob for token, position in zip(completion.token_ids, completion.logprobs, strict=True)]
    return [list(completion.token_ids), own]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "1")

"""A peer: `vllm.LLM` on waves of requests, each wave given at once and waited for.

python -m tests.bench.raw_vllm MODEL_FOLDER SERVE_CONFIG_JSON
{"waves": file} -> {"seconds": [s per wave], "num_tokens": n, "same_share": share of completions as expected,
                     "completions": with "keep": true, the tokens of all}
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from serve_apps.chat.tokenizer import stop_token_ids
from serve_apps.config import ServeConfig
from serve_apps.engines.vllm.settings import engine_arguments
from tests.bench.peer import answer_questions


def main() -> None:
    """The peer; its engine gets the arguments of a policy app."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    folder, config = Path(sys.argv[1]), ServeConfig.model_validate_json(sys.argv[2])
    engine = LLM(**engine_arguments(config, folder))
    stops = stop_token_ids(folder)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        seconds, num_tokens, num_same, num, kept = [], 0, 0, 0, []
        for wave in json.loads(Path(question["waves"]).read_text()):
            prompts: list[Any] = [{"prompt_token_ids": request["prompt"]} for request in wave]
            params = [
                SamplingParams(
                    max_tokens=request["max_tokens"],
                    temperature=request["temperature"],
                    seed=request["seed"],
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    stop_token_ids=stops,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                for request in wave
            ]
            began = time.perf_counter()
            outputs = engine.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
            completions = [list(output.outputs[0].token_ids) for output in outputs]
            num_tokens += sum(map(len, completions))
            num_same += sum(c == request["completion"] for c, request in zip(completions, wave, strict=True))
            num += len(wave)
            kept += completions if question.get("keep") else []
        return {"seconds": seconds, "num_tokens": num_tokens, "same_share": num_same / num, "completions": kept}

    answer_questions(answer)


if __name__ == "__main__":
    main()

"""A peer: one vLLM engine of a policy app's settings that says where the seconds of its passes go.

python -m tests.bench.engine_parts MODEL_FOLDER SERVE_CONFIG_JSON
{"prompts": [[id]], "episodes": n, "max_tokens": n} -> {"seconds", "num_tokens", "num_prompt", "num_cached", "parts": {part: s}}

    prefill, decode   the layers; a step that does both is split by its tokens
    logits            the output layer
    logprobs          the log-softmax over the vocabulary and the gathering of the sampled tokens' values
    sampling          the rest of the sampler
    python            what is left: scheduler, inputs, outputs
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serve_apps.config import ServeConfig
from serve_apps.engines.vllm.settings import engine_arguments
from tests.bench.peer import answer_questions


class Clock:
    """Measures the seconds of parts; a part inside another counts for the inner one alone."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner = [0.0]

    def timed(self, function: Callable[..., Any], part: Callable[[], dict[str, float]]) -> Callable[..., Any]:
        """Returns the function with its seconds added to the parts, by their shares."""

        def run(*args: Any, **kwargs: Any) -> Any:
            shares = part()
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.perf_counter() - began
                own = whole - self._inner.pop()
                self._inner[-1] += whole
                for name, share in shares.items():
                    self.seconds[name] += own * share

        return run


def main() -> None:
    """The peer."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    folder, config = Path(sys.argv[1]), ServeConfig.model_validate_json(sys.argv[2])
    clock, step = Clock(), {"prefill": 0.0, "decode": 1.0}
    execute = GPUModelRunner.execute_model

    def execute_step(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        numbers = list(scheduler_output.num_scheduled_tokens.values())
        step["prefill"] = sum(n for n in numbers if n > 1) / max(1, sum(numbers))
        step["decode"] = 1 - step["prefill"]
        return execute(self, scheduler_output, *args, **kwargs)

    GPUModelRunner.execute_model = execute_step
    GPUModelRunner._model_forward = clock.timed(GPUModelRunner._model_forward, lambda: dict(step))
    Sampler.forward = clock.timed(Sampler.forward, lambda: {"sampling": 1.0})
    Sampler.compute_logprobs = staticmethod(clock.timed(Sampler.compute_logprobs, lambda: {"logprobs": 1.0}))
    Sampler.gather_logprobs = staticmethod(clock.timed(Sampler.gather_logprobs, lambda: {"logprobs": 1.0}))
    engine = LLM(**engine_arguments(config, folder))
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    runner.model.compute_logits = clock.timed(runner.model.compute_logits, lambda: {"logits": 1.0})

    def sample(question: dict[str, Any]) -> dict[str, Any]:
        settings = {"logprobs": 0, "flat_logprobs": True, "detokenize": False, "ignore_eos": True}
        prompts = [prompt for prompt in question["prompts"] for _ in range(question["episodes"])]
        params = [
            SamplingParams(
                max_tokens=question["max_tokens"], seed=seed, output_kind=RequestOutputKind.FINAL_ONLY, **settings
            )
            for seed in range(len(prompts))
        ]
        clock.seconds.clear()
        began = time.perf_counter()
        outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        parts = dict(clock.seconds)
        return {
            "seconds": seconds,
            "num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
            "num_prompt": sum(map(len, prompts)),
            "num_cached": sum(output.num_cached_tokens or 0 for output in outputs),
            "parts": parts | {"python": seconds - sum(parts.values())},
        }

    answer_questions(sample)


if __name__ == "__main__":
    main()

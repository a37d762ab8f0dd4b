"""local_policy: a model call -> a completion that transformers samples in this process. It is slow, and needs no cluster.

It serves a registered team where no gateway runs. Its samples have an engine's distribution, but they are other samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serve_apps.policy.engine_settings import stop_token_ids
from stores.traces.conventions import allowed_tokens
from stores.types import Completion, FinishReason, GenerateRequest, ModelVersionRef
from stores.weights.manifest import read_manifest, whole_model
from stores.weights.model_folder import num_known_rows
from stores.weights.weight_cache import fetch


class LocalPolicy:
    """Implements PolicyClient over model versions, each loaded with its first call."""

    def __init__(self, models: Mapping[str, ModelVersionRef]) -> None:
        self._refs = dict(models)
        self._models: dict[str, Any] = {}
        self._lock = asyncio.Lock()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Returns one completion; ValueError where the version's files are gone."""
        async with self._lock:
            return await asyncio.to_thread(self._generate, request)

    def _generate(self, request: GenerateRequest) -> Completion:
        import torch

        model, stops, num_known = self._load(request.model_group)
        s = request.sampling
        allowed = allowed_tokens(s.constraint)
        if s.constraint and not allowed:
            raise ValueError("an answer that must match a form is sampled by engines only: serve the team at a gateway")
        prompt = torch.tensor([list(request.prompt_token_ids)])
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(request.seed)
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=s.max_tokens,
                do_sample=s.temperature > 0,
                temperature=s.temperature or None,
                top_p=s.top_p,
                top_k=s.top_k,
                min_p=s.min_p or None,
                eos_token_id=stops,
                prefix_allowed_tokens_fn=(lambda *_: allowed) if allowed else None,
                suppress_tokens=None if num_known is None else list(range(num_known, model.config.vocab_size)),
                pad_token_id=stops[0] if stops else None,
                return_dict_in_generate=True,
                output_logits=True,
            )
        ids = out.sequences[0, prompt.shape[1] :].tolist()
        of_all = [_scaled(logits[0, :num_known], s.temperature, allowed) for logits in out.logits]
        logprobs = [float(of[token]) for of, token in zip(of_all, ids, strict=True)]
        return Completion(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=FinishReason.STOP if ids and ids[-1] in stops else FinishReason.LENGTH,
            policy_version=self._refs[request.model_group].version,
            allowed_logprobs=tuple(float(of_all[0][token]) for token in allowed) if of_all else (),
        )

    def _load(self, model_group: str) -> tuple[Any, list[int], int | None]:
        if model_group not in self._models:
            from transformers import AutoModelForCausalLM, GenerationConfig

            ref = self._refs[model_group]
            whole = whole_model(ref)
            folder = fetch(whole)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False).eval()
            model.generation_config = (
                GenerationConfig()
            )  # engines use none of a model's own, e.g. its repetition penalty
            if read_manifest(ref).base is not None:
                from peft import PeftModel

                model = PeftModel.from_pretrained(model, str(fetch(ref))).eval()
            self._models[model_group] = model, stop_token_ids(Path(folder)), num_known_rows(Path(folder))
        return self._models[model_group]


def _scaled(logits: Any, temperature: float, allowed: Sequence[int]) -> Any:
    """Returns the logprobs that a token is sampled by, over the allowed ones where a choice names them."""
    import torch

    if allowed:
        only = torch.full_like(logits, -torch.inf)
        only[list(allowed)] = logits[list(allowed)]
        logits = only
    return (logits / (temperature or 1.0)).log_softmax(-1)

"""coupled_sampler: the logits of drafts -> the tokens that vLLM's plain sampler draws, as many at once as the drafts foresaw.

    first row of every request ──> plain sampler, with plain random numbers ──> token 1
    requests whose token 1 is their draft's ──> plain sampler on their second row ──> token 2 ──> ...

Every token is drawn from the model's own distribution by the random numbers that the request would have used without drafts, so that
tokens and logprobs are those of plain decoding, at every temperature and for every seed: a draft only says how far one step gets.
vLLM's own rejection sampler keeps the distribution, but draws other random numbers; and on a CPU, above temperature 0, it divides by
temperatures from memory that nobody wrote (vllm#55005). For drafts that are tokens and not distributions a token d is kept with
probability p(d) by either, which is the most that a rule without loss can keep (arXiv 2211.17192). Imported in engines only.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

from serve_apps.policy.padded_rows import PaddedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


class CoupledSampler:
    """Takes the place of a model runner's `rejection_sampler`."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Returns the tokens of each request, [B, most drafts + 1], filled up with PLACEHOLDER_TOKEN_ID, and their logprobs.

        Args:
            metadata: the drafts. Requests with penalties, grammars, lists of allowed tokens or the like have none, see `drafter.is_plain`, but
                those of -1 with which vLLM fills a batch up, and which equal no token.
            draft_probs: not used; a draft is a token.
            logits: [sum of drafts + B, vocabulary]: for each request its rows in order, one more than it has drafts.
            sampling_metadata: of the B requests.
        """
        counts = metadata.num_draft_tokens
        starts = [0, *accumulate(count + 1 for count in counts)][:-1]
        if not metadata.max_spec_len:
            return self._sampler(logits=logits, sampling_metadata=sampling_metadata)
        output = self._sampler(logits=logits[starts], sampling_metadata=sampling_metadata)
        steps = [(list(range(len(counts))), output)]
        drafts = [column.tolist() for column in metadata.draft_token_ids.cpu().split(counts)]
        while alive := _agreeing(*steps[-1], drafts, column=len(steps) - 1):
            rows = [starts[request] + len(steps) for request in alive]
            output = self._sampler(logits=logits[rows], sampling_metadata=_of_requests(sampling_metadata, alive))
            steps.append((alive, output))
        return _joined(steps, num_requests=len(counts), width=metadata.max_spec_len + 1)


def _agreeing(
    requests: Sequence[int], output: SamplerOutput, drafts: Sequence[Sequence[int]], *, column: int
) -> list[int]:
    """Returns those of `requests` whose sampled token is their draft's: the next row of each is that of what was sampled."""
    sampled = output.sampled_token_ids[:, 0].tolist()
    return [
        request
        for request, token in zip(requests, sampled, strict=True)
        if column < len(drafts[request]) and token == drafts[request][column]
    ]


def _of_requests(metadata: SamplingMetadata, requests: Sequence[int]) -> SamplingMetadata:
    """Returns the sampling of some requests, none of which has more than temperature, top-p, top-k, a seed and logprobs."""
    index = list(requests)
    temperature = None if metadata.temperature is None else metadata.temperature[index]
    is_greedy = [True] if temperature is None else (temperature < GREEDY_BELOW).tolist()
    processors = metadata.logitsprocs
    padded = [p for p in (*processors.non_argmax_invariant, *processors.argmax_invariant) if isinstance(p, PaddedRows)]
    return replace(
        metadata,
        temperature=temperature,
        all_greedy=all(is_greedy),
        all_random=not any(is_greedy),
        top_p=None if metadata.top_p is None else metadata.top_p[index],
        top_k=None if metadata.top_k is None else metadata.top_k[index],
        generators={
            place: metadata.generators[request]
            for place, request in enumerate(requests)
            if request in metadata.generators
        },
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=metadata.frequency_penalties[index],
        presence_penalties=metadata.presence_penalties[index],
        repetition_penalties=metadata.repetition_penalties[index],
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(padded),
        logprob_token_ids=None,
        thinking_budget_state_holder=None,
    )


GREEDY_BELOW = 1e-5
"""The temperature below which vLLM takes the most likely token (`_SAMPLING_EPS`)."""


def _joined(steps: Sequence[tuple[Sequence[int], SamplerOutput]], *, num_requests: int, width: int) -> SamplerOutput:
    """Returns the tokens and logprobs of all steps as vLLM takes them: step j has the j-th token of its requests."""
    first = steps[0][1]
    tokens = first.sampled_token_ids.new_full((num_requests, width), PLACEHOLDER_TOKEN_ID)
    for column, (requests, output) in enumerate(steps):
        tokens[list(requests), column] = output.sampled_token_ids[:, 0]
    if first.logprobs_tensors is None:
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)
    joined = []
    for field in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
        of_first: Any = getattr(first.logprobs_tensors, field)
        values = of_first.new_zeros((num_requests, width, *of_first.shape[1:]))
        for column, (requests, output) in enumerate(steps):
            values[list(requests), column] = getattr(output.logprobs_tensors, field)
        joined.append(values.flatten(0, 1))
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=LogprobsTensors(*joined))

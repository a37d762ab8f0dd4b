"""coupled_sampler: the logits of drafts -> the tokens that vLLM's plain sampler draws, as many at once as the drafts foresaw.

    first row of every request ──> plain sampler, with plain random numbers ──> token 1
    other rows of requests whose token 1 is their draft's ──> plain sampler ──> tokens 2, 3, ... up to the first that is not its draft's;
                                                          random numbers that were drawn for rows behind it are given back

Every token is drawn from the model's own distribution by the random numbers that the request would have used without drafts, so that
tokens and logprobs of a request with a seed, or with temperature 0, are those of plain decoding wherever its logits are: a draft only
says how far one step gets.
vLLM's own rejection sampler keeps the distribution, but draws other random numbers; and on a CPU, above temperature 0, it divides by
temperatures from memory that nobody wrote (vllm#55005). For drafts that are tokens and not distributions a token d is kept with
probability p(d) by either, which is the most that a rule without loss can keep (arXiv 2211.17192). Imported in engines only.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID

from serve_apps.policy.padded_rows import PaddedRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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
        first = self._sampler(
            logits=logits[starts] if metadata.max_spec_len else logits, sampling_metadata=sampling_metadata
        )
        drafts = [column.tolist() for column in metadata.draft_token_ids.cpu().split(counts)]
        right = [n for n, token in enumerate(_tokens(first)) if drafts[n][:1] == [token]]
        if sampling_metadata.logprob_token_ids:  # whose logprobs have another shape; no request of ours asks for them
            right = []
        width, outputs = metadata.max_spec_len + 1, [first]
        places = {n * width: n for n in range(len(counts))}
        if right:
            owners = [n for n in right for _ in drafts[n]]
            generators = _Recorded(
                (row, sampling_metadata.generators[n])
                for row, n in enumerate(owners)
                if n in sampling_metadata.generators
            )
            rows = [starts[n] + 1 + place for n in right for place in range(len(drafts[n]))]
            rest = self._sampler(logits=logits[rows], sampling_metadata=_of_rows(sampling_metadata, owners, generators))
            outputs.append(rest)
            begins = [0, *accumulate(len(drafts[n]) for n in right)]
            tokens = _tokens(rest)
            for n, (begin, end) in zip(right, pairwise(begins), strict=True):
                num = 1 + _num_alike(drafts[n][1:], tokens[begin:end])
                places |= {n * width + 1 + place: len(counts) + begin + place for place in range(num)}
                if begin + num < end:
                    generators.give_back(begin + num)
        return _laid_out(outputs, places, num_requests=len(counts), width=width)


class _Recorded(dict[int, torch.Generator]):
    """The generators of rows, which the sampler goes through in their order; rows of one request share one.

    `items` keeps the state in which the sampler finds a row's generator: what is drawn for rows that do not count is so given back,
    however much a row takes.
    """

    def __init__(self, generators: Iterable[tuple[int, torch.Generator]]) -> None:
        super().__init__(generators)
        self._states: dict[int, torch.Tensor] = {}

    def items(self) -> Iterator[tuple[int, torch.Generator]]:  # type: ignore[override]
        """Yields rows and generators, each before the sampler draws."""
        for row, generator in super().items():
            self._states[row] = generator.get_state()
            yield row, generator

    def give_back(self, row: int) -> None:
        """Sets the generator of a row's request to where it was before that row; nothing to do where none was drawn from."""
        if row in self._states:
            self[row].set_state(self._states[row])


def _tokens(output: SamplerOutput) -> list[int]:
    """Returns the token of each row."""
    return output.sampled_token_ids[:, 0].tolist()


def _num_alike(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns how many tokens are their draft's before the first that is not."""
    return next((n for n, (guess, token) in enumerate(zip(draft, tokens, strict=False)) if guess != token), len(draft))


def _of_rows(metadata: SamplingMetadata, requests: Sequence[int], generators: _Recorded) -> SamplingMetadata:
    """Returns the sampling of rows of these requests, none of which has more than temperature, top-p, top-k, a seed and logprobs."""
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
        generators=generators,
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


def _laid_out(
    outputs: Sequence[SamplerOutput], rows: Mapping[int, int], *, num_requests: int, width: int
) -> SamplerOutput:
    """Returns tokens, [requests, width], and logprobs, [requests * width, ...], as vLLM takes them.

    Args:
        outputs: of one token for each row.
        rows: place in the result, flat -> row of `outputs`, counted through; PLACEHOLDER_TOKEN_ID and zeros elsewhere.
        num_requests: how many.
        width: tokens of the longest draft and one.
    """
    order = [rows.get(place, -1) for place in range(num_requests * width)]  # -1: the empty row behind all others

    def laid_out(values: Sequence[torch.Tensor], empty: int) -> torch.Tensor:
        return torch.cat([*values, values[0].new_full((1, *values[0].shape[1:]), empty)])[order]

    tokens = laid_out([output.sampled_token_ids[:, 0] for output in outputs], PLACEHOLDER_TOKEN_ID)
    tokens = tokens.view(num_requests, width)
    logprobs = [output.logprobs_tensors for output in outputs]
    if logprobs[0] is None:
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)
    names = ("logprob_token_ids", "logprobs", "selected_token_ranks")
    tensors = [laid_out([getattr(of_output, name) for of_output in logprobs], 0) for name in names]
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=LogprobsTensors(*tensors))

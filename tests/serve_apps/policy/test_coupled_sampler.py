"""Drafts over vLLM's own sampler: the tokens, logprobs and random numbers are those of plain decoding, and the distribution is the model's."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

pytestmark = pytest.mark.test

NUM_TOKENS, NUM_REQUESTS, LENGTH = 500, 12, 30
TEMPERATURES = [0.0, 1.0, 0.7, 1.3] * 3


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def plain_sampler() -> Any:
    from vllm.v1.sample.sampler import Sampler

    return Sampler(logprobs_mode="processed_logprobs")


def settings(temperatures: Sequence[float], generators: Mapping[int, Any], **changes: Any) -> Any:
    import torch
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    num = len(temperatures)
    fields: dict[str, Any] = {
        "temperature": torch.tensor(temperatures),
        "all_greedy": not any(temperatures),
        "all_random": all(temperatures),
        "top_p": None,
        "top_k": None,
        "generators": dict(generators),
        "max_num_logprobs": 0,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": torch.zeros(num),
        "presence_penalties": torch.zeros(num),
        "repetition_penalties": torch.ones(num),
        "output_token_ids": [],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**fields | changes)


def drafts_of(drafts: Sequence[Sequence[int]]) -> Any:
    import torch
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    return SpecDecodeMetadata.make_dummy([list(one) for one in drafts], torch.device("cpu"))


def seeded() -> dict[int, Any]:
    import torch

    return {n: torch.Generator().manual_seed(100 + n) for n in range(NUM_REQUESTS) if TEMPERATURES[n]}


def model() -> Any:
    """Logits by request and position; they do not depend on what was sampled."""
    import torch

    return torch.randn(NUM_REQUESTS, LENGTH, NUM_TOKENS, generator=torch.Generator().manual_seed(1)) * 2


def cut(temperatures: Sequence[float], is_cut: bool) -> dict[str, Any]:
    """Top-p and top-k of requests with a temperature; vLLM takes them from those without."""
    import torch

    if not is_cut:
        return {}
    top_k = [40 if temperature else NUM_TOKENS for temperature in temperatures]
    return {
        "top_p": torch.tensor([0.9 if temperature else 1.0 for temperature in temperatures]),
        "top_k": torch.tensor(top_k, dtype=torch.int32),
    }


def plainly(logits: Any, *, is_cut: bool) -> tuple[list[list[int]], list[list[float]], dict[int, Any]]:
    """Tokens and logprobs of plain decoding, and the generators as it leaves them."""
    sampler, generators = plain_sampler(), seeded()
    tokens: list[list[int]] = [[] for _ in range(NUM_REQUESTS)]
    logprobs: list[list[float]] = [[] for _ in range(NUM_REQUESTS)]
    for place in range(LENGTH):
        sampling = settings(TEMPERATURES, generators, **cut(TEMPERATURES, is_cut))
        output = sampler(logits=logits[:, place].clone(), sampling_metadata=sampling)
        for n in range(NUM_REQUESTS):
            tokens[n].append(int(output.sampled_token_ids[n, 0]))
            logprobs[n].append(float(output.logprobs_tensors.logprobs[n, 0]))
    return tokens, logprobs, generators


@pytest.mark.parametrize("is_cut", [False, True], ids=["all tokens", "top-p and top-k"])
@pytest.mark.parametrize("quality", [0.0, 0.5, 0.9, 1.0])
def test_tokens_and_logprobs_are_those_of_plain_decoding_whatever_is_drafted(quality: float, is_cut: bool) -> None:
    import torch
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    from serve_apps.policy.coupled_sampler import CoupledSampler

    logits = model()
    expected, expected_logprobs, left = plainly(logits, is_cut=is_cut)
    sampler, generators, draw = CoupledSampler(plain_sampler()), seeded(), random.Random(5)
    tokens: list[list[int]] = [[] for _ in range(NUM_REQUESTS)]
    logprobs: list[list[float]] = [[] for _ in range(NUM_REQUESTS)]
    num_steps = 0
    while under_way := [n for n in range(NUM_REQUESTS) if len(tokens[n]) < LENGTH]:
        num_steps += 1
        drafts = []
        for n in under_way:
            num = min(draw.randrange(7), LENGTH - len(tokens[n]) - 1)
            true = expected[n][len(tokens[n]) : len(tokens[n]) + num]
            drafts.append([token if draw.random() < quality else draw.randrange(NUM_TOKENS) for token in true])
        rows = torch.stack(
            [
                logits[n, len(tokens[n]) + row]
                for n, draft in zip(under_way, drafts, strict=True)
                for row in range(len(draft) + 1)
            ]
        )
        own = {place: generators[n] for place, n in enumerate(under_way) if n in generators}
        temperatures = [TEMPERATURES[n] for n in under_way]
        sampling = settings(temperatures, own, **cut(temperatures, is_cut))
        output = sampler(drafts_of(drafts), None, rows, sampling)
        sampled, lists = RejectionSampler.parse_output(
            output.sampled_token_ids, NUM_TOKENS, (), output.logprobs_tensors
        )
        assert lists is not None
        ends = lists.cu_num_generated_tokens or list(range(len(under_way) + 1))  # None: no request had a draft
        for place, n in enumerate(under_way):
            tokens[n] += sampled[place]
            logprobs[n] += [float(values[0]) for values in lists.logprobs[ends[place] : ends[place + 1]]]
    assert tokens == expected and logprobs == expected_logprobs
    assert all(torch.equal(generators[n].get_state(), left[n].get_state()) for n in left), "as many numbers were drawn"
    assert num_steps <= {0.0: LENGTH, 0.5: 27, 0.9: 18, 1.0: 14}[quality]


@pytest.mark.parametrize("kind", ["likely", "unlikely"])
def test_the_distribution_is_the_models_whatever_is_drafted(kind: str) -> None:
    import torch
    from scipy.stats import chisquare

    from serve_apps.policy.coupled_sampler import CoupledSampler

    num, temperature = 20_000, 0.7
    torch.manual_seed(0)
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(3)) * 1.5
    first, second = (logits.double() / temperature).softmax(-1)
    draft = int(first.argmax() if kind == "likely" else first.argmin())
    output = CoupledSampler(plain_sampler())(
        drafts_of([[draft]] * num), None, logits.repeat(num, 1), settings([temperature] * num, {})
    )
    tokens = output.sampled_token_ids.long()
    kept = tokens[:, 1] >= 0
    assert torch.equal(kept, tokens[:, 0] == draft)
    p = float(first[draft])
    assert abs(float(kept.double().mean()) - p) < 4 * (p * (1 - p) / num) ** 0.5
    for seen, probabilities in ((tokens[:, 0], first), (tokens[kept, 1], second)):
        counts = torch.bincount(seen, minlength=8)
        assert chisquare(counts, probabilities * len(seen)).pvalue > 1e-4


def test_rows_of_no_token_stay_impossible_behind_a_draft() -> None:
    import torch
    from vllm.v1.sample.logits_processor import LogitsProcessors

    from serve_apps.policy.coupled_sampler import CoupledSampler
    from serve_apps.policy.padded_rows import PaddedRows

    processor = PaddedRows.__new__(PaddedRows)
    processor._num_known = 6
    logits = torch.zeros(3, 8)
    logits[:, 6:] = 9.0
    logits[0, 2] = 5.0
    with_rows = settings([0.0], {}, logitsprocs=LogitsProcessors([processor]))
    output = CoupledSampler(plain_sampler())(drafts_of([[2, 0]]), None, logits, with_rows)
    assert output.sampled_token_ids.tolist() == [[2, 0, 0]]


def test_a_filler_equals_no_token_and_greedy_batches_have_no_temperatures() -> None:
    import torch

    from serve_apps.policy.coupled_sampler import CoupledSampler

    logits = torch.zeros(5, 8)
    logits[torch.arange(5), torch.tensor([1, 2, 3, 4, 5])] = 9.0
    greedy = settings([0.0, 0.0], {}, temperature=None, max_num_logprobs=None)
    output = CoupledSampler(plain_sampler())(drafts_of([[1], [-1, -1]]), None, logits, greedy)
    assert output.sampled_token_ids.tolist() == [[1, 2, -1], [3, -1, -1]]
    assert output.logprobs_tensors is None


def test_beside_a_request_for_the_logprobs_of_named_tokens_no_draft_is_used() -> None:
    import torch

    from serve_apps.policy.coupled_sampler import CoupledSampler

    logits = torch.zeros(3, 8)
    logits[0, 1] = 9.0
    named = settings([0.0, 0.0], {}, logprob_token_ids={1: [3, 4, 5]}, max_num_logprobs=None)
    output = CoupledSampler(plain_sampler())(drafts_of([[1], []]), None, logits, named)
    assert output.sampled_token_ids[0].tolist() == [1, -1]
    assert output.logprobs_tensors.logprobs.shape[0] == 4

"""A registered team without a cluster: what transformers samples in this process."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from serve_apps.policy.local_policy import LocalPolicy
from stores.allowed_tokens import constraint_of
from stores.manifest import Probe
from stores.types import Completion, GenerateRequest, Sampling
from stores.weights import WeightStore

pytestmark = pytest.mark.fast

OPTIONS = [35, 36, 40]


@pytest.fixture(scope="module")
def policy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalPolicy:
    store = WeightStore(str(tmp_path_factory.mktemp("weights")))
    ref = store.commit(
        tiny_model,
        model_group="g",
        version=0,
        parent=None,
        run_id="r",
        iteration=0,
        probe=Probe(sequences=((1, 2),), logprobs=((-1.0,),)),
    )
    return LocalPolicy({"g": ref})


def ask(policy: LocalPolicy, sampling: Sampling, seed: int = 0) -> Completion:
    request = GenerateRequest(request_id="r", model_group="g", prompt_token_ids=[5, 6, 7], sampling=sampling, seed=seed)
    return asyncio.run(policy.generate(request))


def test_a_choice_is_one_of_what_is_offered_with_the_distribution_over_it(policy: LocalPolicy) -> None:
    sampling = Sampling(max_tokens=1, temperature=1.0, constraint=constraint_of(OPTIONS))
    answers = [ask(policy, sampling, seed) for seed in range(20)]
    assert {token for answer in answers for token in answer.token_ids} <= set(OPTIONS)
    assert len({tuple(answer.token_ids) for answer in answers}) > 1
    for answer in answers:
        assert sum(map(math.exp, answer.allowed_logprobs)) == pytest.approx(1.0, abs=1e-5)
        assert answer.logprobs[0] == answer.allowed_logprobs[OPTIONS.index(answer.token_ids[0])]


def test_another_completion_has_logprobs_over_all_tokens_and_no_options(policy: LocalPolicy) -> None:
    answer = ask(policy, Sampling(max_tokens=6, temperature=0.8))
    assert 1 <= len(answer.token_ids) <= 6 and len(answer.logprobs) == len(answer.token_ids)
    assert answer.allowed_logprobs == () and all(logprob < 0 for logprob in answer.logprobs)

"""A registered team without a cluster: what transformers samples in this process."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from pathlib import Path

import pytest

from serve_apps.policy.local_policy import LocalPolicy
from stores.traces.conventions import constraint_of
from stores.types import Completion, GenerateRequest, ModelVersionRef, Sampling
from stores.weights.manifest import Probe
from stores.weights.store import WeightStore

pytestmark = pytest.mark.fast

OPTIONS = [35, 36, 40]


@pytest.fixture(scope="module")
def policy(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LocalPolicy:
    return LocalPolicy({"g": committed(tiny_model, tmp_path_factory.mktemp("weights"))})


def committed(model: Path, folder: Path) -> ModelVersionRef:
    return WeightStore(str(folder)).commit(
        model,
        model_group="g",
        version=0,
        parent=None,
        run_id="r",
        iteration=0,
        probe=Probe(sequences=((1, 2),), logprobs=((-1.0,),)),
    )


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


def test_sampling_is_an_engines_whatever_the_models_own_generation_settings(tiny_model: Path, tmp_path: Path) -> None:
    plain, with_settings = tmp_path / "plain", tmp_path / "with settings"
    for folder in (plain, with_settings):
        shutil.copytree(tiny_model, folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
    settings = {"repetition_penalty": 1.8, "no_repeat_ngram_size": 1, "top_k": 3, "do_sample": True}
    (with_settings / "generation_config.json").write_text(json.dumps(settings))
    asked = Sampling(max_tokens=80, temperature=1.0)
    answers = [ask(LocalPolicy({"g": committed(folder, folder / "store")}), asked) for folder in (plain, with_settings)]
    assert answers[0] == answers[1]
    assert len(set(answers[0].token_ids)) < len(answers[0].token_ids), (
        "the test needs a completion that repeats a token"
    )

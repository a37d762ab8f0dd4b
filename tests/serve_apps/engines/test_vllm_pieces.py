"""What vLLM tells of a token -> the piece that is answered: no engine is started here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from serve_apps.engines.vllm.engine import _piece
from stores.traces.conventions import constraint_of
from stores.types import GenerateRequest, Sampling

pytestmark = pytest.mark.fast


def output(told: Mapping[int, float]) -> Any:
    """One token, the first of those that are told."""
    logprobs = SimpleNamespace(
        token_ids=list(told), logprobs=list(told.values()), start_indices=[0], end_indices=[len(told)]
    )
    completion = SimpleNamespace(
        token_ids=[next(iter(told))], logprobs=logprobs, finish_reason="length", weight_versions=None
    )
    return SimpleNamespace(outputs=[completion], num_cached_tokens=0)


def test_an_option_that_a_filter_leaves_out_has_the_probability_0() -> None:
    sampling = Sampling(max_tokens=1, top_p=0.5, constraint=constraint_of([9, 35, 40]))
    request = GenerateRequest(request_id="r", model_group="g", prompt_token_ids=[1], sampling=sampling, seed=1)
    piece = _piece(request, output({35: 0.0, 0: -math.inf, 1: -math.inf}), 2, has_adapter=False)
    assert piece.allowed_logprobs == [-math.inf, 0.0, -math.inf]
    assert (piece.token_ids, piece.logprobs, piece.finish_reason, piece.policy_version) == ([35], [0.0], "length", 2)

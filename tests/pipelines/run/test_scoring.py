"""Figures of agents that scoring computes from the turns of its episodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipelines.run.scoring import per_agent
from tests.records import MakeTrace

pytestmark = pytest.mark.fast


def test_the_share_of_cached_prompt_tokens_is_over_the_tokens_of_turns_that_an_engine_sampled(
    make_trace: MakeTrace,
) -> None:
    traces = [make_trace(0), make_trace(1), make_trace(2)]
    solver = [replace(trace.turns[0], prompt_token_ids=(1,) * 40, num_cached_tokens=32) for trace in traces]
    solver[1] = replace(solver[1], prompt_token_ids=(1,) * 60, num_cached_tokens=0)
    solver[2] = replace(solver[2], num_cached_tokens=None)
    figures = per_agent([replace(t, turns=(s, t.turns[1])) for t, s in zip(traces, solver, strict=True)], [])
    assert figures["solver"]["cached_prompt_share"] == pytest.approx(32 / 100)
    assert "cached_prompt_share" not in figures["verifier"], "nobody knows"

"""Figures of agents that scoring computes from the turns of its episodes."""

from __future__ import annotations

import math
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
    assert all("reward" not in of for of in figures.values()), "nobody was paid"


def test_choices_are_counted_over_all_and_their_probabilities_where_an_option_was_offered(
    make_trace: MakeTrace,
) -> None:
    chosen = [
        ("ask", {"ask": math.log(0.75), "stop": math.log(0.25)}),
        ("stop", {"ask": math.log(0.25), "stop": math.log(0.75)}),
        ("stop", {"stop": 0.0}),
        ("stop", {"stop": 0.0}),
    ]
    traces = [
        replace(
            trace, turns=(replace(trace.turns[0], fields={"choice": name, "message": ""}, option_logprobs=logprobs),)
        )
        for trace, (name, logprobs) in zip(map(make_trace, range(4)), chosen, strict=True)
    ]
    figures = per_agent(traces, [])["solver"]
    assert (figures["chosen/ask"], figures["chosen/stop"]) == (0.25, 0.75)
    assert figures["probability/ask"] == pytest.approx(0.5)
    assert figures["probability/stop"] == pytest.approx(0.75)

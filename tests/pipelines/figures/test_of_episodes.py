"""Figures of episodes on literal numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from records import MakeTrace

from pipelines.figures.of_episodes import num_repeats
from pipelines.figures.registry import figures_of
from stores.types import Cause, EpisodeRewards, EpisodeStatus, FinishReason, Sampling, Trace, TurnReward

pytestmark = pytest.mark.fast


def spoken(trace: Trace, *texts: str, logprob: float = -0.5) -> Trace:
    """The trace with these texts, four tokens each, by its two agents in turn."""
    plain = Sampling(max_tokens=32)
    made = [
        replace(
            trace.turns[i % 2],
            turn_index=i,
            completion_text=text,
            completion_token_ids=(1, 2, 3, 4),
            rollout_logprobs=(logprob,) * 4,
            sampling=plain,
        )
        for i, text in enumerate(texts)
    ]
    return replace(trace, turns=tuple(made))


def test_an_episode_gives_every_figure_it_has(make_trace: MakeTrace) -> None:
    trace = spoken(make_trace(), "the answer is five", "The answer  is five")
    cut = replace(trace.turns[1], finish_reason=FinishReason.LENGTH, is_format_ok=False, rollout_logprobs=(-1.5,) * 4)
    trace = replace(trace, turns=(trace.turns[0], cut))
    paid = tuple(
        TurnReward(turn_index=i, agent="", model_group="", reward=r, breakdown={}) for i, r in ((0, 1), (1, 0.5))
    )
    rewards = EpisodeRewards(
        episode_id="", run_id="", iteration=1, purpose=trace.purpose, credit_version="", outcome=0.25, rewards=paid
    )
    assert figures_of(trace, rewards, feedback=-1.0) == {
        "failure_share": 0, "turns": 2, "tool_calls": 1, "refusal_share": 0, "prompt_words": 5, "format_share": 0.5,
        "cut_share": 0.5, "completion_tokens": 8, "entropy": 1.0, "repeat_share": 1.0,
        "completion_tokens/solver": 4, "completion_tokens/verifier": 4, "entropy/solver": 0.5, "entropy/verifier": 1.5,
        "format_share/solver": 1.0, "format_share/verifier": 0,
        "outcome": 0.25, "reward_over_outcome": 0.5, "feedback_score": -1.0,
    }  # fmt: skip


def test_an_episode_that_failed_says_only_that(make_trace: MakeTrace) -> None:
    assert figures_of(make_trace(status=EpisodeStatus.TIMEOUT)) == {"failure_share": 1.0}
    assert figures_of(make_trace(status=EpisodeStatus.INFRA_ERROR)) == {"failure_share": 1.0}


def test_an_episode_that_the_policy_caused_to_fail_says_what_it_did_and_what_it_lost(make_trace: MakeTrace) -> None:
    trace = make_trace(status=EpisodeStatus.TIMEOUT, cause=Cause.POLICY)
    rewards = EpisodeRewards(
        episode_id="", run_id="", iteration=1, purpose=trace.purpose, credit_version="", outcome=0.0, rewards=()
    )
    figures = figures_of(trace, rewards)
    assert (figures["failure_share"], figures["outcome"], figures["turns"]) == (1.0, 0.0, 2.0)


def test_filtered_turns_have_no_entropy_and_redacted_ones_no_tokens(make_trace: MakeTrace) -> None:
    trace = spoken(make_trace(), "one", "two")
    turns = (
        replace(trace.turns[0], sampling=Sampling(max_tokens=8, top_p=0.9)),
        replace(trace.turns[1], completion_token_ids=(), rollout_logprobs=()),
    )
    found = figures_of(replace(trace, turns=turns))
    assert not {"entropy", "completion_tokens"} & found.keys()
    assert found["completion_tokens/solver"] == 4 and "completion_tokens/verifier" not in found


def test_the_entropy_of_a_known_distribution_is_found(make_trace: MakeTrace) -> None:
    p, rng = np.array([0.7, 0.2, 0.1]), np.random.default_rng(0)
    trace = spoken(make_trace(), "x")
    logprobs = tuple(np.log(p)[rng.choice(3, size=20_000, p=p)].tolist())
    found = figures_of(replace(trace, turns=(replace(trace.turns[0], rollout_logprobs=logprobs),)))
    assert found["entropy"] == pytest.approx(-(p * np.log(p)).sum(), abs=0.02)


@pytest.mark.parametrize(
    ("texts", "num"),
    [
        (("a b c d", "a b c d"), 1),
        (("A  b c\nd", "a b c d"), 1),
        (("yes", "yes", "no"), 1),
        (("", "", "x"), 0),
        ((" ".join(map(str, range(40))), " ".join(map(str, range(1, 41)))), 1),
        (("the sum is 4 so the answer is 4", "the sum is 5 so the answer is 5"), 0),
        (("a b c", "a b d", "a b c"), 1),
    ],
)
def test_a_text_repeats_another_where_nearly_all_trigrams_are_common(texts: tuple[str, ...], num: int) -> None:
    assert num_repeats(texts) == num

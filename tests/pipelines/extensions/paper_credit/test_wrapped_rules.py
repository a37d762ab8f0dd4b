"""Rules that wrap others, and that read scores of a game: what they say of agents that do not train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from by_hand import chain, trace

from pipelines.credit.outcome import OutcomeShare
from pipelines.credit.rule import (
    Credit,
    CreditRule,
    preflight,
    reads,
    score_trace,
)
from pipelines.extensions.inferred_credit.inferred import InferredReward
from pipelines.extensions.paper_credit.code_progress import CodeProgress
from pipelines.extensions.paper_credit.game_scores import GameScores
from pipelines.extensions.paper_credit.shared_sum import SharedSum
from stores.types import SERVED, Cause, EpisodeStatus
from tests.pipelines.credit.test_credit import _Pays

pytestmark = pytest.mark.fast


def test_a_rule_may_say_what_its_worst_outcome_is_or_what_a_failure_earns() -> None:
    failed = trace(chain("55", "55", "55"), status=EpisodeStatus.TIMEOUT, cause=Cause.POLICY)
    low, own = _Pays([]), _Pays([])
    low.worst_outcome = -1.0
    own.assign_failed = lambda of: Credit(outcome=0.5, rewards=())
    assert [r.reward for r in score_trace(low, failed, version="v").rewards] == [-1.0] * 4
    low.kind = "increments"
    assert [r.reward for r in score_trace(low, failed, version="v").rewards] == [0.0, 0.0, 0.0, -1.0], "it adds up"
    assert score_trace(own, failed, version="v").outcome == 0.5
    shaped = SharedSum({"path": "pipelines.credit.math_final_answer:MathFinalAnswer"})
    assert [r.reward for r in score_trace(shaped, failed, version="v").rewards] == [0.0] * 4


GAME = {
    "path": "pipelines.extensions.paper_credit.game_scores:GameScores",
    "settings": {"environment": "nim", "player": "solver"},
}


@pytest.mark.parametrize(
    "rule", [GameScores("nim", "solver"), SharedSum(GAME), InferredReward(GAME), CodeProgress(workers=["solver"])]
)
def test_an_agent_that_does_not_train_is_paid_nothing_in_episodes_that_failed_or_were_served(rule: CreditRule) -> None:
    played = trace(chain("1", "1", "1", bad_format=["verifier"])[:2])
    failed = replace(played, status=EpisodeStatus.TIMEOUT, cause=Cause.POLICY)
    served = replace(played, outcome_metadata={SERVED: {"score": 0.5}})
    for episode, reward in ((failed, 0.0), (served, 0.75)):
        paid = score_trace(rule, episode, version="v").rewards
        assert [(r.agent, r.reward) for r in paid] == [("solver", reward)]


SHARED = {"path": "pipelines.credit.outcome:OutcomeShare", "settings": {"sharing": ["solver"], "format_weight": 0.5}}


@pytest.mark.parametrize(
    "rule", [OutcomeShare(sharing=["solver"], format_weight=0.5), SharedSum(SHARED), InferredReward(SHARED)]
)
def test_an_agent_without_a_share_of_the_outcome_gets_none_in_served_episodes_either(rule: CreditRule) -> None:
    played = trace(chain("1", "1", "1", bad_format=["verifier"])[:2], answer="1")
    served = replace(played, outcome_metadata={SERVED: {"score": 0.5}})
    paid = score_trace(rule, served, version="v").rewards
    assert [(r.agent, r.reward) for r in paid] == [("solver", 0.75), ("verifier", 0.0)]
    failed = replace(played, status=EpisodeStatus.TIMEOUT, cause=Cause.POLICY)
    assert [(r.agent, r.reward) for r in score_trace(rule, failed, version="v").rewards] == [
        ("solver", 0.0),
        ("verifier", -0.5),
    ]


class Asking(OutcomeShare):
    """Says whom it asks."""

    def preflight(self) -> list[str]:
        return ["a judge"]


@pytest.mark.parametrize("wrap", [SharedSum, InferredReward])
def test_what_the_inner_rule_asks_and_cannot_read_is_said_of_the_outer_one_too(wrap: Callable[..., CreditRule]) -> None:
    rule = wrap({"path": "test_wrapped_rules:Asking", "settings": {"metric": "math"}})
    assert preflight(rule) == ["a judge"] and not reads(rule, "The result is 14.") and reads(rule, "14")
    assert preflight(wrap(GAME)) == [] and reads(wrap(GAME), "The result is 14.")

"""Scores of games are credit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from records import MakeTrace

from pipelines.credit.rule import worst_outcome
from pipelines.credit.step_rewards import StepRewards
from pipelines.extensions.paper_credit.game_scores import GameScores
from stores.types import EpisodeStatus
from tests.pipelines.credit.test_step_rewards import played

pytestmark = pytest.mark.fast


def test_an_episode_that_is_cut_before_its_world_begins_is_lost_and_one_that_ends_without_a_world_is_an_error(
    make_trace: MakeTrace,
) -> None:
    trace = replace(played(make_trace, ["act", "step"], [0.5]), tool_calls=())
    cut = replace(trace, status=EpisodeStatus.TRUNCATED)
    for rule in (StepRewards("home"), GameScores("home", trace.turns[0].agent)):
        assert rule.assign_credit(cut).outcome == worst_outcome(rule)
        with pytest.raises(ValueError, match="opened no world 'home'"):
            rule.assign_credit(trace)

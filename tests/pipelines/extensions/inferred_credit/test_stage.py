"""Stage score gives a rule that infers credit the episodes of earlier iterations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from records import MakeTrace
from stage_records import call, finish

from pipelines.credit.rule import Inferred, PastEpisode
from pipelines.extensions.inferred_credit.inferred import InferredReward
from pipelines.stages.score import score
from stores.types import EpisodeRewards, Trace
from tests.pipelines.stages.test_score import run_of

pytestmark = pytest.mark.fast


class Remembering(InferredReward):
    """Keeps what it was given of earlier iterations."""

    def infer(
        self, rewards: Sequence[EpisodeRewards], traces: Sequence[Trace], past: Sequence[PastEpisode]
    ) -> Inferred:
        self.past = past
        return super().infer(rewards, traces, past)


def test_credit_is_inferred_from_the_last_iterations_that_were_scored(make_trace: MakeTrace, tmp_path: Path) -> None:
    settings = {
        "inner": {"path": "pipelines.credit.outcome:OutcomeShare", "settings": {"metric": "em"}},
        "past_iterations": 2,
    }
    credit = {"path": f"{__name__}:Remembering", "settings": settings}
    train = {"algorithm": "reinforce_pp_baseline", "advantage": {"group_by": "task_agent_round"}}
    run = run_of(tmp_path, make_trace, num_iterations=4, credit=credit, train=train)
    assert isinstance(run.credit, Remembering)
    outcomes: dict[int, dict[str, float]] = {}
    for iteration, used in ((1, []), (2, [1]), (4, [2])):  # the third is collected, and not scored yet
        result = score(call(run, "score", iteration))
        finish(run, iteration, result)
        outcomes[iteration] = {r.episode_id: r.outcome for r in run.traces.read_rewards(result.rewards)}
        known = {p.trace.episode_id: p.outcome for p in run.credit.past}
        assert known == {name: outcome for k in used for name, outcome in outcomes[k].items()}
    assert len(outcomes[1]) == 2

"""Rules around another rule give the literal numbers of MAPoRL (arXiv 2502.18439), UMAD (2603.01221), MARTI and CORY (2410.06101)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from by_hand import Event, trace
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config.sections import DottedConfig
from pipelines.credit.math_progress import MathProgress
from pipelines.credit.rule import Credit, credit_version, load_credit, score_traces, turn_reward, worst_outcome
from pipelines.extensions.inferred_credit.inferred import InferredReward
from pipelines.extensions.paper_credit.debate import DebateReward
from pipelines.extensions.paper_credit.difference import DifferenceReward
from pipelines.extensions.paper_credit.influence import InfluenceReward
from pipelines.extensions.paper_credit.marti import HistoryShaping
from pipelines.extensions.paper_credit.rounds import influence
from pipelines.extensions.paper_credit.score_rules import ScoreRules
from pipelines.extensions.paper_credit.shared_sum import SharedSum
from pipelines.extensions.paper_credit.team_reward import TeamReward
from stores.traces.conventions import rounds_in_time
from stores.types import Cause, EpisodeStatus, Task, Trace

pytestmark = pytest.mark.fast


class TracedText:
    """Every turn earns the number that it says; `format` is its own part."""

    kind = "returns"

    def assign_credit(self, trace: Trace) -> Credit:
        rewards = []
        for i, turn in enumerate(trace.turns):
            parts = {"score": float(turn.fields["answer"])}
            parts |= {} if turn.is_format_ok else {"format": -0.5}
            rewards.append(turn_reward(trace, i, parts))
        return Credit(outcome=0.25, rewards=tuple(rewards))


class Low(TracedText):
    """The same, and failing has the outcome -1."""

    worst_outcome = -1.0
    format_weight = 0.5


class LowGrowing(Low):
    """The same, said to be increments."""

    kind = "increments"


class Growing(TracedText):
    """The same, said to be increments."""

    kind = "increments"


SAID = {"path": "test_shaping:TracedText"}
GROWING = {"path": "test_shaping:Growing"}


ONE = Task(task_id="t", prompt="q", answers=("1",))


def played(*rounds: Sequence[float | None]) -> Trace:
    """Agents a, b, ... that score these numbers, round by round; None: it does not speak."""
    events: list[Event] = [
        ("abc"[i], {"answer": str(score)}) for scores in rounds for i, score in enumerate(scores) if score is not None
    ]
    return trace(events)


def earned(rule: Any, episode: Trace) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for reward in rule.assign_credit(episode).rewards:
        found.setdefault(reward.agent, []).append(reward.reward)
    return found


@pytest.mark.parametrize("between", ["rounds", "agents"])
def test_a_difference_is_paid_to_the_agents_that_are_named(between: Any) -> None:
    rule = DifferenceReward(SAID, between=between, agents=["a"])
    assert earned(rule, played((0.5, 0.25), (1, 0.75)))["b"] == [0.25, 0.75], "what the inner rule pays"


GOLDEN = [(1, 0), (0, 1), (1, 1)]
"""Scores of two agents in three rounds; what MAPoRL (arXiv 2502.18439) pays for them is worked out by hand."""


@pytest.mark.parametrize(
    ("horizon", "sharing", "a", "b"),
    [
        ("last", "all", [1, 1, 1], [1, 1, 1]),
        ("last", "individual", [1, 1, 1], [1, 1, 1]),
        ("current", "all", [0.5, 0.5, 1], [0.5, 0.5, 1]),
        ("current", "individual", [1, 0, 1], [0, 1, 1]),
        ("discounted_sum", "all", [0.892086, 0.3 / 1.3, 1], [0.24 / 1.39, 1, 1]),
        ("discounted_sum", "individual", [0.784173, 0.3 / 1.3, 1], [0.39 / 1.39, 1, 1]),
    ],
)
def test_maporl_golden(horizon: Any, sharing: Any, a: list[float], b: list[float]) -> None:
    rule = ScoreRules(SAID, horizon=horizon, sharing=sharing)
    assert earned(rule, played(*GOLDEN)) == {"a": pytest.approx(a, abs=1e-6), "b": pytest.approx(b, abs=1e-6)}


@pytest.mark.parametrize(
    ("rounds", "bonus"),
    [
        ([(0, 1), (1, 1)], [0, 0.1, 0.4, 0]),  # a lets itself be persuaded of what is right
        ([(1, 0), (0, 0)], [0, -0.1, -0.4, 0]),  # a is misled
        ([(0, 0), (1, 0)], [0, 0.2, 0, 0]),  # a corrects what all had wrong
        ([(1, 1), (0, 1)], [0, -0.2, 0, 0]),  # a breaks what all had right
        ([(1, 0), (1, 1)], [0.4, 0, 0, 0.1]),  # a persuades b, which lets itself be persuaded
        ([(0, 1), (0, 0)], [-0.4, 0, 0, -0.1]),  # a misleads b
        ([(1, 1), (1, 1)], [0, 0, 0, 0]),
        ([(0.5, 0), (1, 0)], [0, 0, 0, 0]),  # from neither side
    ],
)
def test_maporl_pays_for_changes_of_mind_and_for_causing_them(
    rounds: list[tuple[float, float]], bonus: list[float]
) -> None:
    rule = ScoreRules(SAID, horizon="current", sharing="individual", persuaded=0.1, corrected=0.2, persuading=0.4)
    got = {"a": [], "b": []}
    for reward in rule.assign_credit(played(*rounds)).rewards:
        got[reward.agent].append(reward.breakdown["bonus"])
    assert got["a"] + got["b"] == pytest.approx(bonus)


def test_an_agent_by_itself_is_paid_for_correcting_itself() -> None:
    rule = ScoreRules(SAID, horizon="current", persuaded=0.1, corrected=0.2, persuading=0.4)
    assert earned(rule, played((0,), (1,), (0,))) == {"a": [0, 1.2, -0.2]}


@pytest.mark.parametrize(
    ("settings", "kind", "a", "b"),
    [
        ({}, "returns", [1, 1, 2], [1, 1, 2]),
        ({"team": "individual"}, "increments", [1, 0, 1], [0, 1, 1]),
        ({"team": "max"}, "returns", [1, 1, 1], [1, 1, 1]),
        ({"team": "mean"}, "returns", [0.5, 0.5, 1], [0.5, 0.5, 1]),
        ({"team": "dictator", "agents": ["b", "a"]}, "returns", [0, 1, 1], [0, 1, 1]),
        ({"timing": "sparse"}, "returns", [0, 0, 2], [0, 0, 2]),
        ({"timing": "sparse", "team": "individual"}, "increments", [0, 0, 1], [0, 0, 1]),
        ({"timing": "accumulative"}, "returns", [4, 3, 2], [4, 3, 2]),
        ({"timing": "accumulative", "team": "individual"}, "returns", [2, 1, 1], [2, 2, 1]),
        ({"timing": "discounted", "team": "individual", "gamma": 0.5}, "returns", [1.25, 0.5, 1], [0.75, 1.5, 1]),
    ],
)
def test_umad_team_rewards(settings: dict[str, Any], kind: str, a: list[float], b: list[float]) -> None:
    rule = TeamReward(SAID, **settings)
    assert rule.kind == kind
    assert earned(rule, played(*GOLDEN)) == {"a": pytest.approx(a), "b": pytest.approx(b)}


def test_umad_influence_is_the_sign_of_how_the_others_moved() -> None:
    rule = InfluenceReward(SAID)
    assert earned(rule, played(*GOLDEN)) == {"a": [1.2, 0, 1], "b": [-0.2, 1.2, 1]}
    assert earned(InfluenceReward(SAID, strength=0.5), played((0, 0, 0), (1, 1, 0))) == {
        "a": [0.5, 1],
        "b": [0.5, 1],
        "c": [0.5, 0],
    }
    assert influence([{"a": 1.0, "b": 1.0, "c": 0.0}, {"a": 0.0, "b": 0.0, "c": 1.0}], 0, "a") == 0


def test_influence_is_the_same_in_whatever_order_agents_speak() -> None:
    scores = {"a": (1, 0), "b": (0, 1), "c": (0, 0)}
    found = set()
    for order in itertools.permutations(scores):
        events = [(agent, {"answer": str(scores[agent][t])}) for t in (0, 1) for agent in order]
        found.add(repr(sorted(earned(InfluenceReward(SAID), trace(events)).items())))
    assert len(found) == 1


@pytest.mark.parametrize(
    ("mode", "past", "now", "reward"),
    [
        ("margin", 0.5, 1, 1.25),
        ("margin", 1, 0, -0.5),
        ("quality", 0.5, 1, 1.25),
        ("quality", 0.25, 0, -0.375),
        ("quality", 1, 0, 0),
    ],
)
def test_marti_golden(mode: Any, past: float, now: float, reward: float) -> None:
    """MARTI's margin R + alpha (R - Q) is 1.25 for alpha 0.5, R = 1 and Q = 0.5."""
    assert earned(HistoryShaping(SAID, mode=mode), played((past,), (now,))) == {"a": [past, pytest.approx(reward)]}


def test_martis_past_may_be_the_other_episodes_of_the_scored_set() -> None:
    episodes = [played((1, 0)), played((0, 0)), played((0.5, 1)), replace(played((9, 9)), variant="greedy")]
    rule = HistoryShaping(SAID, alpha=0.5, past="episodes")
    found = [[r.reward for r in credit.rewards] for credit in rule.assign_all(episodes)]
    assert found[0] == pytest.approx([1 + 0.5 * (1 - 0.25), 0 + 0.5 * (0 - 0.5)])
    assert found[1] == pytest.approx([0 + 0.5 * (0 - 0.75), 0 + 0.5 * (0 - 0.5)])
    assert found[2] == pytest.approx([0.5 + 0.5 * (0.5 - 0.5), 1 + 0.5 * (1 - 0)])
    assert found[3] == pytest.approx([9 + 0.5 * (9 - 0.5), 9 + 0.5 * (9 - 1 / 3)]), "a variant is nobody's past"
    assert [r.reward for r in rule.assign_credit(episodes[0]).rewards] == [1, 0]


def test_a_set_is_scored_the_same_whatever_its_order() -> None:
    numbers = random.Random(0)
    episodes = [
        replace(played((numbers.random(), 0.1), (numbers.random(), 0.7)), episode_id=f"e{i}") for i in range(50)
    ]
    rule = ScoreRules(
        {
            "path": "pipelines.extensions.paper_credit.marti:HistoryShaping",
            "settings": {"inner": SAID, "past": "episodes"},
        }
    )
    first = {r.episode_id: r for r in score_traces(rule, episodes, version="v")}
    numbers.shuffle(episodes)
    assert {r.episode_id: r for r in score_traces(rule, episodes, version="v")} == first


@given(
    rounds=st.lists(st.tuples(st.integers(-8, 8), st.integers(-8, 8)), min_size=1, max_size=4),
    factor=st.integers(-3, 3),
    shift=st.integers(-3, 3),
)
@pytest.mark.parametrize(
    ("rule", "shifted"),
    [
        (ScoreRules(SAID), lambda t, T: 1),
        (ScoreRules(SAID, horizon="last"), lambda t, T: 1),
        (ScoreRules(SAID, sharing="individual"), lambda t, T: 1),
        (TeamReward(SAID, team="mean"), lambda t, T: 1),
        (TeamReward(SAID, timing="sparse"), lambda t, T: 2 * (t == T - 1)),
        (TeamReward(SAID, timing="accumulative", team="individual"), lambda t, T: T - t),
        (SharedSum(SAID), lambda t, T: 2 * T),
        (DifferenceReward(SAID), lambda t, T: t == 0),
        (DifferenceReward(SAID, between="agents"), lambda t, T: 0),
        (HistoryShaping(SAID), lambda t, T: 1),
    ],
)
def test_scaled_scores_scale_the_rewards_and_a_shift_acts_as_the_formula_says(
    rule: Any, shifted: Any, rounds: list[tuple[int, int]], factor: int, shift: int
) -> None:
    before = earned(rule, played(*rounds))
    after = earned(rule, played(*[(factor * a + shift, factor * b + shift) for a, b in rounds]))
    for agent, rewards in before.items():
        wanted = [factor * reward + shift * shifted(t, len(rounds)) for t, reward in enumerate(rewards)]
        assert after[agent] == pytest.approx(wanted, abs=1e-9)


def test_cory_pays_both_what_both_earned() -> None:
    assert earned(SharedSum(SAID), played((1, 0.5))) == {"a": [1.5], "b": [1.5]}
    assert earned(SharedSum(GROWING), played((1, 0), (1, 0))) == {"a": [2, 2], "b": [2, 2]}


def test_differences_between_rounds_add_up_and_between_agents_cancel() -> None:
    between_rounds = DifferenceReward(SAID)
    assert (between_rounds.kind, earned(between_rounds, played(*GOLDEN))) == (
        "increments",
        {"a": [1, -1, 1], "b": [0, 1, 0]},
    )
    between_agents = DifferenceReward(SAID, between="agents")
    assert (between_agents.kind, earned(between_agents, played((1, 0, 0.5), (1, None, None)))) == (
        "returns",
        {"a": [0.75, 1], "b": [-0.75], "c": [0]},
    )


def test_format_and_outcome_and_other_agents_stay_as_the_inner_rule_has_them() -> None:
    episode = trace([("a", {"answer": "1", "_bad": "no tag"}), ("b", {"answer": "1"}), ("c", {"answer": "0"})])
    credit = TeamReward(SAID, agents=["a", "b"]).assign_credit(episode)
    assert [(r.reward, r.breakdown) for r in credit.rewards] == [
        (1.5, {"team": 2, "format": -0.5}),
        (2, {"team": 2}),
        (0, {"score": 0}),
    ]
    assert credit.outcome == 0.25


LOW = {"path": "test_shaping:Low"}
LOW_GROWING = {"path": "test_shaping:LowGrowing"}


@pytest.mark.parametrize(
    ("rule", "rewards"),
    [
        (DifferenceReward(LOW), [0, -0.5, -1]),
        (DifferenceReward(LOW, between="agents"), [-1, -1.5, -1]),
        (SharedSum(LOW_GROWING), [-1, -1.5, -1]),
        (InfluenceReward(LOW_GROWING), [0, -0.5, -1]),
        (
            SharedSum(
                {"path": "pipelines.extensions.paper_credit.difference:DifferenceReward", "settings": {"inner": LOW}}
            ),
            [-1, -1.5, -1],
        ),
        (InferredReward(LOW), [-1, -1.5, -1]),
    ],
)
def test_a_failed_episode_has_the_worst_outcome_of_the_inner_rule_paid_by_the_kind_of_the_outer_one(
    rule: Any, rewards: list[float]
) -> None:
    episode = trace([("a", {"answer": "1"}), ("b", {"answer": "1", "_bad": "no tag"}), ("a", {"answer": "1"})])
    failed = replace(episode, status=EpisodeStatus.TOOL_ERROR, cause=Cause.POLICY)
    (scored,) = score_traces(rule, [failed], version="v")
    assert worst_outcome(rule) == scored.outcome == -1, "what the gate fills lost episodes with"
    assert [reward.reward for reward in scored.rewards] == rewards


DIFFERENCE = {
    "path": "pipelines.extensions.paper_credit.difference:DifferenceReward",
    "settings": {"inner": SAID, "between": "agents"},
}


@pytest.mark.parametrize(
    "rule",
    [
        HistoryShaping(SAID, mode="quality", past="episodes"),
        DifferenceReward(SAID),
        DifferenceReward(SAID, between="agents"),
        InfluenceReward(SAID),
        InfluenceReward(GROWING),
        ScoreRules(SAID, persuading=0.5),
        InferredReward(DIFFERENCE),
        DebateReward(influence=0.2, debaters=["a", "b"]),
        MathProgress(),
    ],
)
def test_failing_never_pays_more_than_being_wrong_whatever_a_rule_takes_away(rule: Any) -> None:
    others = [played((1, 0), (0, 0)), played((0, 1), (0, 0)), played((1, 1), (1, 1)), played((0, 0), (0, 0))]
    crashed = trace([("a", {"answer": "1"}), ("b", {"answer": "1"}), ("a", {"answer": "1", "_bad": "no tag"})])
    failed = replace(crashed, status=EpisodeStatus.TOOL_ERROR, cause=Cause.POLICY)
    episodes = [replace(t, episode_id=f"e{i}", task=ONE) for i, t in enumerate([*others, failed])]
    *scored, last = score_traces(rule, episodes, version="v")
    bare = [[r.reward - r.breakdown.get("format", 0.0) for r in s.rewards] for s in (*scored, last)]
    assert min(min(rewards) for rewards in bare[:-1]) < 0, "something is taken away"
    assert bare[-1][-1] <= min(min(rewards) for rewards in bare[:-1]) + 1e-9
    assert rule.kind == "increments" or max(bare[-1]) == min(bare[-1])
    assert rule.kind == "returns" or sum(bare[-1]) <= min(sum(rewards) for rewards in bare[:-1]) + 1e-9
    assert last.outcome == 0.0


def test_failing_costs_what_the_same_agent_loses_in_the_same_group() -> None:
    def paid(kind: str) -> list[float]:
        turns = [trace([("planner", {}), ("searcher", {})]) for _ in range(3)]
        earned = {"e0": (0.5, -0.2), "e1": (0.0, -1.0)}  # the second is of another group
        rule: Any = SimpleNamespace(
            kind=kind,
            assign_credit=lambda t: Credit(
                outcome=0.0, rewards=tuple(turn_reward(t, i, {"made": r}) for i, r in enumerate(earned[t.episode_id]))
            ),
        )
        groups = {"e0": "g", "e1": "h", "e2": "g"}
        first, other, failed = (
            replace(t, episode_id=name, group_id=groups[name]) for t, name in zip(turns, groups, strict=True)
        )
        failed = replace(failed, status=EpisodeStatus.TOOL_ERROR, cause=Cause.POLICY)
        alone = replace(failed, group_id="i")
        return [
            [r.reward for r in score_traces(rule, [first, other, last], version="v")[-1].rewards]
            for last in (failed, alone)
        ]  # type: ignore[misc]

    assert paid("returns") == [[0.0, -0.2], [0.0, -1.0]], "without a judged episode of its group, all count"
    assert paid("increments") == [[0.0, -0.2], [0.0, -1.0]]


def test_where_all_episodes_fail_or_others_earn_more_the_worst_outcome_is_paid() -> None:
    rule = SharedSum(SAID)
    failed = replace(played((1, 1)), status=EpisodeStatus.TOOL_ERROR, cause=Cause.POLICY)
    for others in ([], [replace(played((1, 1)), episode_id="o")]):
        assert [r.reward for r in score_traces(rule, [*others, failed], version="v")[-1].rewards] == [0.0, 0.0]


def test_the_inner_rule_counts_in_the_credit_version() -> None:
    def version(inner: dict[str, Any]) -> str:
        return credit_version(
            DottedConfig(path="pipelines.extensions.paper_credit.shared_sum:SharedSum", settings={"inner": inner})
        )

    outcome = {"path": "pipelines.credit.outcome:OutcomeShare"}
    assert version(outcome) == version(outcome) != version(SAID)
    assert version(outcome) != version(outcome | {"settings": {"metric": "f1"}})


def test_a_rule_is_named_by_the_classes_that_it_inherits_from_too() -> None:
    from pipelines.credit.rule import _used
    from pipelines.extensions.paper_credit import shared_sum

    assert "pipelines.extensions.paper_credit.shaping" in {module.__name__ for module in _used(shared_sum)}


@pytest.mark.parametrize(
    ("path", "settings", "message"),
    [
        (
            "score_rules:ScoreRules",
            {"inner": SAID, "horizon": "next"},
            r"settings\.horizon: .*'last', 'current' or .* \(got 'next'\)",
        ),
        ("score_rules:ScoreRules", {"inner": SAID, "gamma": 2}, r"gamma: Input should be less than or equal to 1"),
        ("score_rules:ScoreRules", {"inner": GROWING}, r"inner: .*:Growing pays increments, but ScoreRules needs"),
        ("team_reward:TeamReward", {"inner": SAID, "team": "dictator"}, r"dictator needs credit\.settings\.agents"),
        (
            "marti:HistoryShaping",
            {"inner": SAID, "mode": "mean"},
            r"settings\.mode: .*'margin' or 'quality' \(got 'mean'\)",
        ),
        ("shared_sum:SharedSum", {"inner": {"paths": "x:y"}}, r"inner: unknown key 'paths': did you mean 'path'"),
        ("shared_sum:SharedSum", {"inner": {"path": "nowhere:Rule"}}, r"inner\.path: cannot import 'nowhere'"),
        ("shared_sum:SharedSum", {}, r"credit\.settings: 'inner' missing: SharedSum needs it"),
    ],
)
def test_what_cannot_be_shaped_is_refused(path: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_credit(DottedConfig(path=f"pipelines.extensions.paper_credit.{path}", settings=settings))


def test_an_agent_that_speaks_once_at_the_end_is_in_the_last_round() -> None:
    """A solver twice, then a judge, whose own first call is its last: nothing before it is its doing."""
    episode = trace([("solver", {"answer": "0"}), ("solver", {"answer": "1"}), ("judge", {"answer": "0.25"})])
    assert rounds_in_time(episode.turns) == {0: 0, 1: 1, 2: 1}
    assert earned(InfluenceReward(SAID, strength=0.2), episode) == {"solver": [0.0, 1.0], "judge": [0.25]}
    assert earned(TeamReward(SAID, timing="sparse", team="sum"), episode) == {"solver": [0.0, 1.25], "judge": [1.25]}
    assert earned(TeamReward(SAID, timing="accumulative", team="sum"), episode) == {
        "solver": [1.25, 1.25],
        "judge": [1.25],
    }
    assert earned(ScoreRules(SAID, horizon="discounted_sum"), episode)["judge"] == [0.25]

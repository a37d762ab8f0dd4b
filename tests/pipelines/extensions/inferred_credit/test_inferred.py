"""Inferred credit: which turns lead to the outcome is found from whole episodes, and nothing is inferred from noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import expit

from pipelines.config.run_config import load_config
from pipelines.credit.outcome import OutcomeShare
from pipelines.credit.rule import Credit, credits_of, score_traces, turn_reward
from pipelines.extensions.inferred_credit.inferred import CHANCE, InferredReward, PastEpisode, _order
from pipelines.extensions.inferred_credit.turn_values import fit, turn_features
from pipelines.runners.validate import check
from stores.types import Cause, EpisodeRewards, EpisodeStatus, Trace
from tests.records import build_trace

pytestmark = pytest.mark.fast

INNER = {"path": "pipelines.credit.outcome:OutcomeShare", "settings": {"metric": "em", "format_weight": 0.5}}
BARE = {"path": "pipelines.credit.outcome:OutcomeShare", "settings": {"metric": "em"}}


def episode(
    number: int, *, iteration: int, tasks: int, rng: random.Random, wins: Callable[[list[bool]], bool]
) -> Trace:
    """An episode of `tasks`: a counter counts four piles, right or wrong, and a talker says anything; `wins` says how it ends."""
    base = build_trace(number % tasks * 2, iteration=iteration)
    turns, verdicts = [], []
    for i in range(4):
        good, bad = rng.randint(1, 4), rng.randint(1, 4)
        is_right = rng.random() < 0.7
        verdicts.append(is_right)
        said = str(good if is_right else good + bad)
        turns.append(_turn(base, 2 * i, "counter", f"Count the good coins.\nPile: {good}+{bad}", said))
        turns.append(_turn(base, 2 * i + 1, "talker", "Say something.", rng.choice(["fine", "rain", "busy"])))
    return replace(
        base,
        episode_id=f"{iteration:04x}-{number}",
        group_id=base.task.task_id,
        turns=tuple(turns),
        answer="5" if wins(verdicts) else "4",
        outcome_metadata={"verdicts": verdicts},
        tool_calls=(),
    )


def _turn(base: Trace, index: int, agent: str, asked: str, said: str) -> Any:
    return replace(base.turns[0], turn_index=index, agent=agent, prompt_text=asked, completion_text=said, fields={})


def iteration(
    number: int, *, wins: Callable[[list[bool]], bool] = all, seed: int = 0, episodes: int = 64
) -> list[Trace]:
    rng = random.Random(f"{seed}/{number}")
    return [episode(i, iteration=number, tasks=8, rng=rng, wins=wins) for i in range(episodes)]


def scored(rule: InferredReward, traces: list[Trace]) -> list[EpisodeRewards]:
    return score_traces(rule, traces, version="v")


def past(rule: InferredReward, traces: list[Trace]) -> list[PastEpisode]:
    return [PastEpisode(trace=t, outcome=r.outcome) for t, r in zip(traces, scored(rule, traces), strict=True)]


def test_turns_that_lead_to_success_earn_more_than_those_that_lose_it() -> None:
    rule = InferredReward(BARE)
    earlier = [t for k in range(1, 5) for t in iteration(k)]
    now = iteration(5)
    found = rule.infer(scored(rule, now), now, past(rule, earlier))
    assert found.is_used and found.fidelity > 0.9
    right, wrong, idle = [], [], []
    for trace, rewards in zip(now, found.rewards, strict=True):
        assert rewards.episode_id == trace.episode_id
        assert rewards.outcome == float(all(trace.outcome_metadata["verdicts"]))
        for turn, reward in zip(trace.turns, rewards.rewards, strict=True):
            assert reward.breakdown == {"inferred": reward.reward, "format": 0.0}
            is_right = trace.outcome_metadata["verdicts"][turn.turn_index // 2]
            (idle if turn.agent == "talker" else right if is_right else wrong).append(reward.reward)
    ordered = np.mean([r > w for r in right for w in wrong])
    assert ordered > 0.97
    assert len(idle) == 4 * len(now) and set(idle) == {0.0}, "a free rider"


def played(design: Callable[[random.Random], Design], *, num_iterations: int = 5, seed: int = 0) -> list[list[Trace]]:
    """Episodes of a team whose turns are known, by iteration: 64 of 8 tasks each."""
    iterations = []
    for k in range(1, num_iterations + 1):
        rng = random.Random(f"{seed}/{k}")
        traces = []
        for i in range(64):
            base = build_trace(i % 8 * 2, iteration=k)
            turns, is_won = design(rng)
            traces.append(
                replace(
                    base,
                    episode_id=f"{k:04x}-{i}",
                    group_id=base.task.task_id,
                    turns=tuple(_turn(base, n, *turn) for n, turn in enumerate(turns)),
                    answer="5" if is_won else "4",
                    tool_calls=(),
                )
            )
        iterations.append(traces)
    return iterations


Design = tuple[list[tuple[str, str, str]], bool]
"""Agent, prompt and completion of each turn, and whether the episode is won."""


def scout_and_solver(rng: random.Random, *, idle: bool = False) -> Design:
    """Looking shows the digit to the solver, who copies it in 90% of all cases and else guesses; another scout changes nothing."""
    digit, looks = rng.choice("0123456789"), rng.random() < 0.5
    said = digit if looks and rng.random() < 0.9 else rng.choice("0123456789")
    others = [("idle scout", "Look or skip?", rng.choice(["look", "skip"]))] if idle else []
    asked = f"Say the digit.\nSeen: {digit if looks else 'nothing'}"
    turns = [("scout", "Look or skip?", "look" if looks else "skip"), *others, ("solver", asked, said)]
    return turns, said == digit


def two_scouts(rng: random.Random) -> Design:
    """As before, beside a scout who says the same words and is not heard."""
    return scout_and_solver(rng, idle=True)


def copied_verdict(rng: random.Random) -> Design:
    """A verifier who checks knows it in 90% of all cases, one who guesses in half; the last agent says what the verifier said."""
    truth, checks = rng.choice(["yes", "no"]), rng.random() < 0.5
    verdict = truth if checks and rng.random() < 0.8 else rng.choice(["yes", "no"])
    turns = [
        ("verifier", "Is it so?", f"{'checked' if checks else 'guessed'} {verdict}"),
        ("speaker", f"Verdict: {verdict}", verdict),
    ]
    return turns, verdict == truth


def ignored_plan(rng: random.Random) -> Design:
    """A plan that stands in the solver's prompt and changes nothing."""
    plan, good, bad, is_right = rng.choice("ABC"), rng.randint(1, 4), rng.randint(1, 4), rng.random() < 0.6
    asked = f"Plan: {plan}\nPile: {good}+{bad}"
    return [
        ("planner", "Make a plan.", f"plan {plan}"),
        ("solver", asked, str(good if is_right else good + bad)),
    ], is_right


@pytest.mark.parametrize(
    ("design", "agent", "word", "worth"),
    [
        (scout_and_solver, "scout", "look", 0.82),
        (two_scouts, "scout", "look", 0.82),
        (two_scouts, "idle scout", "look", 0.0),
        (copied_verdict, "verifier", "checked", 0.4),
        (ignored_plan, "planner", "plan A", 0.0),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_turn_whose_effect_goes_through_a_later_one_is_paid_what_it_is_worth(
    design: Callable[[random.Random], Design], agent: str, word: str, worth: float, seed: int
) -> None:
    rule = InferredReward(BARE)
    *earlier, now = played(design, seed=seed)
    found = rule.infer(scored(rule, now), now, past(rule, [t for traces in earlier for t in traces]))
    assert found.is_used
    paid: dict[bool, list[float]] = {True: [], False: []}
    for trace, episode in zip(now, found.rewards, strict=True):
        for turn, reward in zip(trace.turns, episode.rewards, strict=True):
            if turn.agent == agent:
                paid[word in turn.completion_text].append(reward.reward)
    assert np.mean(paid[True]) - np.mean(paid[False]) == pytest.approx(worth, abs=0.3)
    assert max(np.std(rewards) for rewards in paid.values()) < 0.15, "whatever the later turn made of it"


def two_words(rng: random.Random) -> Design:
    """Of the second agent's words the better one depends on what the first agent said."""
    first, second = rng.choice("xy"), rng.choice("uv")
    share = {"xu": 0.9, "xv": 0.3, "yu": 0.1, "yv": 0.5}[first + second]
    return [("first", "Say x or y.", first), ("second", f"The first said {first}.", second)], rng.random() < share


@pytest.mark.parametrize("seed", range(4))
def test_the_better_word_is_paid_more_in_each_state(seed: int) -> None:
    rule = InferredReward(BARE)
    *earlier, now = played(two_words, seed=seed)
    found = rule.infer(scored(rule, now), now, past(rule, [t for traces in earlier for t in traces]))
    assert found.is_used
    paid: dict[str, list[float]] = {}
    for trace, episode in zip(now, found.rewards, strict=True):
        first, second = (turn.completion_text for turn in trace.turns)
        for words, reward in zip((first, first + second), episode.rewards, strict=True):
            paid.setdefault(words, []).append(reward.reward)
    mean = {words: np.mean(rewards) for words, rewards in paid.items()}
    assert mean["x"] > mean["y"] and mean["xu"] > mean["xv"] and mean["yv"] > mean["yu"]


def test_rewards_are_in_the_unit_of_the_outcome() -> None:
    rule = InferredReward(BARE)
    now = played(scout_and_solver, num_iterations=1)[0]
    rewards = scored(rule, now)
    larger = [replace(episode, outcome=30 * episode.outcome - 7) for episode in rewards]
    one, thirty = (
        [r.reward for episode in rule.infer(given, now, []).rewards for r in episode.rewards]
        for given in (rewards, larger)
    )
    assert np.abs(one).max() > 0.3 and np.allclose(np.array(one) * 30, thirty, atol=1e-3)


@pytest.mark.parametrize(
    ("num_agents", "share_won"),
    [
        pytest.param(8, 0.4, marks=pytest.mark.test),
        *(pytest.param(*kind, marks=pytest.mark.nightly) for kind in ((2, 0.05), (2, 0.4), (8, 0.05))),
    ],
)
def test_what_chance_decides_is_inferred_from_in_one_run_of_eight_at_most(num_agents: int, share_won: float) -> None:
    rule = InferredReward(BARE)

    def coin(rng: random.Random) -> Design:
        said = [
            (f"agent {i}", f"Say {rng.randint(0, 9)}", rng.choice(["fine", "rain", "sun"])) for i in range(num_agents)
        ]
        return said, rng.random() < share_won

    found = []
    for seed in range(40):
        (now,) = played(coin, num_iterations=1, seed=seed)
        rewards = scored(rule, now)
        found.append(rule.infer(rewards, now, []))
        assert found[-1].is_used or found[-1].rewards == rewards
    assert sum(one.is_used for one in found) <= 40 * CHANCE
    assert abs(np.mean([one.fidelity for one in found if one.fidelity is not None])) < 0.2


def test_failing_pays_less_than_anything_else_though_all_others_are_right() -> None:
    rule = InferredReward(BARE)
    now = [
        t if t.answer == "5" else replace(t, status=EpisodeStatus.AGENT_ERROR, cause=Cause.POLICY) for t in iteration(1)
    ]
    found = rule.infer(scored(rule, now), now, [])
    assert found.is_used
    paid = {True: [], False: []}
    for trace, episode in zip(now, found.rewards, strict=True):
        paid[trace.cause is Cause.POLICY] += [reward.reward for reward in episode.rewards]
    assert max(paid[True]) < min(0.0, *paid[False]) - 0.1


def test_what_was_copied_from_the_same_place_counts_for_words_that_were_never_seen() -> None:
    base = build_trace()

    def features(pile: str, said: str) -> set[int]:
        turns = [
            _turn(base, i, "a", f"Pile: {p}", s) for i, (p, s) in enumerate([("1+9", "1"), ("8+2", "10"), (pile, said)])
        ]
        return set(turn_features([turns])[0][2].tolist())

    assert len(features("3+4", "3") & features("5+6", "5")) > len(features("3+4", "3") & features("5+6", "11"))


def test_where_all_end_alike_or_there_is_one_task_the_rewards_of_the_inner_rule_stay() -> None:
    rule = InferredReward(BARE)
    for now in (iteration(1, wins=lambda _: False), iteration(1, episodes=1)):
        found = rule.infer(scored(rule, now), now, [])
        assert not found.is_used and found.fidelity is None and found.rewards == scored(rule, now)
    assert rule.infer([], [], []).rewards == []
    silent = [replace(t, turns=(), status=EpisodeStatus.AGENT_ERROR, cause=Cause.POLICY) for t in iteration(1)]
    assert rule.infer(scored(rule, silent), silent, []).rewards == scored(rule, silent)
    earlier = past(rule, [t for k in range(2, 5) for t in iteration(k)])
    found = rule.infer(scored(rule, silent), silent, earlier)
    assert found.is_used and all(episode.rewards == () for episode in found.rewards)


class Shared(OutcomeShare):
    """Pays every turn the mean outcome of all episodes that are scored together."""

    def assign_all(self, traces: Sequence[Trace]) -> list[Credit]:
        credits = [self.assign_credit(trace) for trace in traces]
        mean = sum(credit.outcome for credit in credits) / len(credits)
        return [
            replace(c, rewards=tuple(turn_reward(t, i, {"shared": mean}) for i in range(len(t.turns))))
            for t, c in zip(traces, credits, strict=True)
        ]


def test_an_inner_rule_that_compares_episodes_sees_all_of_them() -> None:
    now = iteration(1)
    rule = InferredReward({"path": f"{__name__}:Shared", "settings": {"metric": "em"}})
    mean = sum(trace.answer == "5" for trace in now) / len(now)
    assert {reward.reward for credit in credits_of(rule, now) for reward in credit.rewards} == {mean}


def test_the_order_of_episodes_does_not_matter() -> None:
    rule = InferredReward(BARE)
    earlier, now = past(rule, iteration(1)), iteration(2)
    shuffled = random.Random(1).sample(now, len(now))
    one = rule.infer(scored(rule, now), now, earlier)
    other = rule.infer(scored(rule, shuffled), shuffled, earlier[::-1])
    assert {r.episode_id: r for r in other.rewards} == {r.episode_id: r for r in one.rewards}


def test_no_episode_is_credited_by_its_own_outcome_or_one_of_its_task() -> None:
    rule = InferredReward(BARE)
    earlier, now = past(rule, iteration(1)), iteration(2)
    task = now[0].task.task_id
    flipped = [replace(t, answer="4" if t.answer == "5" else "5") if t.task.task_id == task else t for t in now]
    one = rule.infer(scored(rule, now), now, earlier).rewards
    other = rule.infer(scored(rule, flipped), flipped, earlier).rewards
    of_task = [i for i, trace in enumerate(now) if trace.task.task_id == task]
    before = np.array([r.reward for i in of_task for r in one[i].rewards if r.agent == "counter"])
    after = np.array([r.reward for i in of_task for r in other[i].rewards if r.agent == "counter"])
    assert np.abs(before).max() > 0 and np.allclose(after / before, (after / before)[0]), (
        "the agent's factor alone differs"
    )
    assert [one[i].outcome for i in of_task] != [other[i].outcome for i in of_task]


def test_failing_never_pays_more_than_being_wrong_and_formats_keep_their_penalty() -> None:
    rule = InferredReward(INNER)
    now = iteration(1) + iteration(2)
    now[0] = replace(
        now[0], status=EpisodeStatus.AGENT_ERROR, cause=Cause.POLICY, error="no call of a tool can be read"
    )
    turns = (replace(now[1].turns[0], is_format_ok=False), *now[1].turns[1:])
    now[1] = replace(now[1], turns=turns)
    found = rule.infer(scored(rule, now), now, [])
    assert found.is_used
    others = [reward.breakdown["inferred"] for episode in found.rewards[1:] for reward in episode.rewards]
    (of_failed,) = {reward.breakdown["inferred"] for reward in found.rewards[0].rewards}
    assert of_failed < min(others) - 0.1
    assert found.rewards[0].outcome == 0.0
    first = found.rewards[1].rewards[0]
    assert first.breakdown["format"] == -0.5 and first.reward == first.breakdown["inferred"] - 0.5


def test_outcomes_of_any_range_are_ordered() -> None:
    features = turn_features([trace.turns for trace in iteration(1)])
    wins = np.array([float(all(t.outcome_metadata["verdicts"])) for t in iteration(1)])
    weights = fit(features, wins)
    fitted = np.array([sum(weights[turn].sum() for turn in turns) for turns in features])
    assert _order([(wins, fitted)]) == _order([(wins * 30 - 7, fitted)]) > 0.95
    assert _order([(wins, -fitted)]) == -_order([(wins, fitted)])
    assert _order([(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0, 2.0]))]) == pytest.approx(1 / 3)
    assert _order([(wins, fitted), (wins, fitted - 100)]) == _order([(wins, fitted)]), (
        "levels of models are not compared"
    )


def test_the_fit_is_where_the_gradient_is_zero() -> None:
    now = iteration(1)
    now[0] = replace(now[0], turns=now[0].turns[:3])
    now[1] = replace(now[1], turns=())
    features = turn_features([trace.turns for trace in now])
    outcomes = np.array([float(all(t.outcome_metadata["verdicts"])) for t in now])
    weights = fit(features, outcomes)
    rows = [(turns[:end], i) for i, turns in enumerate(features) for end in range(1, len(turns) + 1)]
    shares = np.array([1 / len(features[i]) for _, i in rows])
    log_odds = np.array([sum(weights[turn].sum() for turn in turns) for turns, _ in rows])
    ended = outcomes[[i for _, i in rows]]
    bias = brentq(lambda bias: float((shares * (expit(log_odds + bias) - ended)).sum()), -20, 20)
    gradient = weights.copy()
    for (turns, _), error in zip(rows, shares * (expit(log_odds + bias) - ended), strict=True):
        for turn in turns:
            np.add.at(gradient, turn, error)
    assert np.abs(weights).max() > 0.2 and np.abs(gradient).max() < 1e-2


def test_of_long_texts_the_ends_are_read() -> None:
    base = build_trace()
    turns = [_turn(base, i, "a", f"{'front ' * 9000}asked {i}", f"said {i}{' back' * 9000}") for i in range(20)]
    (features,) = turn_features([turns])
    (others,) = turn_features(
        [[_turn(base, i, "a", t.prompt_text[600:], t.completion_text[:-600]) for i, t in enumerate(turns)]]
    )
    assert all(len(turn) < 400 for turn in features)
    for one, other in zip(features, others, strict=True):
        assert len(set(one.tolist()) ^ set(other.tolist())) == 2, "only the hash of the whole turn differs"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inner": {"path": "pipelines.credit.math_progress:MathProgress"}}, r"inner: .*MathProgress pays increments"),
        (
            {
                "inner": {
                    "path": "pipelines.extensions.inferred_credit.inferred:InferredReward",
                    "settings": {"inner": BARE},
                }
            },
            r"inner: .*InferredReward learns from earlier iterations.*outermost",
        ),
        ({"inner": {"path": "nowhere:Rule"}}, r"credit\.settings\.inner\.path"),
        ({"inner": BARE, "past_iterations": -1}, r"past_iterations: -1 is no number of iterations: give 0 or more"),
        ({"inner": BARE, "past_iterations": "all"}, r"past_iterations: 'all' is no number"),
    ],
)
def test_what_it_cannot_wrap_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InferredReward(**settings)


@pytest.mark.parametrize("algorithm", ["grpo", "counterfactual", "mappo"])
def test_estimators_that_compare_whole_episodes_are_refused(algorithm: str) -> None:
    changes: dict[str, Any] = {
        "credit": {"path": "pipelines.extensions.inferred_credit.inferred:InferredReward", "settings": {"inner": BARE}},
        "train.algorithm": algorithm,
    }
    changes |= {"collect.variants": {"kind": "counterfactual"}} if algorithm == "counterfactual" else {}
    changes |= {"train.team": {}} if algorithm == "mappo" else {}
    config = load_config("infra/runs/demo.yaml", changes)
    with pytest.raises(ValueError, match=r"credit rule .*InferredReward.* tells|credit: .*InferredReward.* tells"):
        check(config)

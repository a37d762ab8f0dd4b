"""baselines: which variant stands against which turn, on literal numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic_traces import make_turns_of, rewards_for

from stores.types import EpisodeRewards, Trace
from train_loops.advantages.rewarded_rows import CreditKind
from train_loops.signal.baselines import baselines_of, sibling_turns

pytestmark = pytest.mark.fast


def earned(*pairs: tuple[Trace, list[float], float]) -> dict[str, EpisodeRewards]:
    return {trace.episode_id: rewards_for(trace, rewards, outcome) for trace, rewards, outcome in pairs}


def baselines(
    traces: list[Trace], rewards: dict[str, EpisodeRewards], *, credit_kind: CreditKind = "returns"
) -> dict[tuple[str, int], float]:
    return baselines_of(traces, rewards, credit_kind=credit_kind)


def variant(base: Trace, name: str) -> Trace:
    return replace(base, episode_id=f"{base.episode_id}/{name}", variant=name)


def test_a_greedy_episode_stands_against_all_of_its_task_by_agent_and_round() -> None:
    one, two = make_turns_of("one", index=0), make_turns_of("two", index=1)
    greedy = variant(one, "greedy")
    result = baselines([one, two, greedy], earned((one, [1, 1], 1), (two, [0, 0], 0), (greedy, [0.25, 0.5], 1.0)))
    assert result == {("one", 0): 0.25, ("one", 1): 0.5, ("two", 0): 0.25, ("two", 1): 0.5}


def test_a_turn_has_the_replay_in_which_it_was_replaced_and_others_of_the_agent_the_tasks_mean() -> None:
    one, two = make_turns_of("one", index=0), make_turns_of("two", index=1)
    again, once_more = variant(one, "counterfactual-0"), variant(two, "counterfactual-0")
    result = baselines(
        [one, two, again, once_more], earned((one, [1, 1], 1), (again, [0.2, 9], 0.2), (once_more, [0.6, 9], 0.6))
    )
    plain = {key: x for key, x in result.items() if "/" not in key[0]}
    assert plain == pytest.approx({("one", 0): 0.2, ("two", 0): 0.6}), "the verifier was never replaced"
    result = baselines([one, two, again], earned((one, [1, 1], 1), (again, [0.2, 9], 0.2)))
    assert result == pytest.approx({("one", 0): 0.2, ("two", 0): 0.2, ("one/counterfactual-0", 0): 1.0})


def test_siblings_and_the_turn_that_they_replace_are_each_held_against_the_mean_of_the_others() -> None:
    one = make_turns_of("one", index=0)
    siblings = [variant(one, f"counterfactual-0{number}") for number in ("", "#1", "#2")]
    paid = zip([one, *siblings], [[1.0, 1], [0.2, 9], [0.6, 9], [0.0, 9]], [1, 9, 9, 9], strict=True)
    result = baselines([one, *siblings], earned(*paid))
    names = ["one", "one/counterfactual-0", "one/counterfactual-0#1", "one/counterfactual-0#2"]
    means = [0.8 / 3, 1.6 / 3, 1.2 / 3, 1.8 / 3]
    assert result == pytest.approx({(name, 0): mean for name, mean in zip(names, means, strict=True)})
    assert sibling_turns([one, *siblings]) == {name: frozenset({0}) for name in names[1:]}
    rewards = earned((siblings[0], [0.2, 9], 9), (siblings[1], [0.6, 9], 9))
    assert baselines([one, *siblings], rewards)[names[1], 0] == 0.6, "what failed is left out"


def test_replays_without_an_agent_are_held_against_one_another_after_its_silence_only() -> None:
    one = make_turns_of("one", index=0)
    silent = [variant(one, f"without-solver{number}") for number in ("", "#1")]
    result = baselines(
        [one, *silent], earned((one, [1, 1], 1), (silent[0], [-1, 0.7], 0.8), (silent[1], [-1, 0.1], 0.2))
    )
    names = ["one/without-solver", "one/without-solver#1"]
    assert result == pytest.approx({("one", 0): 0.5, (names[0], 1): 0.1, (names[1], 1): 0.7})
    assert sibling_turns([one, *silent]) == {name: frozenset({1}) for name in names}
    assert sibling_turns([one, silent[0]]) == {}, "alone it has nothing to be compared with"
    late = [variant(one, f"without-verifier{number}") for number in ("", "#1")]
    assert sibling_turns([one, *late]) == {}, "the solver's turn is replayed, and the verifier says nothing"


def test_a_greedy_episode_and_a_replay_of_an_episode_that_is_gone_do_not_train() -> None:
    one = make_turns_of("one", index=0)
    assert sibling_turns([one, variant(one, "greedy")]) == {}
    assert sibling_turns([variant(one, "counterfactual-0")]) == {}


def test_without_an_agent_the_outcome_counts_not_what_its_silence_was_paid() -> None:
    one, two = make_turns_of("one", index=0), make_turns_of("two", index=1)
    silent = variant(one, "without-verifier")
    result = baselines([one, two, silent], earned((one, [1, 1], 1), (silent, [0.7, -0.5], 0.7)))
    assert result == pytest.approx({("one", 1): 0.7, ("two", 1): 0.7})


def test_a_variant_that_failed_is_no_baseline() -> None:
    one = make_turns_of("one", index=0)
    assert baselines([one, variant(one, "greedy")], earned((one, [1, 1], 1))) == {}


def test_a_call_that_the_greedy_episode_does_not_have_is_held_against_its_outcome_or_no_increment() -> None:
    one = make_turns_of("one", index=0)
    shorter = variant(one, "greedy")
    shorter = replace(shorter, turns=shorter.turns[:1])
    rewards = earned((one, [1, 1], 1), (shorter, [0.25], 1.0))
    assert baselines([one, shorter], rewards) == {("one", 0): 0.25, ("one", 1): 1.0}
    assert baselines([one, shorter], rewards, credit_kind="increments") == {("one", 0): 0.25, ("one", 1): 0.0}


def test_a_replaced_call_is_found_again_where_branches_came_back_in_another_order() -> None:
    """Agents a and b side by side; the replay, which answers at once, has b's turn first."""
    one = make_turns_of("one", index=0)
    a, b = one.turns
    again = variant(one, f"counterfactual-{a.turn_index}")
    again = replace(again, turns=(replace(b, turn_index=a.turn_index), replace(a, turn_index=b.turn_index)))
    result = baselines([one, again], earned((one, [1, 1], 1), (again, [9, 0.2], 0.2)))
    assert result == {("one", a.turn_index): 0.2, (again.episode_id, b.turn_index): 1}
    assert sibling_turns([one, again]) == {again.episode_id: frozenset({b.turn_index})}


def without_call(trace: Trace, agent: str) -> Trace:
    return replace(trace, turns=tuple(turn for turn in trace.turns if turn.agent != agent))


def test_a_replay_that_never_came_to_the_replaced_call_is_no_baseline_and_does_not_train() -> None:
    one = make_turns_of("one", index=0)
    ended_before = without_call(variant(one, "counterfactual-1"), "verifier")
    paid = earned((one, [1, 1], 1), (ended_before, [1], 0.0))
    assert baselines([one, ended_before], paid) == {} and sibling_turns([one, ended_before]) == {}


def test_a_replay_of_an_episode_that_is_gone_is_no_baseline() -> None:
    two, gone = make_turns_of("two", index=1), variant(make_turns_of("one", index=0), "counterfactual-0")
    assert baselines([two, gone], earned((two, [1, 1], 1), (gone, [0.2, 9], 0.2))) == {}


def test_a_sibling_that_ended_before_a_call_stands_against_it_with_its_outcome() -> None:
    one = make_turns_of("one", index=0)
    whole, shorter = variant(one, "without-solver"), without_call(variant(one, "without-solver#1"), "verifier")
    result = baselines([one, whole, shorter], earned((whole, [-1, 0.7], 0.8), (shorter, [-1], 0.3)))
    assert result[whole.episode_id, 1] == 0.3 and (shorter.episode_id, 1) not in result


def test_of_replays_without_an_agent_that_had_not_spoken_every_turn_trains() -> None:
    one = make_turns_of("one", index=0)
    silent = [variant(one, f"without-critic{number}") for number in ("", "#1")]
    assert sibling_turns([one, *silent]) == {trace.episode_id: frozenset({0, 1}) for trace in silent}


def test_each_turn_of_an_agent_has_the_replay_in_which_it_itself_was_replaced() -> None:
    one = make_turns_of("one", index=0)
    solver = one.turns[0]
    one = replace(one, turns=(*one.turns, replace(solver, turn_index=2, round_index=1)))
    first, last = variant(one, "counterfactual-0"), variant(one, "counterfactual-2")
    result = baselines([one, first, last], earned((first, [0.2, 9, 9], 9), (last, [9, 9, 0.8], 9)))
    assert result == pytest.approx({("one", 0): 0.2, ("one", 2): 0.8})


def test_a_turn_before_the_replaced_one_is_not_held_against_itself() -> None:
    """The replay of a later turn has the earlier one as it was: a baseline of it depends on what the turn did, and cancels its signal."""
    one, two = (make_turns_of(name, index=index) for index, name in enumerate(("one", "two")))
    one, two = (replace(t, turns=(*t.turns, replace(t.turns[0], turn_index=2, round_index=1))) for t in (one, two))
    last = variant(one, "counterfactual-2")
    result = baselines([one, two, last], earned((last, [9, 9, 0.8], 9)))
    assert result == pytest.approx({("one", 2): 0.8, ("two", 0): 0.8, ("two", 2): 0.8})
    first = variant(one, "counterfactual-0")
    result = baselines([one, two, first], earned((first, [0.2, 9, 9], 9)))
    assert result == pytest.approx(dict.fromkeys((("one", 0), ("one", 2), ("two", 0), ("two", 2)), 0.2)), (
        "played anew after it"
    )


def test_an_episode_has_its_own_replay_without_an_agent_and_a_third_one_the_tasks_mean() -> None:
    one, two, three = (make_turns_of(name, index=i) for i, name in enumerate(("one", "two", "three")))
    silent, other = variant(one, "without-verifier"), variant(two, "without-verifier")
    result = baselines([one, two, three, silent, other], earned((silent, [9, 9], 0.7), (other, [9, 9], 0.1)))
    assert result == pytest.approx({("one", 1): 0.7, ("two", 1): 0.1, ("three", 1): 0.4})


def test_each_task_has_its_own_greedy_episode() -> None:
    one = make_turns_of("one", index=0)
    other = replace(make_turns_of("other", index=0), task=replace(one.task, task_id="t1"))
    paid = earned((variant(one, "greedy"), [0.1, 0.2], 9), (variant(other, "greedy"), [0.3, 0.4], 9))
    result = baselines([one, other, variant(one, "greedy"), variant(other, "greedy")], paid)
    assert result == {("one", 0): 0.1, ("one", 1): 0.2, ("other", 0): 0.3, ("other", 1): 0.4}


def test_a_counterfactual_sibling_that_ended_before_the_turn_says_nothing_about_it() -> None:
    one = make_turns_of("one", index=0)
    whole, shorter = variant(one, "counterfactual-1"), without_call(variant(one, "counterfactual-1#1"), "verifier")
    paid = earned((one, [0.2, 0.3], 0.5), (whole, [0.2, 0.1], 0.3), (shorter, [0.2], 0.9))
    assert baselines([one, whole, shorter], paid)[whole.episode_id, 1] == 0.3, "the replaced turn's alone"

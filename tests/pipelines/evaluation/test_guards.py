"""Guards: what gets worse beside the outcome, on literal numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pipelines.config.sections import GuardsConfig
from pipelines.evaluation.guards import check_guards
from pipelines.figures.of_episodes import is_refusal
from stores.types import Cause, EpisodeStatus, Trace

pytestmark = pytest.mark.fast

Make = Callable[..., Trace]
OFF = dict.fromkeys(GuardsConfig.DEFAULTS, None)


def only(**margins: float) -> GuardsConfig:
    return GuardsConfig(**OFF | margins)


def with_tokens(trace: Trace, times: float) -> Trace:
    turns = [replace(t, completion_token_ids=[1] * int(4 * times)) for t in trace.turns]
    return replace(trace, turns=tuple(turns))


def test_twice_the_tokens_break_the_guard_and_the_words_say_by_how_much(make_trace: Make) -> None:
    old = [make_trace(i) for i in range(40)]
    new = [with_tokens(t, 2 if i % 4 < 2 else 2.5) for i, t in enumerate(old)]
    old = [with_tokens(t, 1) for t in old]
    (found,) = check_guards(new, old, config=only(completion_tokens=0.5))
    assert found.state == "broken" and found.found.mean == pytest.approx(2.25)
    assert found.found.low < 2.25 < found.found.high and str(found).startswith("completion_tokens x2.25 [")
    assert str(found).endswith("at most x1.50")
    assert check_guards(old, old, config=only(completion_tokens=0.5))[0].state == "holds"
    assert check_guards(new, old, config=only(completion_tokens=1.25))[0].state == "unclear", "on the limit"
    assert check_guards(new, old, config=GuardsConfig(**OFF)) == []


def test_an_episode_that_does_not_act_counts_as_one_without_steps(make_trace: Make) -> None:
    def acting(trace: Trace) -> Trace:
        call = replace(trace.tool_calls[0], request={"world": 0, "step": "walk"}, response={"anchor": "a"}, error="")
        return replace(trace, tool_calls=(call,) * 10)

    idle = [make_trace(i) for i in range(40)]
    old = [trace if i % 2 else acting(trace) for i, trace in enumerate(idle)]
    (found,) = check_guards([acting(trace) for trace in idle], old, config=only(world_steps=0.5))
    assert found.state == "broken" and found.found.mean == pytest.approx(2)


def test_a_drop_of_the_format_is_seen_and_a_rise_is_welcome(make_trace: Make) -> None:
    old = [make_trace(i) for i in range(40)]
    broken = [replace(t, turns=tuple(replace(x, is_format_ok=i % 2 == 0) for x in t.turns)) for i, t in enumerate(old)]
    (worse,) = check_guards(broken, old, config=only(format_share=0.05))
    assert worse.state == "broken" and worse.found.mean == pytest.approx(-0.5) and "at least -0.050" in str(worse)
    assert check_guards(old, broken, config=only(format_share=0.05))[0].state == "holds"


def test_empty_answers_and_refusals_count_and_what_nobody_does_is_no_reason_to_doubt(make_trace: Make) -> None:
    old = [make_trace(i, answer="42") for i in range(12)]
    new = [replace(t, answer="I'm sorry, I cannot help with that.") for t in old]
    (found,) = check_guards(new, old, config=only(refusal_share=0.05))
    assert found.state == "broken" and found.found.mean == 1.0
    assert check_guards(old, old, config=only(refusal_share=0.05))[0].state == "holds", "even on twelve tasks"
    assert is_refusal("  ") and is_refusal("As an AI, I do not") and is_refusal("I am unable to say. 42")
    assert not is_refusal("42") and not is_refusal("It is 42. I can't say why.") and not is_refusal("I scan it")


def test_an_episode_that_the_engines_lost_is_no_refusal(make_trace: Make) -> None:
    old = [make_trace(i, answer="42") for i in range(400)]
    lost = {"status": EpisodeStatus.INFRA_ERROR, "cause": Cause.INFRASTRUCTURE, "answer": ""}
    new = [replace(t, **lost) if i % 10 == 0 else t for i, t in enumerate(old)]
    assert [g.state for g in check_guards(new, old, config=only(refusal_share=0.05))] == ["holds"]
    refusing = [replace(t, answer="I can't.") if i % 10 == 0 else t for i, t in enumerate(old)]
    assert check_guards(refusing, new, config=only(refusal_share=0.02))[0].state == "broken"


@pytest.mark.parametrize("apostrophe", "'’‘‛ʼ＇`´′")
@pytest.mark.parametrize(
    ("answer", "is_one"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I'M SORRY, BUT NO.", True),
        ("  \n**I can't help with that.**", True),
        ("_I can't help with that._", True),
        ("> I won't do this.", True),
        ("Sorry. I can't.", True),
        ("Unfortunately, I simply can't say.", True),
        ("<think>It is 42.</think>I'm truly sorry.", True),
        ("I cannot", True),
        ("I can not say", True),
        ("I am unable to", True),
        ("I am not able to", True),
        ("I am very sorry", True),
        ("Ｉ ｃａｎｎｏｔ", True),
        ("I\u00a0cannot", True),
        ("I'm sorry for the inconvenience, but I can't help with that.", True),
        ("Sorry to disappoint you, I am unable to say.", True),
        ("I'm sorry for the confusion: it is 42.", False),
        ("I am very sorry about my mistake. It is 42.", False),
        ("Sorry for the wait, it is 42.", False),
        ("I'm sorry to say that he died in 1990.", False),
        ("I cannot stress enough that it is 42.", False),
        ("I can't help but notice that it is 42.", False),
        ("I can not only add but multiply: 42.", False),
        *(
            (text, False)
            for text in ("*", "#", "I can", "I can test it", "It isn't 42", "Who is sorry?", "Wilma can't")
        ),
        ("<think>I can't say</think>42", False),
    ],
)
def test_a_refusal_is_one_however_it_is_typed_and_who_is_sorry_for_a_mistake_has_answered(
    answer: str, is_one: bool, apostrophe: str
) -> None:
    assert is_refusal(answer.replace("'", apostrophe)) == is_one


def test_tools_that_neither_team_calls_have_no_ratio(make_trace: Make) -> None:
    traces = [replace(make_trace(i), tool_calls=()) for i in range(8)]
    assert check_guards(traces, traces, config=only(tool_calls=0.5)) == []


def test_of_tools_that_are_hardly_called_twice_nothing_is_no_change_and_fifty_calls_are_one(make_trace: Make) -> None:
    def calling(num_tasks: int, num_calls: int) -> list[Trace]:
        idle = [make_trace(i) for i in range(0, 400, 2)]
        return [
            replace(t, tool_calls=t.tool_calls * (num_calls if i % 100 < num_tasks else 0)) for i, t in enumerate(idle)
        ]

    (found,) = check_guards(calling(2, 1), calling(1, 1), config=only(tool_calls=0.5))
    assert found.state == "holds" and found.found.mean == pytest.approx(1.01)
    (found,) = check_guards(calling(100, 50), calling(0, 0), config=only(tool_calls=0.5))
    assert found.state == "broken" and found.found.mean == pytest.approx(51)


def test_only_tasks_that_both_played_count(make_trace: Make) -> None:
    old = [make_trace(i) for i in range(20)]
    (found,) = check_guards(old[:10], old, config=only(turns=0.5))
    assert found.found.num_tasks == len({t.task.task_id for t in old[:10]})


@pytest.mark.parametrize(("num", "state"), [(1, "unclear"), (5, "unclear"), (6, "broken")])
def test_a_few_problems_prove_no_guard_broken(make_trace: Make, num: int, state: str) -> None:
    """Of equal teams whose lengths vary by half, one has twice the tokens on one problem in a quarter of all cases."""
    old = [with_tokens(make_trace(2 * i), 1) for i in range(num)]
    new = [with_tokens(trace, 2) for trace in old]
    (found,) = check_guards(new, old, config=only(completion_tokens=0.5))
    assert (found.state, found.found.low) == (state, 2.0)
    assert check_guards(old, new, config=only(completion_tokens=0.5))[0].state == "holds"


def test_a_drop_within_the_margin_holds(make_trace: Make) -> None:
    old = [make_trace(i) for i in range(80)]
    new = [replace(t, turns=tuple(replace(x, is_format_ok=i > 0) for x in t.turns)) for i, t in enumerate(old)]
    (found,) = check_guards(new, old, config=only(format_share=0.2))
    assert found.state == "holds" and -0.1 < found.found.mean < 0
    (found,) = check_guards(new, old, config=only(format_share=0.001))
    assert found.state == "unclear"

"""Views of what is stored: `troupe diff` finds an episode of both versions among many others, and text is shown as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from pipelines.report.inspect import diff_view, episode_view, export_version, runs_table
from serve_apps.workflows.alone import PATH as ALONE
from stores.journal.journal import Journal, StageKey
from stores.traces.store import TraceStore
from stores.types import Purpose, Trace

pytestmark = pytest.mark.test


@pytest.fixture
def run(tmp_path: Path, make_trace: Callable[..., Trace]) -> Any:
    """A run of three versions: 1,200 episodes of one task by the first, one by the third, which was stored last."""
    store = TraceStore(str(tmp_path / "traces"))
    store.create()
    trace = replace(make_trace(0), turns=(), tool_calls=(), policy_versions={"g": 0}, answer="the first one's")
    store.write_episodes([replace(trace, episode_id=f"e{i:04}", episode_index=i) for i in range(1_200)])
    late = replace(trace, purpose=Purpose.GATE, policy_versions={"g": 2}, answer="the last one's")
    store.write_episodes([replace(late, episode_id="late"), replace(late, episode_id="v", variant="greedy")])

    def trained(iteration: int) -> dict[str, Any]:
        return {"g": SimpleNamespace(version=iteration)}

    return SimpleNamespace(run_id="run", traces=store, traces_uri=store.uri, trained=trained)


def test_the_last_stored_episode_is_found_behind_a_thousand_others(run: Any) -> None:
    text = shown(diff_view(run, "t0", 0, 2))
    assert "the first one's" in text and "the last one's" in text and "gate of iteration 3" in text


def test_versions_that_never_played_the_task_are_told_with_those_that_did(run: Any) -> None:
    with pytest.raises(ValueError, match=r"not played by versions \{'g': 1\}.*\{'g': 0\}.*, among others"):
        diff_view(run, "t0", 0, 1)
    with pytest.raises(ValueError, match=r"versions that played it: none$"):
        diff_view(run, "nobody's", 0, 1)


def test_the_control_of_the_same_versions_is_not_shown_for_the_team(run: Any) -> None:
    late = run.traces.get_trace("late", run_id="run")
    alone = replace(late, episode_id="alone", purpose=Purpose.TEST, workflow=ALONE, answer="the control's")
    run.traces.write_episodes([alone])
    text = shown(diff_view(run, "t0", 0, 2))
    assert "the last one's" in text and "the control's" not in text


@pytest.mark.parametrize("said", ["[/INST]", "see [step 1]", "[bold]4[/bold] \\"])
def test_brackets_in_what_models_tools_and_errors_say_are_shown_as_they_are(
    run: Any, make_trace: Callable[..., Trace], said: str
) -> None:
    trace = make_trace(0)
    turn = replace(trace.turns[0], completion_text=said, is_format_ok=False, format_fault=f"text outside: {said}")
    call = replace(trace.tool_calls[0], tool=said)
    run.traces.write_episodes([replace(trace, episode_id="e", turns=(turn,), tool_calls=(call,), error=said)])
    text = shown(episode_view(run, "e"))
    assert f"text outside: {said}, no reward" in text and f"{call.call_index} {said}" in text
    assert text.count(said) == 4


def test_a_narrow_terminal_shows_what_a_turn_earned_to_its_end(run: Any, make_trace: Callable[..., Trace]) -> None:
    turn = replace(
        make_trace(0).turns[0], is_format_ok=False, format_fault="no <STEPS>, and text outside of the tags " * 3
    )
    run.traces.write_episodes([replace(make_trace(0), episode_id="e", turns=(turn,), tool_calls=())])
    assert "no reward" in " ".join(shown(episode_view(run, "e"), width=80).replace("│", "").split())


def test_what_a_model_says_cannot_command_the_terminal(run: Any, make_trace: Callable[..., Trace]) -> None:
    trace = make_trace(0)
    turn = replace(
        trace.turns[0], completion_text="\x1b]0;pwned\x07 and \x9b2J", format_fault="\x1b[8m", is_format_ok=False
    )
    task = replace(trace.task, prompt="\x1b[31mred")
    run.traces.write_episodes([replace(trace, episode_id="e", task=task, turns=(turn,), tool_calls=())])
    text = shown(episode_view(run, "e"))
    assert "\N{REPLACEMENT CHARACTER}]0;pwned" in text and "\N{REPLACEMENT CHARACTER}[31mred" in text
    assert not {"\x1b", "\x9b", "\x07"} & set(text)


def test_brackets_in_the_error_of_a_stage_are_shown_as_they_are(tmp_path: Path) -> None:
    journal = Journal(f"sqlite:///{tmp_path}/journal.db")
    journal.begin_run("r", "hash", "{}")

    def fail(lease: Any) -> dict[str, Any]:
        raise ValueError("nothing ends [/INST] or [step 1]")

    with pytest.raises(ValueError, match="nothing ends"):
        journal.once(StageKey("r", 1, "score"), fail)
    table, faults = runs_table([journal])
    assert "nothing ends [/INST] or [step 1]" in shown(table) and not faults


def shown(view: RenderableType, width: int = 200) -> str:
    console = Console(record=True, width=width)
    console.print(view)
    return console.export_text()


def test_a_version_is_copied_to_no_place_that_is_taken(tmp_path: Path) -> None:
    weights = SimpleNamespace(ref=lambda group, version: object())
    (tmp_path / "file").write_text("")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match=f"{taken} exists and is no empty folder"):
            export_version(SimpleNamespace(weights=weights), "g", 1, taken)  # type: ignore[arg-type]

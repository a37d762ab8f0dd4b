"""The sampled episodes in the page: every turn with its credit, escaped, and the command that shows the whole episode."""

from __future__ import annotations

from dataclasses import replace

import pytest
from by_hand import chain, trace

from pipelines.credit.math_progress import MathProgress
from pipelines.credit.rule import score_trace
from pipelines.extensions.samples.shown import Example, ExampleEpisode, episodes_section

pytestmark = pytest.mark.fast

EVIL = "</script><script>alert('x')</script><img src=x onerror=alert(1)>"


def test_an_episode_stands_with_its_credit_and_the_command_that_shows_it_and_is_escaped() -> None:
    played = trace(chain("104", "55", "55"), answer="55")
    shown = ExampleEpisode(
        trace=played, rewards=score_trace(MathProgress(), played, version="v"), command="troupe show 0 --run demo"
    )
    html = episodes_section([Example(title="better than before training", episodes={"after training": shown})])
    for part in ("better than before training", "After training", "task t", "troupe show 0 --run demo", "credit +1.00"):
        assert part in html, part
    turns = tuple(
        replace(t, agent=EVIL, fields={EVIL: EVIL}, completion_text=EVIL, prompt_text=EVIL) for t in played.turns
    )
    task = replace(played.task, prompt=EVIL, answers=(EVIL,))
    foul = replace(shown, trace=replace(played, task=task, turns=turns, answer=EVIL, error=EVIL))
    html = episodes_section([Example(title=EVIL, episodes={EVIL: foul})])
    assert "<script>alert" not in html and "<img" not in html and html.count("&lt;img") > 20
    assert episodes_section([]) == ""

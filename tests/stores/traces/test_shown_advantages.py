"""The advantages of a few episodes of a job are kept, of the same ones in whatever order they come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stores.traces.shown_advantages import ADVANTAGES_FILE, NUM_SHOWN, read_advantages, write_advantages

pytestmark = pytest.mark.fast


def test_a_few_episodes_are_kept_whole_and_equal_tokens_as_one_number(tmp_path: Path) -> None:
    advantages = {(f"e{i:03}", turn): [0.5, 0.5, turn / 3] for i in reversed(range(NUM_SHOWN + 8)) for turn in (0, 2)}
    advantages["e001", 4] = [0.25, 0.25]
    write_advantages(tmp_path, advantages)
    stored = json.loads((tmp_path / ADVANTAGES_FILE).read_text())
    assert sorted(stored) == [f"e{i:03}" for i in range(NUM_SHOWN)]
    assert stored["e001"] == {"0": [0.5, 0.5, 0.0], "2": [0.5, 0.5, 0.66667], "4": 0.25}


def test_a_version_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert read_advantages(str(tmp_path), model_group="g", version=3, episode_id="e") == {}

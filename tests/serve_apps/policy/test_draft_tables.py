"""Tables of what came after what: they say what counting says, the longest context first, a task's own completions before the agent's."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from serve_apps.policy.draft_tables import (
    CONTEXTS,
    NO_TOKEN,
    NUM_BINS,
    WINDOW,
    DraftTables,
    Positions,
    bin_share,
    source_id,
)

pytestmark = pytest.mark.fast


def look_up(tables: DraftTables, agent: str, task: str, tokens: list[int]) -> tuple[int, int]:
    padded = [NO_TOKEN] * WINDOW + tokens
    found, bins = tables.look_up(
        np.array([padded[-WINDOW:]], np.int32),
        np.array([source_id(agent)], np.uint64),
        np.array([source_id(agent, task)], np.uint64),
    )
    return int(found[0]), int(bins[0])


def joined(*parts: Positions) -> Positions:
    return Positions.joined(parts, newest=10_000)


@pytest.mark.parametrize("seed", range(5))
def test_a_look_up_is_the_most_frequent_token_after_the_longest_context_that_was_seen(seed: int) -> None:
    draw = random.Random(seed)
    completions = [[draw.randrange(4) for _ in range(30)] for _ in range(6)]
    tables = DraftTables(joined(*(Positions.of("a", f"t{n}", c, 3) for n, c in enumerate(completions))))
    after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for tokens in completions:
        padded = [NO_TOKEN] * WINDOW + tokens
        for place in range(WINDOW + 3, len(padded)):
            for context in CONTEXTS:
                after[tuple(padded[place - context : place])][padded[place]] += 1
    for _ in range(50):
        tokens = [draw.randrange(4) for _ in range(WINDOW)]
        found, bin_ = look_up(tables, "a", "a new task", tokens)
        seen = next((after[tuple(tokens[-n:])] for n in CONTEXTS if tuple(tokens[-n:]) in after), None)
        if seen is None:
            assert (found, bin_) == (NO_TOKEN, NO_TOKEN)
        else:
            assert seen[found] == max(seen.values()) and NUM_BINS // 2 <= bin_ < NUM_BINS


def test_what_the_agent_said_to_the_same_task_comes_before_what_it_usually_says() -> None:
    usual = [Positions.of("solver", f"t{n}", [1, 2, 3], 2) for n in range(5)]
    tables = DraftTables(joined(*usual, Positions.of("solver", "special", [1, 2, 9], 2)))
    assert look_up(tables, "solver", "another", [1, 2])[0] == 3
    found, bin_ = look_up(tables, "solver", "special", [1, 2])
    assert found == 9 and bin_ < NUM_BINS // 2
    assert look_up(tables, "verifier", "special", [1, 2]) == (NO_TOKEN, NO_TOKEN)


def test_a_bin_says_how_large_a_share_the_token_had() -> None:
    half = [Positions.of("a", "t", [1, 2, token], 2) for token in (3, 3, 4, 5)]
    always = [Positions.of("a", "t", [1, 7, 8], 2) for _ in range(4)]
    tables = DraftTables(joined(*half, *always))
    shares = bin_share()
    assert len(shares) == NUM_BINS
    assert shares[look_up(tables, "a", "new", [1, 2])[1]] == pytest.approx(0.45)
    assert shares[look_up(tables, "a", "new", [1, 7])[1]] == pytest.approx(0.985)


def test_the_prompt_is_context_and_no_position() -> None:
    positions = Positions.of("a", "t", [1, 2, 3, 4], 3)
    assert positions.tokens.tolist() == [4] and positions.windows[0].tolist()[-3:] == [1, 2, 3]
    assert len(Positions.joined([Positions.none(), positions, positions], newest=1)) == 1


def test_tables_of_nothing_know_nothing() -> None:
    assert look_up(DraftTables(Positions.none()), "a", "t", [1]) == (NO_TOKEN, NO_TOKEN)

"""sharing: rows that begin alike are laid as a tree, and every row is a path of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chained_samples import sample
from hypothesis import given
from hypothesis import strategies as st
from tiny_policy import policy

from train_loops.engine.logprobs import completion_logprobs
from train_loops.rows.batching import collate, lift
from train_loops.rows.sharing import MIN_SHARED_TOKENS, neighbours, segments_of

pytestmark = pytest.mark.fast


def test_rows_that_begin_alike_share_a_segment() -> None:
    common = list(range(MIN_SHARED_TOKENS))
    rows = [[*common, 50, 51], [7, 8], [*common, 60]]
    segments, places = segments_of(rows, share=True)
    assert [(s.row, s.begin, s.length, s.start) for s in segments] == [
        (0, 0, 16, 0),
        (0, 16, 2, 16),
        (2, 16, 1, 18),
        (1, 0, 2, 19),
    ]
    assert places[0].tolist() == list(range(18))
    assert places[2].tolist() == [*range(16), 18]
    assert segments[2].prefix.tolist() == list(range(16))


def test_short_beginnings_are_not_shared_and_nothing_is_without_share() -> None:
    rows = [[1] * (MIN_SHARED_TOKENS - 1) + [2], [1] * (MIN_SHARED_TOKENS - 1) + [3]]
    assert [s.length for s in segments_of(rows, share=True)[0]] == [16, 16]
    assert [s.length for s in segments_of([[1] * 40, [1] * 40], share=False)[0]] == [40, 40]


def test_a_row_that_another_one_continues_and_a_row_that_is_there_twice_add_nothing() -> None:
    row = list(range(20))
    segments, places = segments_of([row, [*row, 1, 2], row], share=True)
    assert sum(s.length for s in segments) == 22
    assert [p.tolist() for p in places] == [list(range(20)), list(range(22)), list(range(20))]


@given(
    beginnings=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), min_size=1, max_size=12),
    share=st.booleans(),
)
def test_every_row_is_a_path_of_segments_that_lie_end_to_end(beginnings: list[tuple[int, int]], share: bool) -> None:
    stems = [[kind] * 20 + list(range(40)) for kind in range(4)]
    rows = [[*stems[kind][:length], 100 + i % 3] for i, (kind, length) in enumerate(beginnings)]
    segments, places = segments_of(rows, share=share)
    flat = [token for s in segments for token in rows[s.row][s.begin : s.begin + s.length]]
    assert [flat[s.start : s.start + s.length] for s in segments] == [
        rows[s.row][s.begin : s.begin + s.length] for s in segments
    ]
    for row, place in zip(rows, places, strict=True):
        assert [flat[i] for i in place] == row
    for s in segments:
        assert s.prefix.tolist() == places[s.row][: s.begin].tolist()
    assert len(flat) <= sum(map(len, rows))


def test_neighbours_begin_alike() -> None:
    assert neighbours([[5, 1], [2, 9], [5], [2, 3]]) == [3, 1, 2, 0]


def test_shared_rows_have_the_logprobs_that_they_have_alone() -> None:
    random = np.random.default_rng(0)
    prompt, documents = random.integers(3, 250, 30).tolist(), random.integers(3, 250, 40).tolist()
    samples = [
        sample("a", 0, prompt, [9, 8, 7]),
        sample("b", 0, prompt, [9, 5]),
        sample("c", 0, [*prompt, *documents], [4]),
    ]
    samples += [sample("d", 0, [*prompt, *documents[:25]], [3, 3, 3], agent="b"), sample("e", 0, documents, [11])]
    batch = collate(samples, [(i,) for i in range(5)], pack=True, share=True)
    assert batch.num_tokens == 30 + 3 + 2 + 40 + 1 + 3 + 41
    scorer = policy("llama", torch.float32)
    with torch.no_grad():
        together = lift(completion_logprobs(scorer, batch), batch)
        for i in range(5):
            alone = collate(samples, [(i,)])
            np.testing.assert_allclose(together[i], lift(completion_logprobs(scorer, alone), alone)[i], atol=2e-6)

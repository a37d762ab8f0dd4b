"""What a trainer says of its job: when each part of it began and ended."""

from __future__ import annotations

import pytest

from train_loops.train_job import train_parts

pytestmark = pytest.mark.fast


def test_each_part_begins_where_the_one_before_ended() -> None:
    ends = {"load": 101.0, "read": 101.5, "learn": 109.0}
    assert train_parts(100.0, ends) == {"load": (100.0, 101.0), "read": (101.0, 101.5), "learn": (101.5, 109.0)}
    assert list(train_parts(100.0, ends | {"store": 110.0})) == ["load", "read", "learn", "store"]

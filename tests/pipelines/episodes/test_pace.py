"""pace: the words of a progress line, from what collectors report."""

from __future__ import annotations

import pytest

from pipelines.episodes.collector import share_of
from pipelines.episodes.groups import Pace, in_words, repeats_in_words
from serve_apps.config import ServeConfig
from serve_apps.policy.client import CallCounts

pytestmark = pytest.mark.fast


def sampled(pace: Pace, at: float, *, tokens: int, episodes: int = 0) -> None:
    """Adds `tokens` sampled until `at`, and episodes of 20 tokens that have ended."""
    pace.add(CallCounts(num_calls=episodes, num_tokens=tokens), num_episodes=episodes, num_tokens=20 * episodes, at=at)


def test_the_speed_is_that_of_the_last_half_minute() -> None:
    pace = Pace(100, at=0.0)
    for second in range(1, 61):
        sampled(pace, second, tokens=100 if second <= 30 else 50)
    assert pace.tokens_per_s == pytest.approx(50)


def test_the_end_counts_what_is_sampled_of_episodes_under_way() -> None:
    pace = Pace(100, at=0.0)
    sampled(pace, 10.0, tokens=400)
    assert pace.describe() == "40 tokens/s", "no episode has ended: how long one is nobody knows"
    sampled(pace, 20.0, tokens=400, episodes=10)
    assert pace.seconds_left == pytest.approx((100 * 20 - 800) / 40)
    assert pace.describe() == "40 tokens/s, about 30 s left"
    sampled(pace, 30.0, tokens=1200, episodes=90)
    assert "left" not in pace.describe()


def test_nothing_is_said_before_there_is_anything_to_say() -> None:
    assert Pace(3).describe() == ""


def test_repeated_calls_are_named_with_the_key_to_raise_where_it_would_help() -> None:
    late = repeats_in_words(CallCounts(num_calls=400, num_late=3))
    assert late.startswith(
        "of 400 calls 3 repeated (nothing came from the engine for collect.call.call_timeout_s: raise"
    )
    lost = repeats_in_words(CallCounts(num_calls=400, num_lost=2))
    assert lost == "of 400 calls 2 repeated (a replica or its engine failed)"
    assert repeats_in_words(CallCounts(num_calls=400)) == ""
    pace = Pace(10, at=0.0)
    pace.add(CallCounts(num_calls=1, num_late=1, num_tokens=30), num_episodes=1, num_tokens=30, at=1.0)
    assert pace.describe().startswith("30 tokens/s, about 9 s left; of 1 calls 1 repeated")


def test_a_time_is_said_in_a_unit_that_suits_it() -> None:
    assert [in_words(s) for s in (5.2, 89, 150, 5300, 9000)] == ["5 s", "89 s", "2 min", "88 min", "2.5 h"]


@pytest.mark.parametrize(("total", "num_places"), [(256, 1), (10, 3), (64, 64), (7, 2)])
def test_collectors_share_what_the_engines_take(total: int, num_places: int) -> None:
    shares = [share_of(total, place, num_places) for place in range(num_places)]
    assert sum(shares) == total and max(shares) - min(shares) <= 1


def test_the_engines_take_what_their_settings_say() -> None:
    assert ServeConfig(num_replicas=3, max_num_seqs=8).num_seqs == 24
    assert ServeConfig(num_replicas=2, engine={"max_num_seqs": 5}).num_seqs == 10

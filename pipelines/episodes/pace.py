"""pace: what the collectors report of a sampling pass -> tokens per second, when it will end, how many calls were repeated."""

from __future__ import annotations

import time
from collections import deque

from serve_apps.policy.client import CallCounts

WINDOW_S = 30.0
"""The seconds whose tokens make the speed."""


class Pace:
    """Follows one sampling pass."""

    def __init__(self, num_episodes: int, *, at: float | None = None) -> None:
        """Begins now, or `at` by `time.monotonic()`. Args: num_episodes: those that this pass plays."""
        self.calls = CallCounts()
        self._num_episodes, self._num_done, self._num_tokens_done = num_episodes, 0, 0
        self._began = time.monotonic() if at is None else at
        self._seen = deque([(self._began, 0)])
        """(time, tokens sampled until then) within the window, the oldest at its begin."""

    def add(self, calls: CallCounts, *, num_episodes: int, num_tokens: int, at: float | None = None) -> None:
        """Adds what one collector reports.

        Args:
            calls: what became of model calls since its last report.
            num_episodes: episodes that have ended since then.
            num_tokens: completion tokens of these.
        """
        now = time.monotonic() if at is None else at
        self.calls += calls
        self._num_done += num_episodes
        self._num_tokens_done += num_tokens
        self._seen.append((now, self.calls.num_tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Returns the completion tokens per second of the last `WINDOW_S` seconds."""
        (first, before), (last, now) = self._seen[0], self._seen[-1]
        return (now - before) / (last - first) if last > first else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Returns about how long the pass will go on; None before an episode has ended.

        The episodes that are left are taken to have as many tokens as those that have ended, and what is sampled of them
        already counts. The first to end are the short ones: early on it is too little rather than too much.
        """
        if not self._num_done or not self.tokens_per_s:
            return None
        planned = self._num_tokens_done / self._num_done * self._num_episodes
        return max(0.0, planned - self.calls.num_tokens) / self.tokens_per_s

    def describe(self) -> str:
        """Describes speed, end and repeated calls in one line; empty before anything is known."""
        parts = [f"{self.tokens_per_s:,.0f} tokens/s"] if self.tokens_per_s else []
        left_s = self.seconds_left if self._num_done < self._num_episodes else None
        parts += [f"about {in_words(left_s)} left"] if left_s is not None else []
        repeats = repeats_in_words(self.calls)
        return ", ".join(parts) + (f"; {repeats}" if repeats else "")


def repeats_in_words(calls: CallCounts) -> str:
    """Describes how many calls were repeated and the key to raise; empty where none was."""
    parts = []
    if calls.num_late:
        why = (
            "nothing came from the engine for collect.call.call_timeout_s: raise it, or see why the engine stood still"
        )
        parts.append(f"{calls.num_late} repeated ({why})")
    if calls.num_lost:
        parts.append(f"{calls.num_lost} repeated (a replica or its engine failed)")
    return f"of {calls.num_calls} calls {' and '.join(parts)}" if parts else ""


def in_words(seconds: float) -> str:
    """Describes a time in a unit that suits it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

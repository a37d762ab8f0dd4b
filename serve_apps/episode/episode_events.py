"""episode_events: the numbers of an episode's events, the texts that they wrote, and what an input was read from.

An event is a turn, a tool call, or what a world showed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_apps.authoring.agent import origins_of
from serve_apps.episode.causes import covered
from serve_apps.episode_clock import EpisodeClock

MIN_QUOTE = 12
"""A text of an event that stands inside an input counts as read from there if it has at least so many characters."""


class EpisodeEvents:
    """Holds what the calls of one attempt at an episode share: its clock, its events, and the time that it waited."""

    def __init__(self) -> None:
        """The attempt begins now."""
        self.clock = EpisodeClock()
        self.began = self.clock.began
        self.count = 0
        self._texts: dict[int, tuple[str, ...]] = {}
        self._waited: list[tuple[float, float]] = []
        """Spans of time, by the clock, that no policy can prolong (serve_apps/episode/causes.py)."""
        self.unanswered: dict[int, float] = {}
        """Model calls under way, with their start by the clock."""

    def next(self) -> int:
        """Returns the number of the next event."""
        self.count += 1
        return self.count - 1

    def wrote(self, index: int, *texts: str) -> None:
        """Notes the texts of an event: a later input that holds one was read from it."""
        self._texts[index] = texts

    def parents_of(self, inputs: Mapping[str, Any], index: int) -> tuple[int, ...]:
        """Returns the events before `index` whose text stands in these inputs, whole or quoted."""
        parents = {*origins_of(inputs)}
        texts = [value for value in inputs.values() if isinstance(value, str)]
        for event, texts_of_event in self._texts.items():
            quotes = [t for t in texts_of_event if len(t) >= MIN_QUOTE]
            if event not in parents and any(quote in text for quote in quotes for text in texts):
                parents.add(event)
        return tuple(sorted(e for e in parents if e < index))

    def waited(self, start: float, end: float | None = None) -> None:
        """Notes that from `start` to `end` (now), by the clock, the episode waited for what no policy can prolong."""
        self._waited.append((start, self.clock.seconds if end is None else end))

    @property
    def waited_s(self) -> float:
        """The seconds of the clock until now in which the episode waited for what no policy can prolong, see `serve_apps.episode.causes`."""
        now = self.clock.seconds
        return covered([*self._waited, *((start, now) for start in self.unanswered.values())])

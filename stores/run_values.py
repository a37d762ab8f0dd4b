"""run_values: the names under which the journal keeps small facts of a run, see `Journal.put_value`."""

from __future__ import annotations

from enum import StrEnum


class RunValue(StrEnum):
    """Name of a fact of a run; `of` names one of a family."""

    CHAMPION = "champion"
    """Team version and model versions of the champion."""
    CHAMPIONS = "champions"
    """Every champion in order, with time and reason."""
    CLAIM = "claim"
    """Family, by hash of a claim: the iteration that the claim was given."""
    SEEN = "seen"
    """Task file and number of foreign episodes when the last scheduled iteration was begun."""
    SOURCE = "traces"
    """Family, by iteration: another run's iteration whose traces it trains on."""
    FROM_SERVICE = "from_service"
    """Family, by iteration: the served episodes that it takes in."""
    PARENTS = "parents"
    """Family, by iteration: the versions that it trains from, where the gate decided on them and iterations overlap."""
    UPDATE_ORDER = "update-order"
    """Family, by iteration: the order in which its model groups are trained."""
    WALL = "wall"
    """Seconds that the run took, summed over its sittings; family, by iteration: the same of an iteration."""
    SUMMARY = "summary"
    """Family, by iteration: its figures and training warnings, kept when it is recorded."""
    SO_FAR = "so-far"
    """What the recorded iterations add up to, for the report."""
    TRAFFIC = "traffic"
    """Latest events of canaries."""
    WATCHING = "watching"
    """The check of the champion that is under way."""
    WATCHED = "watched"
    """Result of the champion's last check."""
    WATCH = "watch"
    """Family, by source: the windows that later ones are judged by."""
    WATCH_LATEST = "watch/latest"
    """Family, by kind of check: the latest one."""
    WATCH_ACCEPTED = "watch/accepted"
    """When a person last accepted what was seen until then."""
    WATCH_EVENTS = "watch/events"
    """Latest alarms."""
    WATCH_UNTIL = "watch/until"
    """Where the next windows of served answers begin."""

    def of(self, part: object) -> str:
        """Name of one fact of a family."""
        return f"{self.value}/{part}"

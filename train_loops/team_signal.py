"""team_signal: what the learner of the whole team hands to the model groups' trainers, by turn or by episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TurnKey = tuple[str, int]
"""Episode id and turn index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamSignal:
    """Of one iteration's turns, of all model groups."""

    advantages: Mapping[TurnKey, float] | None = None
    """MAPPO and HAPPO: of each turn, for all of its tokens, whitened as the settings say."""
    credit: Mapping[TurnKey, float] | None = None
    """VDN and QMIX: takes the place of the turn's reward."""
    log_factor: Mapping[str, float] = field(default_factory=dict)
    """HAPPO: log M of each episode, from the groups that were updated before this one; none: 0."""

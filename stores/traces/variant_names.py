"""variant_names: what is changed in a replay of an episode <-> the name under which the replay is stored.

greedy    counterfactual-3 (turn 3)    without-solver (an agent)    counterfactual-3#1 (the second sibling of the first)
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantName:
    """Names a variant; `str` gives the text that is part of the episode's key."""

    kind: str
    """`greedy`, `counterfactual` or `without`."""
    changed: str = ""
    """The index of the turn that is sampled anew, or the agent that is left out; empty where all turns are others."""
    sibling: int = 0
    """Which of the replays with the same change it is."""

    def __str__(self) -> str:
        """Returns the name; that of the first sibling has no number."""
        name = f"{self.kind}-{self.changed}" if self.changed else self.kind
        return f"{name}#{self.sibling}" if self.sibling else name

    @classmethod
    def parse(cls, name: str) -> VariantName:
        """Reads what `str` gives."""
        match = re.fullmatch(r"([^-#]*)(?:-(.*?))?(?:#(\d+))?", name, re.DOTALL)
        assert match is not None, "every part may be missing"
        return cls(kind=match[1], changed=match[2] or "", sibling=int(match[3] or 0))

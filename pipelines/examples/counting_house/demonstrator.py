"""demonstrator: agent, task, inputs -> a completion: it plays teller, clerk and auditor of the counting house, with mistakes at single tokens.

The teller often counts the bad coins too, the clerk says anything, the auditor burns the books for no reason: each is a
habit of one token, which reinforcement learning can mend once it knows whose mistake it was.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from stores.types import Task

SHARE_GOOD_ONLY = 0.6
SHARE_KEPT = 0.6
SHARE_UNREADABLE = 0.08
REMARKS = ("fine", "rain", "busy", "quiet")


def demonstrate(agent: str, task: Task, inputs: Mapping[str, str], rng: random.Random) -> str:
    """Returns a completion of `agent` for these inputs; the same `rng` state gives the same text."""
    if agent == "teller":
        good, bad = (int(n) for n in inputs["pile"].split("+"))
        count = good if rng.random() < SHARE_GOOD_ONLY else good + bad
        return f"<COUNT>{count}" + ("" if rng.random() < SHARE_UNREADABLE else "</COUNT>")
    if agent == "clerk":
        return f"<REMARK>{rng.choice(REMARKS)}</REMARK>"
    return f"<VERDICT>{'keep' if rng.random() < SHARE_KEPT else 'burn'}</VERDICT>"

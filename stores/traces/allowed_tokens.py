"""allowed_tokens: tokens of which one must be sampled <-> the constraint that is stored with the turn, see `Sampling.constraint`."""

from __future__ import annotations

import json
from collections.abc import Iterable

ALLOWED_TOKENS = "allowed_token_ids"
"""The key of such a constraint."""


def constraint_of(token_ids: Iterable[int]) -> str:
    """Returns the constraint of a completion that is one of these tokens."""
    return json.dumps({ALLOWED_TOKENS: list(token_ids)})


def allowed_tokens(constraint: str) -> list[int]:
    """Returns the tokens of such a constraint, in its order; empty for any other constraint, and for none."""
    ids: list[int] = json.loads(constraint).get(ALLOWED_TOKENS, []) if constraint else []
    return ids

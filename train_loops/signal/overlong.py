"""overlong: a completion's length -> DAPO's soft penalty for coming near its limit (arXiv 2503.14476)."""

from __future__ import annotations


def overlong_penalty(length: int, *, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """Returns min(-(length - (max_tokens - buffer_tokens)) / buffer_tokens * penalty, 0), to be added to the turn's reward.

    Args:
        length: completion tokens.
        max_tokens: the completion's limit.
        buffer_tokens: over so many tokens below the limit the penalty grows; at most as many as the limit has.
        penalty: the penalty at the limit, at least 0.
    """
    buffer_tokens = min(buffer_tokens, max_tokens)
    return min(-(length - (max_tokens - buffer_tokens)) / buffer_tokens * penalty, 0.0)

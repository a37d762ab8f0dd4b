"""draft_costs: seconds of an engine's steps -> which drafts are worth their row, and whether any are."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

DEFAULT_THRESHOLD = 0.4
"""Until the costs of a step are known."""
NUM_STEPS = 256
"""The newest steps that costs are fitted to."""
TRIAL_STEPS = 64
NUM_PLAIN = 16
"""Steps without drafts, the newest ones, that a trial is held against."""
PLAIN_EVERY, PLAIN_EVERY_FIRST = 16, 4
"""While drafts are made, one step in so many goes without; the second until there are NUM_PLAIN."""
PAUSE_STEPS, LONGEST_PAUSE = 256, 4096
WAITED = 5.0
"""A step of more than so many times the usual waited for requests, and counts for nothing."""


class StepCosts:
    """What a step takes: F + b R + d seconds for R rows, d only where drafts were looked for.

    One more row is worth while its token is kept with a probability above b B / (F + b B), the cost of a row over that of a token
    without drafts, with B sequences.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[int, bool, float]] = deque(maxlen=NUM_STEPS)
        self._num_new = 0
        self._fit: tuple[float, float] | None = None

    def add(self, rows: int, seconds: float, *, tried: bool) -> None:
        """Takes what a step of so many rows, and without prompts, lasted. Args: tried: drafts were looked for."""
        self._steps.append((rows, tried, seconds))
        self._num_new += 1
        if self._num_new >= NUM_STEPS // 8 and len(self._steps) >= NUM_STEPS // 4:
            self._num_new = 0
            self._fit = self._fitted() or self._fit

    def threshold(self, num_sequences: int) -> float:
        """Returns the least probability of a draft that pays."""
        if self._fit is None:
            return DEFAULT_THRESHOLD
        fixed_s, row_s = self._fit
        return float(np.clip(row_s * num_sequences / max(fixed_s + row_s * num_sequences, 1e-12), 0.05, 0.95))

    def _fitted(self) -> tuple[float, float] | None:
        """Returns F and b; None where the number of rows hardly differs."""
        rows, tried, seconds = np.array(self._steps).T
        usual = seconds < WAITED * np.median(seconds)
        rows, tried, seconds = rows[usual], tried[usual], seconds[usual]
        if rows.std() < 1.0:
            return None
        (fixed_s, row_s, _), *_ = np.linalg.lstsq(
            np.stack([np.ones_like(rows), rows, tried], axis=1), seconds, rcond=None
        )
        return max(0.0, float(fixed_s)), max(0.0, float(row_s))


@dataclass
class _Trial:
    """Steps of batches of about one size, as (seconds, tokens)."""

    tried: list[tuple[float, int]] = field(default_factory=list)
    plain: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=NUM_PLAIN))
    turn: int = 0
    off_for: int = 0
    """Steps that are still to be done without drafts."""
    pause: int = PAUSE_STEPS


class Trials:
    """Whether drafts are made: as long as TRIAL_STEPS with them gave more tokens per second than steps without; else not for a while.

    The pause doubles each time. Prompts count for both kinds of steps alike. Sizes of batches are told apart by powers of two.
    """

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = defaultdict(_Trial)

    def is_on(self, num_sequences: int) -> bool:
        """Whether drafts are to be made in the next step; each answer counts as a step."""
        trial = self._trials[num_sequences.bit_length()]
        if trial.off_for:
            trial.off_for -= 1
            return False
        trial.turn += 1
        return trial.turn % (PLAIN_EVERY if len(trial.plain) == NUM_PLAIN else PLAIN_EVERY_FIRST) != 0

    def add(self, num_sequences: int, num_tokens: int, seconds: float, *, tried: bool) -> None:
        """Takes a step.

        Args:
            num_sequences: as `is_on` was asked about it.
            num_tokens: that it sampled.
            seconds: what it took.
            tried: drafts were looked for.
        """
        trial = self._trials[num_sequences.bit_length()]
        (trial.tried if tried else trial.plain).append((seconds, num_tokens))
        if len(trial.tried) < TRIAL_STEPS or len(trial.plain) < NUM_PLAIN:
            return
        if _seconds_per_token(trial.tried) > _seconds_per_token(trial.plain):
            trial.off_for, trial.pause = trial.pause, min(2 * trial.pause, LONGEST_PAUSE)
        else:
            trial.pause = PAUSE_STEPS
        trial.tried = []


def _seconds_per_token(steps: Sequence[tuple[float, int]]) -> float:
    seconds, tokens = np.array(steps).T
    usual = seconds < WAITED * np.median(seconds)
    return float(seconds[usual].sum() / max(tokens[usual].sum(), 1.0))

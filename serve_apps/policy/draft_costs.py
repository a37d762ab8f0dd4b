"""draft_costs: seconds of an engine's steps -> which drafts are worth their row, and whether any are."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

import numpy as np

DEFAULT_THRESHOLD = 0.4
"""Until the costs of a step are known."""
NUM_STEPS = 256
"""Steps with drafts, and as many without, that costs are fitted to."""
NUM_PLAIN = 32
"""Steps without drafts that there must be, to know what drafts must beat."""
TRIAL_STEPS = 64
PAUSE_STEPS, LONGEST_PAUSE = 256, 4096
WAITED = 5.0
"""A step of more than so many times the usual waited for requests, and counts for nothing."""


class StepCosts:
    """What a step takes: F + b R + d seconds for R rows, d only where drafts were looked for.

    One more row is worth while its token is kept with a probability above b B / (F + b B), the cost of a row over that of a token
    without drafts, with B sequences.
    """

    def __init__(self) -> None:
        self._steps: dict[bool, deque[tuple[int, float]]] = {tried: deque(maxlen=NUM_STEPS) for tried in (False, True)}
        self._num_new = 0
        self._fit: tuple[float, float] | None = None

    def add(self, rows: int, seconds: float, *, tried: bool) -> None:
        """Takes what a step of so many rows lasted. Args: tried: drafts were looked for."""
        self._steps[tried].append((rows, seconds))
        self._num_new += 1
        if self._num_new >= NUM_STEPS // 8 and sum(map(len, self._steps.values())) >= NUM_STEPS // 4:
            self._num_new = 0
            self._fit = self._fitted() or self._fit

    @property
    def needs_plain(self) -> bool:
        """Whether steps without drafts are wanted, to know what drafts must beat."""
        return len(self._steps[False]) < NUM_PLAIN and len(self._steps[True]) >= TRIAL_STEPS

    def threshold(self, num_sequences: int) -> float:
        """Returns the least probability of a draft that pays."""
        if self._fit is None:
            return DEFAULT_THRESHOLD
        fixed_s, row_s = self._fit
        return float(np.clip(row_s * num_sequences / max(fixed_s + row_s * num_sequences, 1e-12), 0.05, 0.95))

    def plain_s(self, num_sequences: int) -> float | None:
        """Returns the seconds of a step without drafts; None while they are not known."""
        if self._fit is None or len(self._steps[False]) < NUM_PLAIN:
            return None
        return self._fit[0] + self._fit[1] * num_sequences

    def _fitted(self) -> tuple[float, float] | None:
        """Returns F and b; None where all steps had as many rows."""
        steps = np.array([(1.0, rows, tried, s) for tried, some in self._steps.items() for rows, s in some])
        steps = steps[steps[:, 3] < WAITED * np.median(steps[:, 3])]
        if steps[:, 1].std() < 1.0:
            return None
        (fixed_s, row_s, _), *_ = np.linalg.lstsq(steps[:, :3], steps[:, 3], rcond=None)
        return max(0.0, float(fixed_s)), max(0.0, float(row_s))


@dataclass
class _Trial:
    """Steps with drafts, of batches of about one size."""

    steps: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of each, and what the same tokens would have taken without drafts."""
    off_for: int = 0
    """Steps that are still to be done without drafts."""
    pause: int = PAUSE_STEPS


class Trials:
    """Whether drafts are made: in TRIAL_STEPS, and again as long as these gained time; else not for a while, each time longer.

    Sizes of batches are told apart by powers of two.
    """

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = defaultdict(_Trial)

    def is_on(self, num_sequences: int) -> bool:
        """Whether drafts are to be made in the next step; each answer counts as a step."""
        trial = self._trials[num_sequences.bit_length()]
        trial.off_for = max(0, trial.off_for - 1)
        return not trial.off_for

    def add(self, num_sequences: int, gained: int, seconds: float, plain_s: float) -> None:
        """Takes a step with drafts.

        Args:
            num_sequences: of the batch.
            gained: tokens more than one for each.
            seconds: what it took.
            plain_s: what a step without drafts takes with as many sequences.
        """
        trial = self._trials[num_sequences.bit_length()]
        trial.steps.append((seconds, plain_s * (1 + gained / num_sequences)))
        if len(trial.steps) < TRIAL_STEPS:
            return
        steps, trial.steps = np.array(trial.steps), []
        took_s, would_take_s = steps[steps[:, 0] < WAITED * np.median(steps[:, 0])].sum(axis=0)
        if took_s > would_take_s:
            trial.off_for, trial.pause = trial.pause, min(2 * trial.pause, LONGEST_PAUSE)
        else:
            trial.pause = PAUSE_STEPS

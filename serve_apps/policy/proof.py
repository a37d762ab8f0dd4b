"""proof: a replica's logprobs on probe sequences -> whether it serves the version that it should, within limits.

Rounding alone puts the logprobs of trainer and engine apart, by an amount that their two dtypes decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["proven", "indistinguishable", "failed"]
Logprobs = Sequence[Sequence[float]]

NEARLY = 0.75
"""Share of the largest difference that a shorter sequence has to reach."""
LEAST_TELLING = 16
"""The least number of logprobs that are compared, to tell the version from unexpected ones, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Records what one replica answered after a sync."""

    app: str
    model_group: str
    replica_id: str
    pid: int
    version: int | None
    """The version that the replica reports for the model group; None: nothing yet."""
    max_difference_new: float
    """Largest |logprob difference| to the manifest of the version it should serve."""
    max_difference_old: float | None
    """The same difference to the manifest of the version served before, or else of the parent;
    None where there is neither."""
    verdict: Verdict
    seconds: float
    """Seconds since the sync began."""
    noise: float
    """What rounding alone may make of the differences, between these dtypes of trainer and engine."""


class SyncError(RuntimeError):
    """Raised where a replica does not serve what it should.

    `proofs` holds what the replicas answered, as far as they did.
    """

    def __init__(self, message: str, proofs: Sequence[Proof] = ()) -> None:
        """Args: message: names app, replica, version and numbers."""
        super().__init__(message)
        self.proofs = tuple(proofs)


class SyncTimeoutError(SyncError, TimeoutError):
    """Raised where replicas did not take their version in time."""


def judge(served_on_new: Logprobs, new: Logprobs, served_on_old: Logprobs | None, old: Logprobs | None, *,
          tolerance: float, noise: float) -> tuple[Verdict, float, float | None]:  # fmt: skip
    """Returns the verdict and the differences to the new and to the old version's logprobs.

    Proven: within `tolerance` of the new version and nearer to it than to the old one; without an old one to tell it
    apart from, within `noise` of the new one. Where even the old version's logprobs lie within the engine's noise of
    what is served, no probe can tell them apart: the verdict then rests on the byte hashes, which both sides have
    checked.
    """
    to_new = max_difference(served_on_new, new)
    to_old = None if old is None or served_on_old is None else max_difference(served_on_old, old)
    if not to_new <= (noise if to_old is None else tolerance):
        return "failed", to_new, to_old
    if to_old is None or (to_new < to_old and to_old > noise):
        return "proven", to_new, to_old
    if to_old <= noise and to_new <= noise:
        return "indistinguishable", to_new, to_old
    return "failed", to_new, to_old


def telling(new: Logprobs, others: Sequence[Logprobs]) -> tuple[int, int]:
    """Returns the index of a sequence, and how many of its logprobs tell `new` from `others` nearly as well as any sequence.

    That is the shortest beginning of at least `LEAST_TELLING` logprobs whose largest difference to each of `others` is
    `NEARLY` the largest that there is. Without others, or where nothing differs, it is the first whole sequence.
    """
    import numpy as np  # not needed where a config is parsed

    apart = [
        np.min([np.maximum.accumulate(np.abs(np.subtract(new[i], other[i]))) for other in others], axis=0)
        for i in range(len(new) if others else 0)
    ]
    best = max((float(a[-1]) for a in apart), default=0.0)
    if not 0 < best < np.inf:
        return 0, len(new[0])
    lengths = [
        (min(len(a), max(LEAST_TELLING, 1 + int(np.argmax(a >= NEARLY * best)))), i)
        for i, a in enumerate(apart)
        if a[-1] >= NEARLY * best
    ]
    length, index = min(lengths)
    return index, length


def max_difference(a: Logprobs, b: Logprobs) -> float:
    """Returns max |a - b| over two ragged lists of one shape; ValueError if the shapes differ; NaN counts as infinite."""
    if [len(x) for x in a] != [len(x) for x in b]:
        raise ValueError(f"probe lengths differ: {[len(x) for x in a]} and {[len(x) for x in b]}")
    differences = [abs(x - y) for row_a, row_b in zip(a, b, strict=True) for x, y in zip(row_a, row_b, strict=True)]
    if any(d != d for d in differences):
        return float("inf")
    return max(differences, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a proof allows, in nats. See `proof.judge`."""

    tolerance: float = 1e-3
    """The largest difference to the version that should be served."""
    noise: float = 2e-4
    """What rounding alone may make: two versions that differ by less cannot be told apart."""
    pair: str = "trainer float32, engine float32"
    """The dtypes for which these are, in words."""


FLOAT32 = Limits()
"""Where trainer and engine are both float32."""
NOISE: Mapping[tuple[str, str], float] = {
    ("float32", "float32"): FLOAT32.noise,
    ("float32", "bfloat16"): 0.5,
    ("bfloat16", "bfloat16"): 0.5,
    ("bfloat16", "float32"): 0.5,
    ("float32", "float16"): 0.1,
    ("bfloat16", "float16"): 0.5,
}
"""(dtype of the trainer, of the engine) -> how far apart rounding alone may put the logprobs of a text.

These are limits, two to three times the largest differences that were measured on a CPU: 1.0e-4 where trainer and engine are
float32 (Gemma 3 270M; SmolLM2-135M-Instruct 7.8e-5), 0.18 where one of them or both are bfloat16 (SmolLM2-135M-Instruct).
Larger models and float16, which rounds an eighth as much as bfloat16, were not measured.
"""
TOLERANCE_PER_NOISE = 2.0


def limits_for(trainer: str, engine: str) -> Limits:
    """Returns the limits for a pair of dtypes; an engine of another dtype counts as one of bfloat16."""
    noise = NOISE.get((trainer, engine), NOISE[trainer, "bfloat16"])
    is_exact = (trainer, engine) == ("float32", "float32")
    tolerance = 1e-3 if is_exact else TOLERANCE_PER_NOISE * noise
    return Limits(tolerance=tolerance, noise=noise, pair=f"trainer {trainer}, engine {engine}")

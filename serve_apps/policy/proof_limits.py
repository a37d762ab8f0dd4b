"""proof_limits: the dtypes of a trainer and an engine -> how far apart the logprobs of the two may lie in a proof.

Rounding alone puts them apart, by an amount that the two dtypes decide. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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

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
    noise: float = 5e-5
    """What rounding alone may make: two versions that differ by less cannot be told apart."""
    pair: str = "trainer float32, engine float32"
    """The dtypes for which these are, in words."""


FLOAT32 = Limits()
"""Where trainer and engine are both float32."""
NOISE: Mapping[tuple[str, str], float] = {
    ("float32", "float32"): 5e-5,
    ("float32", "bfloat16"): 0.5,
    ("bfloat16", "bfloat16"): 0.5,
    ("bfloat16", "float32"): 0.5,
    ("float32", "float16"): 0.1,
    ("bfloat16", "float16"): 0.5,
}
"""(dtype of the trainer, of the engine) -> what rounding alone makes of the logprobs of a text at most.

Measured with SmolLM2-135M-Instruct on a CPU, 4 texts of up to 64 tokens, largest difference: trainer and engine in float32
5.7e-5; of another trainer or engine in bfloat16 0.16 to 0.18. The value for bfloat16 leaves room for larger models, which were
not measured; neither was float16, whose rounding is an eighth.
"""
TOLERANCE_PER_NOISE = 2.0


def limits_for(trainer: str, engine: str) -> Limits:
    """Returns the limits for a pair of dtypes; an engine of another dtype counts as one of bfloat16."""
    noise = NOISE.get((trainer, engine), NOISE[trainer, "bfloat16"])
    is_exact = (trainer, engine) == ("float32", "float32")
    tolerance = 1e-3 if is_exact else TOLERANCE_PER_NOISE * noise
    return Limits(tolerance=tolerance, noise=noise, pair=f"trainer {trainer}, engine {engine}")

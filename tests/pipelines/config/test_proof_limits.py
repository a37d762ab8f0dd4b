"""What a proof allows between two dtypes, unless the config says otherwise."""

from __future__ import annotations

import pytest

from pipelines.config.sections import SyncConfig
from serve_apps.policy.proof import NOISE, judge, limits_for

pytestmark = pytest.mark.fast


def test_float32_is_proven_to_a_thousandth_and_what_is_rounded_to_its_noise() -> None:
    exact = SyncConfig().limits(trainer="float32", engine="float32")
    assert (exact.tolerance, exact.noise) == (1e-3, 2e-4)
    for (trainer, engine), noise in NOISE.items():
        found = SyncConfig().limits(trainer=trainer, engine=engine)
        assert found.noise == noise <= found.tolerance
        assert found.pair == f"trainer {trainer}, engine {engine}"
    assert SyncConfig().limits(trainer="float32", engine="auto").noise == NOISE["float32", "bfloat16"]


def test_what_is_configured_wins() -> None:
    given = SyncConfig(proof_tolerance=0.7, proof_noise=0.3).limits(trainer="bfloat16", engine="bfloat16")
    assert (given.tolerance, given.noise) == (0.7, 0.3)
    strict = SyncConfig(proof_tolerance=0.01).limits(trainer="bfloat16", engine="bfloat16")
    assert (strict.tolerance, strict.noise) == (0.01, 0.01), "rounding is never allowed more than the whole"
    loose = SyncConfig(proof_noise=3.0).limits(trainer="float32", engine="float32")
    assert (loose.tolerance, loose.noise) == (3.0, 3.0)


@pytest.mark.parametrize("pair", NOISE)
def test_a_step_below_the_noise_rests_on_the_hashes_and_one_above_it_is_proven(pair: tuple[str, str]) -> None:
    limits = limits_for(*pair)
    noise, allowed = limits.noise, {"tolerance": limits.tolerance, "noise": limits.noise}
    served, new = [[0.0, 0.0]], [[0.9 * noise, 0.0]]
    assert judge(served, new, served, [[0.5 * noise, 0.0]], **allowed)[0] == "indistinguishable"
    assert judge(served, new, served, [[1.5 * noise, 0.0]], **allowed)[0] == "proven"
    other = [[1.1 * limits.tolerance, 0.0]]
    assert judge(served, other, served, [[0.0, 0.0]], **allowed)[0] == "failed", "it serves the version before"

"""Which version the KL terms compare with, and that it stays stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from stores.weights.manifest import Manifest
from train_loops.engine.models import reference_version

pytestmark = pytest.mark.fast


def lineage(parents: dict[int, int], *, every: int) -> dict[int, int]:
    """By version, the one that a job from it compares with."""
    compared_with, trained_with = {}, {0: 0}
    for version, parent in {0: None, **parents}.items():
        if parent is not None:
            trained_with[version] = compared_with[parent]
        manifest: Any = SimpleNamespace(version=version, parent=parent, reference=trained_with[version])
        compared_with[version] = reference_version(cast(Manifest, manifest), every=every)
    return compared_with


def test_each_multiple_brings_a_new_reference_and_a_rejected_version_is_none() -> None:
    straight = {v: v - 1 for v in range(1, 8)}
    assert lineage(straight, every=0) == dict.fromkeys(range(8), 0)
    assert lineage(straight, every=1) == {v: v for v in range(8)}
    assert lineage(straight, every=3) == {0: 0, 1: 0, 2: 0, 3: 3, 4: 3, 5: 3, 6: 6, 7: 6}
    # 3 and 4 were rejected: training went back to 2, and 5 is the first beyond the third version.
    back = {1: 0, 2: 1, 3: 2, 4: 2, 5: 2, 6: 5, 7: 6}
    assert lineage(back, every=3) == {0: 0, 1: 0, 2: 0, 3: 3, 4: 4, 5: 5, 6: 6, 7: 6}

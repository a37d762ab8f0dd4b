"""sync: model versions -> served weights, and a proof that they are the right ones.

Reads: what `train` recorded for every model group. Writes: the served versions; proofs into the journal.
"""

from __future__ import annotations

from typing import Any

from pipelines.run.run import Run, plain
from pipelines.run.serving import serve
from stores.journal import Lease


def sync(run: Run, iteration: int, lease: Lease) -> dict[str, Any]:
    """Puts the iteration's versions into the running engines; returns {"policy_versions", "proofs", "seconds"}."""
    models = run.trained(iteration)
    lease.check()
    proofs, seconds = serve(run, models, always_prove=True)
    return {
        "policy_versions": {group: ref.version for group, ref in models.items()},
        "proofs": [plain(proof) for proof in proofs],
        "seconds": seconds,
    }

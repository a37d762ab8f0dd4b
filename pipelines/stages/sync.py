"""sync: model versions -> served weights, and a proof that they are the right ones.

Reads: what `train` recorded for every model group. Writes: the served versions; proofs into the journal.
"""

from __future__ import annotations

from pipelines.run.run import Run, plain
from pipelines.run.serving import serve
from stores.journal.journal import Lease
from stores.journal.stage_results import Synced


def sync(run: Run, iteration: int, lease: Lease) -> Synced:
    """Loads the iteration's versions into the running engines and has each replica prove that it serves them."""
    models = run.trained(iteration)
    lease.check()  # before the engines change: another process may have taken this stage over
    proofs, seconds = serve(run, models, always_prove=True)
    return Synced(
        policy_versions={group: ref.version for group, ref in models.items()},
        proofs=tuple(plain(proof) for proof in proofs),
        seconds=seconds,
    )

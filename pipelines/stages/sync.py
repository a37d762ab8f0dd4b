"""sync: model versions -> served weights, and a proof that they are the right ones.

Reads: what `train` recorded for every model group. Writes: the served versions; proofs into the journal.
"""

from __future__ import annotations

from pipelines.run.run import plain
from pipelines.run.serving import serve
from pipelines.stages.table import StageCall
from stores.journal.stage_results import Synced


def sync(call: StageCall) -> Synced:
    """Loads the iteration's versions into the running engines and has each replica prove that it serves them."""
    models = call.iteration.models
    call.lease.check()  # before the engines change: another process may have taken this stage over
    proofs, seconds = serve(call.run, models, always_prove=True)
    return Synced(
        policy_versions={group: ref.version for group, ref in models.items()},
        proofs=tuple(plain(proof) for proof in proofs),
        seconds=seconds,
    )

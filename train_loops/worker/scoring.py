"""scoring: rows and models -> logprobs, entropy and values of every completion token, without gradients.

Every worker scores its share of the rows, and afterwards knows the scores of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from train_loops.config import MismatchConfig
from train_loops.engine.models import Models
from train_loops.rows.batching import Layout, lift
from train_loops.rows.samples import Sample
from train_loops.signal.mismatch import Agreement, measure

Rows = Sequence[NDArray[np.floating]]

PROBE_SHARE, MIN_PROBE_TOKENS, MAX_PROBE_TOKENS = 1 / 16, 1024, 4096
"""A difference between two sets of weights is measured on this share of a job's tokens, within these bounds."""


def score_rows(layout: Layout, models: Models, *, rows: Sequence[int], names: Sequence[str]) -> dict[str, Rows]:
    """Returns by name one array over completion tokens per row of `rows`; every worker calls it with the same arguments.

    Args:
        names: of `old` and `entropy` (from the policy), `ref` (from the reference), `values` (from the critic, or from the
            value head on the policy's trunk).
    """
    by_row: dict[str, dict[int, NDArray[np.float32]]] = {name: {} for name in names}
    has_policy = bool({"old", "entropy"} & set(names)) or ("values" in names and models.shares_trunk)
    # `share` gives every worker equally many microbatches, so that all enter the collectives of ZeRO-3 equally often.
    for chains in layout.share(rows):
        batch = layout.batch(chains)
        scores: dict[str, Any] = {}
        with torch.no_grad():
            if has_policy:
                with_values = "values" in names and models.shares_trunk
                out = models.policy(batch, with_entropy="entropy" in names, with_values=with_values)
                scores = dict(zip(("old", "entropy", "values"), out, strict=True))
            if "ref" in names:
                assert models.reference is not None, "asked for without a reference"
                scores["ref"] = models.reference(batch)[0]
            if "values" in names and models.critic is not None:
                scores["values"] = models.critic(batch)
        for name in names:
            by_row[name] |= lift(scores[name], batch)
    if dist.get_world_size() > 1:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, by_row)
        by_row = {name: {row: x for part in parts for row, x in part[name].items()} for name in by_row}
    return {name: [scores_of[i] for i in rows] for name, scores_of in by_row.items()}


def measured_on_probe(
    samples: Sequence[Sample], layout: Layout, models: Models, *, config: MismatchConfig
) -> dict[str, Agreement]:
    """Measures per agent how near the engine's logprobs are to the trainer's, on `probe_rows` of the job."""
    rows = probe_rows([len(s.token_ids) for s in samples])
    old = score_rows(layout, models, rows=rows, names=["old"])["old"]
    rollout = [np.asarray(samples[i].rollout_logprobs, dtype=np.float64) for i in rows]
    return measure(old, rollout, [samples[i].agent for i in rows], config=config)


def probe_rows(lengths: Sequence[int]) -> list[int]:
    """Draws rows that together have about PROBE_SHARE of the tokens, at least one row; the same rows at every call."""
    num_tokens = sum(lengths)
    num_probed = min(MAX_PROBE_TOKENS, max(MIN_PROBE_TOKENS, PROBE_SHARE * num_tokens))
    num_rows = min(len(lengths), max(1, round(len(lengths) * num_probed / num_tokens)))
    return np.random.default_rng(0).permutation(len(lengths))[:num_rows].tolist()

"""batching: training rows -> minibatches (one optimizer step) -> microbatches (one backward) -> padded tensors.

    rows --deal at random--> minibatches --sort by length, cut by token budget--> microbatches --deal to workers--> plan

Every worker computes the same plan from the lengths of all rows and takes its own share of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from train_loops.rows import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A microbatch, padded on the right. B rows, T tokens; position t of a [B, T-1] tensor is about token t+1.

    An empty microbatch (see `plan`) is one row of two pad tokens with nothing in `loss_mask`: forward and backward run
    over every module, and its gradient is zero.
    """

    token_ids: torch.Tensor
    """[B, T] int64."""
    loss_mask: torch.Tensor
    """[B, T-1] bool, True where the target token is a completion token."""
    temperature: torch.Tensor
    """[B] float32."""
    rows: tuple[int, ...]
    """Which samples these are; shorter than B (empty) for an empty microbatch."""

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return Batch(
            token_ids=self.token_ids.to(device),
            loss_mask=self.loss_mask.to(device),
            temperature=self.temperature.to(device),
            rows=self.rows,
        )


def collate(samples: Sequence[Sample], rows: Sequence[int], *, pad_id: int = 0) -> Batch:
    """Pads `samples[i] for i in rows` to one batch; no rows give an empty microbatch (see `Batch`)."""
    picked = [samples[i] for i in rows]
    lengths = [len(s.token_ids) for s in picked] or [2]
    token_ids = np.full((len(lengths), max(lengths)), pad_id, dtype=np.int64)
    loss_mask = np.zeros((len(lengths), max(lengths) - 1), dtype=bool)
    for i, s in enumerate(picked):
        token_ids[i, : lengths[i]] = s.token_ids
        loss_mask[i, s.prompt_length - 1 : lengths[i] - 1] = True
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        loss_mask=torch.from_numpy(loss_mask),
        temperature=torch.tensor([s.temperature for s in picked] or [1.0], dtype=torch.float32),
        rows=tuple(rows),
    )


def lay(
    per_row: Sequence[float]
    | Sequence[NDArray[np.floating]]
    | Mapping[int, NDArray[np.floating]]
    | NDArray[np.floating],
    batch: Batch,
) -> torch.Tensor:
    """Per-row values (a number, or an array over the row's completion tokens; indexed like the samples) -> [B, T-1].

    float32 on the batch's device, 0 outside the loss mask.
    """
    out = torch.zeros(batch.loss_mask.shape, dtype=torch.float32)
    if batch.rows:
        mask = batch.loss_mask.cpu()
        counts = mask.sum(1).tolist()
        flat = [np.broadcast_to(per_row[i], (n,)) for i, n in zip(batch.rows, counts, strict=True)]
        out[mask] = torch.from_numpy(np.concatenate(flat).astype(np.float32))
    return out.to(batch.loss_mask.device)


def lift(values: torch.Tensor, batch: Batch) -> dict[int, NDArray[np.float32]]:
    """[B, T-1] -> {row: array over its completion tokens}; the inverse of `lay`."""
    mask = batch.loss_mask.cpu()
    host = values.detach().float().cpu()
    return {row: host[i][mask[i]].numpy() for i, row in enumerate(batch.rows)}


def deal_minibatches(num_rows: int, num_minibatches: int, *, seed: int) -> list[list[int]]:
    """All rows, in random order, dealt into minibatches whose sizes differ by at most one.

    The number of minibatches, hence of optimizer steps, is `num_minibatches` whatever the number of rows; only where
    there are fewer rows than that it is `num_rows`, because a step without rows would still decay weights and moments.
    """
    order = np.random.default_rng(seed).permutation(num_rows)
    return [part.tolist() for part in np.array_split(order, min(num_minibatches, num_rows))] if num_rows else []


def microbatches(rows: Sequence[int], lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Cuts one minibatch, sorted by length, so that rows x longest row <= `max_tokens`.

    A row longer than the budget is a microbatch of its own: rows are never cut.

    Args:
        rows: indices into `lengths`.
        lengths: tokens of every row.
        max_tokens: padded tokens per microbatch.
    """
    cut: list[list[int]] = []
    for row in sorted(rows, key=lambda i: (-lengths[i], i)):
        if cut and (len(cut[-1]) + 1) * lengths[cut[-1][0]] <= max_tokens:
            cut[-1].append(row)
        else:
            cut.append([row])
    return cut


def plan(
    lengths: Sequence[int],
    *,
    num_minibatches: int,
    microbatch_tokens: int,
    num_workers: int = 1,
    rank: int = 0,
    seed: int,
) -> list[list[list[int]]]:
    """One epoch for one worker: `plan[minibatch][microbatch]` = rows. All workers together see every row once.

    Every worker gets the same number of microbatches in every minibatch, of about the same padded size at the same
    place (collectives stay in step). Where there are too few rows for that, some are empty lists: `collate` turns
    them into a batch of zero weight.
    """
    return [
        _share(microbatches(rows, lengths, max_tokens=microbatch_tokens), num_workers)[rank]
        for rows in deal_minibatches(len(lengths), num_minibatches, seed=seed)
    ]


def _share(cut: list[list[int]], num_workers: int) -> list[list[list[int]]]:
    """Microbatches (longest rows first) -> one list per worker, all of one length."""
    while len(cut) % num_workers and any(len(rows) > 1 for rows in cut):
        at = max(range(len(cut)), key=lambda i: len(cut[i]))
        half = (len(cut[at]) + 1) // 2
        cut = [*cut[:at], cut[at][:half], cut[at][half:], *cut[at + 1 :]]
    cut = cut + [[] for _ in range(-len(cut) % num_workers)]
    return [cut[worker::num_workers] for worker in range(num_workers)]

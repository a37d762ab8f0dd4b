"""layout: one order's samples -> who computes which of them together, and the batches that lays them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from train_loops.batching import Batch, collate, deal_minibatches, plan
from train_loops.config import RowsConfig
from train_loops.engine import device
from train_loops.merging import Chain, chains_of, row_savings, unique_token_share
from train_loops.rows import Sample
from train_loops.sharing import neighbours


class Layout:
    """Every worker makes the same one; each method gives this worker's share."""

    def __init__(self, samples: Sequence[Sample], *, rows: RowsConfig, microbatch_tokens: int, pad_id: int = 0) -> None:
        """Args: samples: all rows of the order; microbatch_tokens: see `TrainConfig`; pad_id: any token id."""
        self._samples, self._rows, self._pad_id = samples, rows, pad_id
        self._microbatch_tokens = microbatch_tokens
        self._chains = chains_of(samples)
        self._order = neighbours([s.token_ids for s in samples]) if rows.pack and rows.share else None

    def minibatches(self, num_minibatches: int, *, seed: int) -> Iterator[tuple[list[list[Chain]], list[int]]]:
        """For every optimizer step of an epoch this worker's microbatches, and the samples of all workers in it."""
        parts = self._plan(self._chains, num_minibatches=num_minibatches, seed=seed)
        dealt = deal_minibatches(self._chains, num_minibatches, seed=seed)
        for mine, chains in zip(parts, dealt, strict=True):
            yield mine, [i for chain in chains for i in chain]

    def share(self, rows: Sequence[int]) -> list[list[Chain]]:
        """This worker's microbatches of `rows`, for passes without gradients."""
        wanted = set(rows)
        chains = picked(self._chains, lambda i: i in wanted)
        return self._plan(chains, num_minibatches=1, seed=0)[0] if chains else []

    def batch(self, chains: Sequence[Chain]) -> Batch:
        """The tensors of a microbatch, on this worker's device."""
        rows = self._rows
        return collate(self._samples, chains, pack=rows.pack, share=rows.share, pad_id=self._pad_id).to(device())

    def savings(self) -> tuple[float, dict[str, float]]:
        """Unique tokens over tokens, of all rows and per agent: what is computed where chains are merged."""
        savings = row_savings(self._samples, self._chains)
        return unique_token_share(savings), {agent: 1 - s.saved_share for agent, s in savings.items()}

    def _plan(self, chains: Sequence[Chain], *, num_minibatches: int, seed: int) -> list[list[list[Chain]]]:
        return plan(
            chains,
            [len(s.token_ids) for s in self._samples],
            num_minibatches=num_minibatches,
            microbatch_tokens=self._microbatch_tokens,
            merge=self._rows.merge,
            pack=self._rows.pack,
            order=self._order,
            num_workers=dist.get_world_size(),
            rank=dist.get_rank(),
            seed=seed,
        )


def picked(chains: Sequence[Chain], is_picked: Callable[[int], bool]) -> list[Chain]:
    """The chains without the samples that are not picked; what is left of none is dropped."""
    kept = (tuple(i for i in chain if is_picked(i)) for chain in chains)
    return [chain for chain in kept if chain]

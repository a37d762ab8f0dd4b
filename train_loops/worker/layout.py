"""layout: the samples of one job -> which worker computes which of them together, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from train_loops.config import RowsConfig
from train_loops.engine.deepspeed_engine import device
from train_loops.rows.batching import Batch, collate, deal_minibatches, plan
from train_loops.rows.merging import Chain, chains_of, row_savings, unique_token_share
from train_loops.rows.samples import Sample
from train_loops.rows.sharing import neighbours


class Layout:
    """How the samples of a job are computed. Every worker builds the same layout; each method returns this worker's share."""

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        rows: RowsConfig,
        microbatch_tokens: int,
        pad_id: int = 0,
        can_pack: bool = True,
    ) -> None:
        """Args: samples: all rows of the job; microbatch_tokens: see `TrainConfig`; pad_id: any token id; can_pack: whether
        the model computes packed rows, for `rows.pack: auto`."""
        self._samples, self._rows, self._pad_id = samples, rows, pad_id
        self._microbatch_tokens = microbatch_tokens
        self._pack = can_pack if rows.pack == "auto" else rows.pack
        self._chains = chains_of(samples)
        # Rows that begin alike are put into one microbatch: only there can they share what they have in common.
        self._order = neighbours([s.token_ids for s in samples]) if self._pack and rows.share else None

    def minibatches(self, num_minibatches: int, *, seed: int) -> Iterator[tuple[list[list[Chain]], list[int]]]:
        """Yields for every optimizer step of an epoch this worker's microbatches, and the samples of all workers in it."""
        parts = self._plan(self._chains, num_minibatches=num_minibatches, seed=seed)
        dealt = deal_minibatches(self._chains, num_minibatches, seed=seed)
        for mine, chains in zip(parts, dealt, strict=True):
            yield mine, [i for chain in chains for i in chain]

    def share(self, rows: Sequence[int]) -> list[list[Chain]]:
        """Returns this worker's microbatches of `rows`, for passes without gradients."""
        picked_rows = set(rows)
        chains = picked(self._chains, lambda i: i in picked_rows)
        return self._plan(chains, num_minibatches=1, seed=0)[0] if chains else []

    def batch(self, chains: Sequence[Chain]) -> Batch:
        """Returns the tensors of a microbatch, on this worker's device."""
        share = self._rows.share
        return collate(self._samples, chains, pack=self._pack, share=share, pad_id=self._pad_id).to(device())

    def savings(self) -> tuple[float, dict[str, float]]:
        """Returns unique tokens over tokens, of all rows and per agent: the share that merging leaves to compute."""
        savings = row_savings(self._samples, self._chains)
        return unique_token_share(savings), {agent: 1 - s.saved_share for agent, s in savings.items()}

    def _plan(self, chains: Sequence[Chain], *, num_minibatches: int, seed: int) -> list[list[list[Chain]]]:
        return plan(
            chains,
            [len(s.token_ids) for s in self._samples],
            num_minibatches=num_minibatches,
            microbatch_tokens=self._microbatch_tokens,
            merge=self._rows.merge,
            pack=self._pack,
            order=self._order,
            num_workers=dist.get_world_size(),
            rank=dist.get_rank(),
            seed=seed,
        )


def picked(chains: Sequence[Chain], is_picked: Callable[[int], bool]) -> list[Chain]:
    """Returns the chains without the samples that are not picked; chains that become empty are dropped."""
    shortened = (tuple(i for i in chain if is_picked(i)) for chain in chains)
    return [chain for chain in shortened if chain]

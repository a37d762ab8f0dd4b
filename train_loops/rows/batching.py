"""batching: training rows -> minibatches (one optimizer step) -> microbatches (one backward) -> flat tensors.

    chains --deal at random--> minibatches --sort, cut by token budget--> microbatches --deal to workers--> plan

`Layout` is all of it for one job; which rows share tokens is in `sharing`.

Every worker computes the same plan from the lengths of all samples and takes its own share of it. Whole chains are
dealt whether or not they are merged, so that merging does not change which samples are in a minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from train_loops.config import RowsConfig
from train_loops.rows.packed_attention import Families, families_of
from train_loops.rows.samples import Masks, Sample
from train_loops.rows.shared_sequences import SharedSequences, shared_sequences
from train_loops.rows.sharing import Chain, chains_of, neighbours, segments_of, unique_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A microbatch: rows of tokens, and flat [N] tensors about their completion tokens, in the order of `rows` and time.

    Rows are padded on the right, [B, T], or packed end to end, [1, T]; B and T of the padded shape of an empty
    microbatch (see `plan`) are 1 and 2, and N is 0: forward and backward run over every module, with zero gradient.
    """

    token_ids: torch.Tensor
    """[B, T] int64."""
    position_ids: torch.Tensor | None
    """[1, T] int64, counted in every packed row; None where rows are padded."""
    families: Families | None
    """Which tokens attend to which in packed rows; None where rows are padded."""
    predictors: torch.Tensor
    """[N] int64: where in the flattened [B * T] hidden states each completion token is predicted."""
    targets: torch.Tensor
    """[N] int64: the completion tokens."""
    temperature: torch.Tensor
    """[N] float32, the temperature at which each token was sampled."""
    row_of_token: torch.Tensor
    """[N] int64: the place in `rows` of each token's sample."""
    masks: torch.Tensor | None
    """[M, ceil(V / 32)] int32: the tokens that could be sampled, as in `samples.Masks`; None where every token could, everywhere."""
    mask_of_token: torch.Tensor | None
    """[N] int64: which of `masks` holds at each token."""
    rows: tuple[int, ...]
    """Indices of the samples."""
    completion_lengths: tuple[int, ...]
    """Completion tokens of each of `rows`; they add up to N."""
    num_tokens: int
    """Tokens that are computed, padding left out; what is merged or shared counts once."""
    shared: SharedSequences | None = None
    """The workers that compute this batch together; None: this worker alone."""

    def to(self, device: torch.device | str) -> Batch:
        """Returns the same batch on another device."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: part.to(device) for name, part in parts.items() if hasattr(part, "to")})


def device() -> torch.device:
    """Returns the device of this worker's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def collate(
    samples: Sequence[Sample], chains: Sequence[Chain], *, pack: bool = False, share: bool = False, pad_id: int = 0
) -> Batch:
    """Lays every chain as one row, with the completions of all its samples; no chains give an empty microbatch.

    Chains may lack samples of those that `chains_of` found, and a sample alone is a chain of one.

    Args:
        pack: rows end to end; False: rows padded on the right with `pad_id`.
        share: what packed rows have in common at their beginning is computed once.
    """
    completions = [
        _Completion(
            row=row,
            sample=i,
            start=samples[i].prompt_length,
            stop=len(samples[i].token_ids),
            temperature=samples[i].temperature,
            masks=samples[i].masks,
        )
        for row, chain in enumerate(chains)
        for i in chain
    ]
    return _lay_out(
        [samples[chain[-1]].token_ids for chain in chains], completions, pack=pack, share=share, pad_id=pad_id
    )


def collate_turns(turns: Sequence[tuple[Sequence[int], Sequence[int]]], *, pad_id: int = 0) -> Batch:
    """Lays prompts and completions that are no samples as padded rows, at temperature 1."""
    rows = [[*prompt, *completion] for prompt, completion in turns]
    completions = [
        _Completion(row=i, sample=i, start=len(prompt), stop=len(rows[i]), temperature=1.0)
        for i, (prompt, _) in enumerate(turns)
    ]
    return _lay_out(rows, completions, pack=False, share=False, pad_id=pad_id)


def lay(
    per_row: Sequence[float]
    | Sequence[NDArray[np.floating]]
    | Mapping[int, NDArray[np.floating]]
    | NDArray[np.floating],
    batch: Batch,
) -> torch.Tensor:
    """Turns values per row into [N], float32 on the batch's device.

    Args:
        per_row: a number, or an array over the row's completion tokens, for every sample; indexed like the samples.
    """
    flat = [np.broadcast_to(per_row[i], (n,)) for i, n in zip(batch.rows, batch.completion_lengths, strict=True)]
    values = np.concatenate([np.empty(0), *flat]).astype(np.float32)
    return torch.from_numpy(values).to(batch.targets.device)


def lift(values: torch.Tensor, batch: Batch) -> dict[int, NDArray[np.float32]]:
    """Turns [N] into {row: array over its completion tokens}; it is the inverse of `lay`."""
    host = values.detach().float().cpu().split(batch.completion_lengths)
    return {row: x.numpy() for row, x in zip(batch.rows, host, strict=True)}


def deal_minibatches(chains: Sequence[Chain], num_minibatches: int, *, seed: int) -> list[list[Chain]]:
    """Deals all chains, in random order, into minibatches whose numbers of chains differ by at most one.

    The number of minibatches, and so of optimizer steps, is `num_minibatches` whatever the number of rows. If there are
    fewer chains than that, every chain is a minibatch: a step without rows would still decay weights and moments.
    """
    if not chains:
        return []
    order = np.random.default_rng(seed).permutation(len(chains))
    return [[chains[i] for i in part] for part in np.array_split(order, min(num_minibatches, len(chains)))]


def microbatches(
    chains: Sequence[Chain],
    lengths: Sequence[int],
    *,
    max_tokens: int,
    pack: bool = False,
    order: Sequence[int] | None = None,
) -> list[list[Chain]]:
    """Cuts one minibatch, sorted, so that a microbatch has at most `max_tokens` tokens, padding included.

    A row longer than the budget is a microbatch of its own: rows are never cut.

    Args:
        chains: each of them a row.
        lengths: tokens of every sample.
        max_tokens: rows x longest row; packed: the sum of the rows.
        order: a key per sample by which packed rows are sorted (see `sharing.neighbours`); else they are by length.
    """
    if pack and order is not None:
        keys = {chain: (order[chain[-1]], chain) for chain in chains}
    else:
        keys = {chain: (-lengths[chain[-1]], chain) for chain in chains}
    cut: list[list[Chain]] = []
    num_tokens = 0
    for chain in sorted(chains, key=keys.__getitem__):
        length = lengths[chain[-1]]
        added = length if pack or not cut else lengths[cut[-1][0][-1]]
        if cut and num_tokens + added <= max_tokens:
            cut[-1].append(chain)
            num_tokens += added
        else:
            cut.append([chain])
            num_tokens = length
    return cut


def plan(
    chains: Sequence[Chain],
    lengths: Sequence[int],
    *,
    num_minibatches: int,
    microbatch_tokens: int,
    merge: bool = True,
    pack: bool = True,
    order: Sequence[int] | None = None,
    num_workers: int = 1,
    rank: int = 0,
    seed: int,
) -> list[list[list[Chain]]]:
    """Plans one epoch for one worker: `plan[minibatch][microbatch]` = rows. All workers together see every sample once.

    Every worker gets the same number of microbatches in every minibatch, of about the same size at the same position: ZeRO's
    collectives run in every forward and backward pass, and all workers must enter them equally often. Where there are too
    few rows for that, some microbatches are empty lists: `collate` turns them into a batch of zero weight.

    Args:
        chains: see `sharing.chains_of`.
        lengths: tokens of every sample.
        merge: a chain is a row; False: every sample of it is one, in the same minibatch.
        pack: see `collate`.
        order: see `microbatches`.
    """
    return [
        _share(
            microbatches(
                dealt if merge else [(i,) for chain in dealt for i in chain],
                lengths,
                max_tokens=microbatch_tokens,
                pack=pack,
                order=order,
            ),
            num_workers,
        )[rank]
        for dealt in deal_minibatches(chains, num_minibatches, seed=seed)
    ]


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
        sequence_parallel: int = 1,
    ) -> None:
        """Args: samples: all rows of the job; microbatch_tokens: see `TrainConfig`; pad_id: any token id; can_pack: whether
        the model computes packed rows, for `rows.pack: auto`; sequence_parallel: workers that compute a row together."""
        self._shared = shared_sequences(sequence_parallel)
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
        batch = collate(self._samples, chains, pack=self._pack, share=share, pad_id=self._pad_id).to(device())
        return replace(batch, shared=self._shared)

    def savings(self) -> tuple[float, dict[str, float]]:
        """Returns the share that merging leaves to compute, see `unique_shares`."""
        return unique_shares(self._samples, self._chains)

    def _plan(self, chains: Sequence[Chain], *, num_minibatches: int, seed: int) -> list[list[list[Chain]]]:
        num_sharing = 1 if self._shared is None else self._shared.size
        return plan(
            chains,
            [len(s.token_ids) for s in self._samples],
            num_minibatches=num_minibatches,
            microbatch_tokens=self._microbatch_tokens,
            merge=self._rows.merge,
            pack=self._pack,
            order=self._order,
            num_workers=dist.get_world_size() // num_sharing,
            rank=dist.get_rank() // num_sharing,
            seed=seed,
        )


def picked(chains: Sequence[Chain], is_picked: Callable[[int], bool]) -> list[Chain]:
    """Returns the chains without the samples that are not picked; chains that become empty are dropped."""
    shortened = (tuple(i for i in chain if is_picked(i)) for chain in chains)
    return [chain for chain in shortened if chain]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Completion:
    """Tokens `start` to `stop` of a row: the completion of one sample."""

    row: int
    sample: int
    start: int
    stop: int
    temperature: float
    masks: Masks | None = None


def _lay_out(
    rows: Sequence[Sequence[int]], completions: Sequence[_Completion], *, pack: bool, share: bool, pad_id: int
) -> Batch:
    token_ids: NDArray[np.int64]
    positions = families = None
    if pack and len(rows) > 1:
        segments, places = segments_of(rows, share=share)
        token_ids = np.concatenate([np.asarray(rows[s.row][s.begin : s.begin + s.length]) for s in segments])[None]
        positions = np.concatenate([np.arange(s.begin, s.begin + s.length) for s in segments])[None]
        families, num_tokens = families_of(segments), token_ids.size
    else:
        width = max((len(row) for row in rows), default=2)
        places = [i * width + np.arange(len(row)) for i, row in enumerate(rows)]
        token_ids = np.full((max(len(rows), 1), width), pad_id, dtype=np.int64)
        for row, place in zip(rows, places, strict=True):
            token_ids.reshape(-1)[place] = row
        num_tokens = sum(len(row) for row in rows)
    # The logits at position t predict token t + 1: a completion is predicted one position before its tokens.
    counts = [c.stop - c.start for c in completions]
    empty = np.empty(0, dtype=np.int64)
    predictors = np.concatenate([empty, *(places[c.row][c.start - 1 : c.stop - 1] for c in completions)])
    targets = np.concatenate([empty, *(np.asarray(rows[c.row][c.start : c.stop]) for c in completions)])
    masks, mask_of_token = _masks_of(completions)
    return Batch(
        token_ids=torch.from_numpy(token_ids.astype(np.int64)),
        position_ids=None if positions is None else torch.from_numpy(positions),
        families=families,
        predictors=torch.from_numpy(predictors),
        targets=torch.from_numpy(targets.astype(np.int64)),
        temperature=torch.tensor(np.repeat([c.temperature for c in completions], counts), dtype=torch.float32),
        row_of_token=torch.from_numpy(np.repeat(np.arange(len(completions)), counts)),
        masks=masks,
        mask_of_token=mask_of_token,
        rows=tuple(c.sample for c in completions),
        completion_lengths=tuple(counts),
        num_tokens=num_tokens,
    )


def _masks_of(completions: Sequence[_Completion]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns `Batch.masks` and `Batch.mask_of_token`."""
    table = next((c.masks.table for c in completions if c.masks is not None), None)
    if table is None:
        return None, None
    every = np.concatenate(
        [np.zeros(c.stop - c.start, dtype=np.int64) if c.masks is None else c.masks.of_token for c in completions]
    )
    used, of_token = np.unique(every, return_inverse=True)
    return torch.from_numpy(table[used]), torch.from_numpy(of_token)


def _share(cut: list[list[Chain]], num_workers: int) -> list[list[list[Chain]]]:
    """Deals microbatches to workers: one list per worker, all of one length."""
    # Halving the largest microbatch is better than adding an empty one, for which the other workers would wait.
    while len(cut) % num_workers and any(len(rows) > 1 for rows in cut):
        at = max(range(len(cut)), key=lambda i: len(cut[i]))
        half = (len(cut[at]) + 1) // 2
        cut = [*cut[:at], cut[at][:half], cut[at][half:], *cut[at + 1 :]]
    cut = cut + [[] for _ in range(-len(cut) % num_workers)]
    return [cut[worker::num_workers] for worker in range(num_workers)]

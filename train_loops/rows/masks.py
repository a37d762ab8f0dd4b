"""masks: rows whose completions were constrained -> the tokens that could be sampled at each of their positions.

    Sample.constraint --xgrammar--> grammar --the completion's tokens, one after another--> a mask per token
    that of a choice  -----------> one token of those that were offered ------------------> a mask

The engine samples a constrained token from the softmax over those that its grammar allows. The logprob of a token under other
weights is over the same tokens, and the grammar's state depends on the tokens before it alone. So the masks are made again here,
from what is stored, by the library that the engine uses (vLLM's backend `xgrammar`), and the figures of agreement between trainer
and engine hold for them as for every other row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from stores.traces.conventions import allowed_tokens
from stores.traces.grammars import Grammars
from train_loops.rows.samples import Masks, Sample

logger = logging.getLogger(__name__)


def with_masks(samples: Sequence[Sample], folder: Path) -> list[Sample]:
    """Returns the rows, those that have a constraint with their masks; rows from service of which none can be made are left out.

    Args:
        folder: the model with its tokenizer, in Hugging Face layout.

    Raises:
        ValueError: a row's completion is not what its constraint allows, or there is no grammar of the constraint.
    """
    if not any(sample.constraint for sample in samples):
        return list(samples)
    grammars = Grammars(folder)
    number_of: dict[bytes, int] = {}
    rows: list[NDArray[np.int64] | None] = []
    used: list[Sample] = []
    for sample in samples:
        try:
            rows.append(_mask_numbers(grammars, sample, number_of) if sample.constraint else None)
        except (ValueError, RuntimeError) as error:
            if not sample.is_served:  # those were sampled by whatever service there was, and cannot be sampled again
                raise ValueError(str(error)) from None
            logger.warning("leaves out a row from service: %s", error)
            continue
        used.append(sample)
    table = np.frombuffer(b"".join(number_of), dtype=np.int32).reshape(len(number_of), -1)
    return [
        sample if of_token is None else replace(sample, masks=Masks(table=table, of_token=of_token))
        for sample, of_token in zip(used, rows, strict=True)
    ]


class _OneOf:
    """Matches one token of those that a choice offered."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._allowed, self._is_over = frozenset(token_ids), False

    def is_terminated(self) -> bool:
        return self._is_over

    def fill_next_token_bitmask(self, mask: torch.Tensor) -> None:
        if max(self._allowed) >= 32 * mask.shape[-1]:
            raise ValueError(
                f"token {max(self._allowed)} was offered, which the model does not have: another model sampled it"
            )
        bits = np.zeros(mask.shape[-1], dtype=np.uint32)
        for token in self._allowed:
            bits[token // 32] |= np.uint32(1 << token % 32)
        mask[0] = torch.from_numpy(bits.view(np.int32))

    def accept_token(self, token: int) -> bool:
        self._is_over = True
        return token in self._allowed


def _mask_numbers(grammars: Grammars, sample: Sample, number_of: dict[bytes, int]) -> NDArray[np.int64]:
    """Returns the number of each completion token's mask in `number_of`, and adds new ones there."""
    import xgrammar

    mask = xgrammar.allocate_token_bitmask(1, grammars.vocabulary)
    if not number_of:
        number_of[torch.full_like(mask, -1).numpy().tobytes()] = 0
    place = f"episode {sample.episode_id}, turn {sample.turn_index} ({sample.agent})"
    try:
        allowed = allowed_tokens(sample.constraint)
        matcher = _OneOf(allowed) if allowed else grammars.matcher(sample.constraint)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{place}: there is no grammar of its constraint {sample.constraint[:200]}: {error}") from None
    of_token = np.zeros(sample.completion_length, dtype=np.int64)
    for position, token in enumerate(sample.token_ids[sample.prompt_length :]):
        if not matcher.is_terminated():
            matcher.fill_next_token_bitmask(mask)
            of_token[position] = number_of.setdefault(mask.numpy().tobytes(), len(number_of))
            if not matcher.accept_token(token):
                raise ValueError(
                    f"{place}: token {token} at position {position} of the completion is not allowed by the turn's constraint "
                    f"{sample.constraint[:200]}: was it sampled by an engine with another tokenizer or another version of xgrammar? Sample the episodes again"
                )
    return of_token

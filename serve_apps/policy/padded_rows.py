"""padded_rows: the logits of a batch -> the same without the rows of the vocabulary that stand for no token.

Many models have more rows than their tokenizer has tokens, so that sizes divide well. Such a row can be sampled and means nothing.
vLLM calls `PaddedRows` before it samples (`logits_processors`); the trainer leaves the same rows out (`PolicyScorer`), so that both
have one distribution. Imported in engines only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import LogitsProcessor

from stores.weights.model_folder import num_known_rows

if TYPE_CHECKING:
    import torch


class PaddedRows(LogitsProcessor):  # type: ignore[misc]
    """Gives rows behind the last token the probability 0, in every request."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """Reads the number of tokens in the folder that the engine was started with."""
        self._num_known = num_known_rows(Path(vllm_config.model_config.model))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Masks `logits`, [B, vocabulary], in place and returns them."""
        if self._num_known is not None:
            logits[:, self._num_known :] = -float("inf")
        return logits

    def is_argmax_invariant(self) -> bool:
        """A padded row may have the largest logit."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Nothing depends on the requests."""

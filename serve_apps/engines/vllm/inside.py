"""inside: what Troupe reads and changes inside vLLM, beyond what vLLM documents; `cpu.py` has what only engines on a CPU need.

`tests/serve_apps/engines/test_inside_vllm.py` names every attribute, for whoever updates vLLM. Imported in engines only.

New weights: vLLM mixes `WeightsExtension` into its worker class (`worker_extension_cls`) and calls it through `collective_rpc`.
New weights are staged and checked first; the running model is touched only once every worker holds a good set,
because a reload that fails half way leaves a model on the meta device and the engine dies with the next request.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import LogitsProcessor

from serve_apps.engines.tensors import check_tensors, load_tensors, stored_shapes
from stores.weights.model_folder import num_known_rows

if TYPE_CHECKING:
    import torch


class WeightsExtension:
    """Adds methods to every vLLM worker: `troupe_stage` checks new weights, `troupe_swap` makes them live.

    `troupe_free_bytes` says what room its GPU has (see engine_sleep.py).
    """

    vllm_config: Any
    model_runner: Any
    _troupe_expected: dict[str, tuple[int, ...]] | None = None
    _troupe_staged: dict[str, torch.Tensor] | None = None

    def troupe_expect(self, folder: str) -> int:
        """Remembers the tensor names and shapes of the model that the engine was started with; returns their count."""
        self._troupe_expected = stored_shapes(folder)
        return len(self._troupe_expected)

    def troupe_stage(self, folder: str) -> int:
        """Loads and checks the weights in `folder` without touching the model; returns the number of tensors.

        Raises ValueError for missing, unknown, misshapen or non-finite tensors.
        """
        self._troupe_staged = None
        tensors = load_tensors(folder)
        assert self._troupe_expected, "troupe_expect comes before troupe_stage"
        check_tensors(tensors, self._troupe_expected, folder)
        self._troupe_staged = tensors
        return len(tensors)

    def troupe_swap(self) -> None:
        """Makes the staged weights live; only while generation is paused."""
        assert self._troupe_staged is not None, "troupe_stage comes before troupe_swap"
        tensors, self._troupe_staged = self._troupe_staged, None
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        self._troupe_repack_tied_head()

    def troupe_free_bytes(self) -> int:
        """Returns the free memory of this worker's GPU in bytes; 0 for a worker on a CPU."""
        import torch

        return int(torch.accelerator.get_memory_info()[0]) if torch.accelerator.is_available() else 0

    def _troupe_repack_tied_head(self) -> None:
        """Rebuilds the packed `lm_head`: on a CPU vLLM keeps a copy that a reload of tied weights leaves stale."""
        from vllm.platforms import current_platform

        config = self.vllm_config.model_config.hf_config
        if not current_platform.is_cpu() or not getattr(config, "tie_word_embeddings", False):
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(self.model_runner.get_model().lm_head, remove_weight=False)


class PaddedRows(LogitsProcessor):  # type: ignore[misc]
    """Gives rows of the vocabulary behind the last token the probability 0, in every request.

    Many models have more rows than their tokenizer has tokens, so that sizes divide well. Such a row can be sampled and means
    nothing. The trainer leaves the same rows out (`PolicyScorer`), so that both have one distribution.
    """

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


def tokens_under_way(engine: Any) -> dict[str, int]:
    """Returns the tokens sampled so far of every request that an `AsyncLLM` has begun on, by its id.

    Nothing is asked of the engine: vLLM keeps the tokens of unfinished requests in this process.
    """
    states = list(engine.output_processor.request_states.values())
    return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states if not state.is_prefilling}

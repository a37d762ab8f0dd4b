"""weights_extension: a Hugging Face folder -> the weights of a running vLLM worker.

vLLM mixes `WeightsExtension` into its worker class (`worker_extension_cls`) and calls it through `collective_rpc`.
New weights are staged and checked first; the running model is touched only once every worker holds a good set,
because a reload that fails half way leaves a model on the meta device and the engine dies with the next request.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stores.weights.manifest import read_safetensors_header

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
        files = sorted(Path(folder).glob("*.safetensors"))
        headers = [read_safetensors_header(file) for file in files]
        self._troupe_expected = {name: shape for header in headers for name, (_, shape) in header.items()}
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


def load_tensors(folder: str | Path) -> dict[str, torch.Tensor]:
    """Returns every tensor of the safetensors files in `folder`, on the CPU.

    Raises ValueError if there is no file or one is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors file")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}") from None
    return tensors


def check_tensors(tensors: dict[str, torch.Tensor], expected: dict[str, tuple[int, ...]], source: str) -> None:
    """Raises ValueError, naming the tensor, unless `tensors` has just the expected names and shapes, all finite.

    A missing tensor would silently keep the old policy's values.
    """
    import torch

    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(f"{source}: missing tensors {missing[:3]}, unknown tensors {unknown[:3]}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(f"{source}: {name} has shape {tuple(tensor.shape)}, the engine's is {expected[name]}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{source}: {name} has values that are not finite")

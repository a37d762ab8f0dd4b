"""adapter_products: the tokens of a step, their adapters -> what the adapters add to a layer, on a CPU.

vLLM's own CPU operators copy both matrices of the adapter once for every token of the step. Here each adapter is multiplied once
with all of its tokens. Imported in engines only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker


class GroupedAdapters(PunicaWrapperCPU):  # type: ignore[misc]
    """Groups the tokens of a step by adapter. A token without an adapter gets nothing added."""

    _groups: Sequence[tuple[int, torch.Tensor | None]] = ()
    """The slots of the adapters in this step, each with the rows of its tokens; None: all rows."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Takes the adapter of every token of the next step: see `PunicaWrapperBase`."""
        super().update_metadata(*args, **kwargs)
        slots = self.token_lora_indices
        used = slots.unique().tolist()
        if len(used) == 1:
            self._groups = [(slot, None) for slot in used if slot >= 0]
        else:
            self._groups = [(slot, (slots == slot).nonzero().squeeze(1)) for slot in used if slot >= 0]

    def _apply_shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        """Writes `scale * x @ A.T` to `y`. Shapes: y [tokens, rank], x [tokens, in], w_t_all [slots, 1, rank, in]."""
        for slot, rows in self._groups:
            matrix = w_t_all[slot, 0].to(y.dtype).T
            if rows is None:
                torch.mm(x.to(y.dtype), matrix, out=y).mul_(scale)
            else:
                y.index_copy_(0, rows, (x[rows].to(y.dtype) @ matrix).mul_(scale))

    def _apply_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        """Adds `x @ B.T` to the columns of `y` from `y_offset` on, or writes it there.

        Shapes: y [tokens, out], x [tokens, rank], w_t_all [slots, 1, y_slice_size, rank].
        """
        columns = y.narrow(1, y_offset, y_slice_size)
        for slot, rows in self._groups:
            matrix = w_t_all[slot, 0].to(y.dtype).T
            if rows is None:
                columns.addmm_(x.to(y.dtype), matrix, beta=int(add_inputs))
                continue
            product = x[rows].to(y.dtype) @ matrix
            if add_inputs:
                columns.index_add_(0, rows, product)
            else:
                columns.index_copy_(0, rows, product)


class AdapterWorker(CPUWorker):  # type: ignore[misc]
    """Is vLLM's worker on a CPU whose layers use `GroupedAdapters` (`worker_cls`)."""

    def load_model(self, **kwargs: Any) -> None:
        """Loads the model; the layers that adapters change ask the platform for their operators while they are made."""
        current_platform.get_punica_wrapper = lambda: f"{GroupedAdapters.__module__}.{GroupedAdapters.__name__}"
        super().load_model(**kwargs)

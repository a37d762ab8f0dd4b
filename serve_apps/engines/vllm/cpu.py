"""cpu: what Troupe changes inside vLLM for engines on a CPU. Imported in engines only; see `inside.py`.

GatheringScheduler: requests that reach an idle engine one by one -> one first step for all of them.

    without  r1 │ step: r1 │ step: r1 .. r32 │ ... │ step: r32 │    one step more, in each turn of episodes in lockstep
    with     r1 .. r32 │ step: r1 .. r32 │ ... │

On a CPU a step takes tens of milliseconds, longer than the requests of a wave need to arrive.

GroupedAdapters: vLLM's own CPU operators copy both matrices of an adapter once for every token of a step. Here each adapter is
multiplied once with all of its tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker

LAST_ARRIVAL_SHARE = 0.1
"""An idle engine waits for this share of a step after each request for the next one."""
FIRST_ARRIVAL_SHARE = 0.5
"""It waits no longer than this share of a step after the first one."""
MIN_STEP_S = 0.01
"""Engines with shorter steps never wait: the engine's own loop sleeps for a millisecond."""


class GatheringScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, which begins with an empty step while further requests arrive."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step_s = 0.0
        """Seconds of the last step that began and ended with requests at work: not of the first one of a wave, with its prompts."""
        self._stepped_at: float | None = None
        """When the last such step began; None where the engine was idle since."""
        self._first_at = self._last_at = 0.0
        """When the first request reached the idle engine, and the last one."""

    def add_request(self, request: Any) -> None:
        """Notes when the request came, and queues it."""
        self._last_at = time.monotonic()
        if not self.running and not self.waiting:
            self._first_at = self._last_at
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Returns the next step, an empty one while the idle engine gathers requests."""
        now = time.monotonic()
        if self.running:
            if self._stepped_at is not None:
                self._step_s = now - self._stepped_at
            self._stepped_at = now
        elif self._gathers(now):
            self._pause_state = PauseState.PAUSED_ALL
            try:
                return super().schedule(throttle_prefills)
            finally:
                self._pause_state = PauseState.UNPAUSED
        return super().schedule(throttle_prefills)

    def _gathers(self, now: float) -> bool:
        self._stepped_at = None
        if self._step_s < MIN_STEP_S or self._pause_state != PauseState.UNPAUSED:
            return False
        return (
            0 < len(self.waiting) < self.max_num_running_reqs
            and now - self._last_at < LAST_ARRIVAL_SHARE * self._step_s
            and now - self._first_at < FIRST_ARRIVAL_SHARE * self._step_s
        )


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

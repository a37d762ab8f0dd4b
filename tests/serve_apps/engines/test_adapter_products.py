"""What adapters add to a layer on a CPU: as vLLM's own operators say, for one adapter and for several in a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.test

SLOTS, RANK, WIDTH, SLICES = 3, 4, 24, (16, 8, 8)
"""Slots of an engine, the rank of its adapters, the input of a layer, the widths of its parts (as of q, k and v)."""


def layer(seed: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """The stacked matrices A and B of every slot."""
    generator = torch.Generator().manual_seed(seed)
    shrink = tuple(torch.randn(SLOTS, 1, RANK, WIDTH, generator=generator) for _ in SLICES)
    expand = tuple(torch.randn(SLOTS, 1, width, RANK, generator=generator) for width in SLICES)
    return shrink, expand


def added(wrapper_class: Any, adapters: list[int], *, is_prefill: bool = True, scale: float = 0.5) -> torch.Tensor:
    """What a step whose tokens have these adapters (0: none) adds to the output of the layer, [tokens, sum of widths]."""
    from vllm.lora.layers import LoRAMapping

    wrapper = wrapper_class(64, 64, "cpu")
    mapping = LoRAMapping(tuple(adapters), tuple(adapters), is_prefill=is_prefill)
    wrapper.update_metadata(mapping, [11, 12, 13], SLOTS, 100)
    x = torch.randn(len(adapters), WIDTH, generator=torch.Generator().manual_seed(1))
    y = torch.zeros(len(adapters), sum(SLICES))
    wrapper.add_lora_linear(y, x, *layer(0), scale, SLICES)
    return y


@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("adapters", [[12] * 5, [11, 11, 13, 12, 13, 11], [13]])
def test_products_are_those_of_vllm(adapters: list[int], is_prefill: bool) -> None:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from serve_apps.engines.vllm.cpu import GroupedAdapters

    ours = added(GroupedAdapters, adapters, is_prefill=is_prefill)
    torch.testing.assert_close(ours, added(PunicaWrapperCPU, adapters, is_prefill=is_prefill), atol=1e-5, rtol=1e-5)
    assert ours.abs().min() > 0


def test_a_token_without_an_adapter_gets_nothing_added() -> None:
    from serve_apps.engines.vllm.cpu import GroupedAdapters

    both, alone = added(GroupedAdapters, [0, 12, 0]), added(GroupedAdapters, [12, 12, 12])
    assert not both[[0, 2]].any()
    torch.testing.assert_close(both[1], alone[1])
    assert not added(GroupedAdapters, [0, 0]).any()


def test_an_output_is_added_to_and_can_be_written_over() -> None:
    from vllm.lora.layers import LoRAMapping

    from serve_apps.engines.vllm.cpu import GroupedAdapters

    _, expand = layer(0)
    for adapters in ((12, 12), (11, 12)):
        wrapper = GroupedAdapters(64, 64, "cpu")
        wrapper.update_metadata(LoRAMapping(adapters, adapters, is_prefill=True), [11, 12, 13], SLOTS, 100)
        x, before = torch.ones(2, RANK), torch.ones(2, SLICES[0])
        product = torch.stack([expand[0][slot - 11, 0].sum(1) for slot in adapters])
        for add_inputs, expected in ((True, before + product), (False, product)):
            y = before.clone()
            wrapper.add_expand(y, (x,), expand[:1], SLICES[:1], add_inputs=add_inputs)
            torch.testing.assert_close(y, expected)

"""What Troupe reads and changes inside vLLM beyond its documentation is there in the vLLM that is installed."""

from __future__ import annotations

import importlib
import inspect

import pytest

pytestmark = pytest.mark.test

ATTRIBUTES = {
    # inside.py
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("reload_weights", "get_model"),
    "vllm.model_executor.layers.utils": ("dispatch_cpu_unquantized_gemm",),
    "vllm.platforms:current_platform": ("is_cpu", "get_punica_wrapper"),
    "vllm.v1.sample.logits_processor:LogitsProcessor": ("apply", "is_argmax_invariant", "update_state"),
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer": ("num_output_tokens",),
    # cpu.py
    "vllm.v1.core.sched.interface:PauseState": ("PAUSED_ALL", "UNPAUSED"),
    "vllm.v1.core.sched.scheduler:Scheduler": ("schedule", "add_request"),
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU": (
        "_apply_shrink",
        "_apply_expand",
        "update_metadata",
        "token_lora_indices",
    ),
    "vllm.v1.worker.cpu_worker:CPUWorker": ("load_model",),
    # engine.py
    "vllm.v1.engine.async_llm:AsyncLLM": (
        "collective_rpc",
        "update_weight_version",
        "pause_generation",
        "resume_generation",
        "add_lora",
        "remove_lora",
        "sleep",
        "wake_up",
        "check_health",
        "shutdown",
    ),
    # messages.py
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages": (
        "to_chat_completion_request",
        "messages_full_converter",
        "message_stream_converter",
    ),
    # parsers.py
    "vllm.tool_parsers:ToolParserManager": ("list_registered", "get_tool_parser"),
    "vllm.tool_parsers.structural_tag_registry": ("get_model_structural_tag", "limit_to_single_tool_call"),
    "vllm.reasoning:ReasoningParserManager": ("list_registered", "get_reasoning_parser"),
}
SET_IN_CODE = {
    "vllm.v1.engine.output_processor": ("self.request_states", "self.external_req_id", "self.is_prefilling"),
    "vllm.v1.engine.async_llm": ("self.output_processor",),
    "vllm.v1.core.sched.scheduler": ("self._pause_state", "self.max_num_running_reqs"),
}
"""Attributes of instances, which their modules set."""


@pytest.mark.parametrize("place", ATTRIBUTES)
def test_what_is_used_of_vllm_is_there(place: str) -> None:
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    owner = getattr(found, name) if name else found
    assert [attribute for attribute in ATTRIBUTES[place] if not hasattr(owner, attribute)] == []


@pytest.mark.parametrize("module", SET_IN_CODE)
def test_what_is_read_of_instances_is_set_by_vllm(module: str) -> None:
    source = inspect.getsource(importlib.import_module(module))
    assert [attribute for attribute in SET_IN_CODE[module] if attribute not in source] == []

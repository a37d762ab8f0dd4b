"""settings: serving settings, a model folder -> environment and arguments of a vLLM engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serve_apps.chat.tokenizer import TOKENIZER_FILE
from serve_apps.config import ServeConfig
from serve_apps.engines.port import AdapterRoom
from stores.weights.model_folder import num_known_rows

CPU_BLOCK_SIZE = 32
"""Tokens per block of the KV cache on a CPU: vLLM's own default there is 128, under which no short prompt is ever cached."""
SPIN_COUNT = "20000"
"""How often an OpenMP thread of an engine looks for work before it sleeps, about 0.2 ms. A step has hundreds of parallel parts
with less than that between them: threads that sleep at once gain next to nothing over one thread. Threads that spin for
milliseconds, as by default, stall an engine where something else computes, too."""
ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts as `max_lora_rank`."""
PADDED_ROWS = "serve_apps.engines.vllm.inside:PaddedRows"
"""The class by which engines leave out rows of the vocabulary that stand for no token."""
SCHEDULER = "serve_apps.engines.vllm.cpu.GatheringScheduler"
"""The scheduler of an engine on a CPU."""
ADAPTER_WORKER = "serve_apps.engines.vllm.cpu.AdapterWorker"
"""The worker of an engine on a CPU that serves adapters."""
LOGGING = Path(__file__).with_name("logging.json")
"""The change of the log levels that vLLM makes as an engine starts. It is an incremental one: vLLM's own configuration closes all
handlers of the process, Serve's among them, and a Serve controller that takes over stops the replicas whose handlers are closed.
vLLM's errors reach the handlers of the root logger."""


def engine_environment(config: ServeConfig, *, threads: int) -> dict[str, str]:
    """Returns the environment of a replica: no network, few logs, and on a CPU the thread count without pinning.

    vLLM's own pinning puts every engine on the same first core; unpinned engines share the cores with the trainers.
    """
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.gpus == 0:
        env |= {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCH_COMPILE_DISABLE": "1",  # saves 3 s in the first call, and the need for a compiler
        }
        if threads > 1:
            env["GOMP_SPINCOUNT"] = SPIN_COUNT
        if config.tensor_parallel_size == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # lets the engine core run its worker in its own process
    return env


def engine_arguments(config: ServeConfig, model: Path, adapters: AdapterRoom | None = None) -> dict[str, Any]:
    """Returns keyword arguments of `AsyncEngineArgs`; what `config.engine` sets wins."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        # Prompts and completions are tokens; a tokenizer is what the grammars of constrained answers are compiled for.
        "skip_tokenizer_init": not (model / TOKENIZER_FILE).is_file(),
        # Named, because vLLM's `auto` takes one backend per engine by the first constrained request, and then serves others by it.
        "structured_outputs_config": {"backend": "xgrammar"},
        "trust_remote_code": False,
        "disable_log_stats": True,
        "worker_extension_cls": "serve_apps.engines.vllm.inside.WeightsExtension",
        "generation_config": "vllm",
    }
    if config.gpus == 0:
        arguments |= {
            "enforce_eager": True,
            "scheduler_cls": SCHEDULER,
            "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
            # A seeded request whose prefill is cut into chunks rewinds its generator, which a CPU generator cannot:
            # the engine would die ("CPU Generator does not use offset").
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(8192, config.max_model_len, config.max_num_seqs),
        }
        if config.tensor_parallel_size == 1:
            arguments["distributed_executor_backend"] = "uni"
    elif config.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"  # the replica holds the GPUs; no Ray actors of vLLM's own
    if config.block_size != "auto":
        arguments["block_size"] = config.block_size
    elif config.gpus == 0:
        arguments["block_size"] = CPU_BLOCK_SIZE
    if adapters is not None:
        arguments |= _adapter_arguments(adapters)
        if config.gpus == 0:
            arguments["worker_cls"] = ADAPTER_WORKER
    arguments |= config.engine
    if num_known_rows(model) is not None:
        arguments["logits_processors"] = [PADDED_ROWS, *arguments.get("logits_processors", ())]
    return arguments


def _adapter_arguments(room: AdapterRoom) -> dict[str, Any]:
    """Returns the arguments for adapters.

    Layers that no adapter changes are left as they are. That keeps the output head whole, too: wrapped for adapters it
    takes one row per request, and the engine dies of a request for the logprobs of its prompt, which every proof is.
    """
    num_groups = len(room.model_groups)
    return {
        "enable_lora": True,
        "max_loras": num_groups,
        "max_cpu_loras": 2 * num_groups,  # while versions change, requests under way still need the old ones
        "max_lora_rank": next(rank for rank in ENGINE_RANKS if rank >= room.max_rank),
        "lora_target_modules": list(room.target_modules),
    }

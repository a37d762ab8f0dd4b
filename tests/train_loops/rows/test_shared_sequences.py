"""Workers that share sequences compute the logprobs and gradients of one that has them alone, each of them on a part of the tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from chained_samples import chained_samples
from tiny_policy import policy
from transformers import Qwen3Config, Qwen3ForCausalLM

from train_loops.engine.deepspeed_engine import join_workers
from train_loops.engine.logprobs import PolicyScorer
from train_loops.rows.batching import Batch, collate
from train_loops.rows.packed_attention import refuse_unshareable
from train_loops.rows.shared_sequences import SharedSequences, shared_sequences

pytestmark = pytest.mark.nightly

ROWS: list[tuple[int, ...]] = [(0, 1, 2), (7, 8), (9,), (10,)]
"""39 tokens packed, and 23 completions: no parts for two."""


def batches() -> dict[str, Batch]:
    samples = chained_samples()
    return {
        "padded": collate(samples, ROWS),
        "packed": collate(samples, ROWS, pack=True),
        "begun alike": collate(samples, ROWS, pack=True, share=True),
        "one row": collate(samples, ROWS[:1], pack=True),
        "empty": collate(samples, []),
    }


@dataclass(frozen=True)
class Computed:
    """Of one batch."""

    scores: torch.Tensor
    """[2, N]: logprobs and entropy."""
    gradient: torch.Tensor
    """Of all parameters, of a loss in which each token has another weight."""
    widths: tuple[int, ...]
    """Tokens per row that the model's layers saw."""


def computed(batch: Batch) -> Computed:
    scorer, widths = policy("qwen3", torch.float32, gradient_checkpointing=True), []
    scorer.model.get_decoder().register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    logprobs, entropy, _ = scorer(batch, with_entropy=True)
    weights = torch.arange(len(logprobs)).sin()
    (weights * logprobs + 0.1 * weights * entropy).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in scorer.parameters() if p.grad is not None])
    return Computed(torch.stack([logprobs, entropy]).detach(), gradient, tuple(widths))


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    place = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=4, timeout=timedelta(seconds=120))
    join_workers()
    shared, results = shared_sequences(2), {}
    for name, batch in batches().items():
        results[name] = computed(replace(batch, shared=shared))
        # What DeepSpeed does, for two replicas of two workers each.
        dist.all_reduce(results[name].gradient)
        results[name].gradient.div_(4)
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_logprobs_and_gradients_are_those_of_a_worker_alone(tmp_path: Path) -> None:
    mp.spawn(work, args=(tmp_path,), nprocs=4)
    alone = {name: computed(batch) for name, batch in batches().items()}
    for rank in range(4):
        for name, result in torch.load(tmp_path / f"{rank}.pt", weights_only=False).items():
            expected = alone[name]
            torch.testing.assert_close(result.scores, expected.scores, atol=1e-5, rtol=0, msg=f"{name} of {rank}")
            torch.testing.assert_close(
                result.gradient, expected.gradient, atol=1e-5, rtol=1e-4, msg=f"{name} of {rank}"
            )
            assert result.widths == tuple(-(-width // 2) for width in expected.widths), "a part of the tokens"


def test_models_that_cannot_share_are_refused() -> None:
    three: Any = object.__new__(SharedSequences)
    three.size = 3
    scorer = policy("qwen3", torch.float32)
    with pytest.raises(
        ValueError, match=r"sequence_parallel: 3 workers cannot share .*Qwen3.*: it has 4 attention heads"
    ):
        refuse_unshareable(scorer.model, three)
    windows = Qwen3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=4,
        use_sliding_window=True,
        max_window_layers=0,
    )
    with pytest.raises(ValueError, match="which would reach across rows"):
        refuse_unshareable(PolicyScorer(Qwen3ForCausalLM(windows)).model, three)

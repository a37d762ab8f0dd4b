"""warmstart: demonstrations -> a model folder trained on them, and a model folder -> version 0 of a model group.

    demonstrations --bucket by length--> batches --cross-entropy on completion tokens--> AdamW --> folder --adopt--> v0

One process and plain PyTorch: at this size DeepSpeed would add seconds of start-up and nothing else.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from math import cos, pi
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stores.weights.manifest import Probe
from stores.weights.model_folder import check_model_files
from stores.weights.store import WeightStore
from train_loops.config import DeepSpeedConfig, WarmstartConfig
from train_loops.engine.deepspeed_engine import load_policy
from train_loops.engine.export import export_layout, save_model
from train_loops.engine.logprobs import PolicyScorer, completion_logprobs, probe_logprobs
from train_loops.engine.tiny_model import PARAGRAPH, build_model, save_folder
from train_loops.rows.batching import Batch, collate_turns
from train_loops.signal.learning_rate import adamw

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from stores.types import ModelVersionRef

Demonstration = tuple[Sequence[int], Sequence[int]]
"""Prompt and completion token ids of one turn."""

BUCKET_BATCHES = 16
"""Rows are sorted by length among this many batches: little padding, and batches still differ in content."""
NUM_CHECKED = 4
"""Demonstrations whose logprobs are compared before a model learns."""
CHAT_TEMPLATES = "additional_chat_templates"
"""The only folder in a model's folder that transformers reads."""
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.onnx*", "*.tflite", "*.gguf")
"""Weights for other libraries, and the states of optimizers."""
MAX_DIFFERENCE = 1e-3
"""Nats between two float32 computations of one logprob. Both run over the same tokens on one machine, so that only the
order of their sums differs."""


def warmstart(
    demonstrations: Sequence[Demonstration],
    *,
    config: WarmstartConfig,
    seed: int,
    out: Path,
    model_folder: Path | None = None,
    tokenizer: Any = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> dict[str, float]:
    """Trains on completion tokens by cross-entropy, each token of all demonstrations alike, and writes a folder in Hugging Face layout to
    `out`.

    The learning rate rises over `optimizer.warmup_steps`, then falls to a tenth along a cosine.

    Args:
        demonstrations: one per turn.
        model_folder: the model to start from, with its tokenizer; None builds `config.tiny_model` for `tokenizer`.
        tokenizer: of the tiny model (see `tiny_model.build_tokenizer`).
        progress: called after each step with the step (from 1), the number of steps and the loss.

    Returns:
        Metrics `warmstart/<name>`: loss (mean of the last tenth of the steps), first_loss, steps, tokens (prompt and
        completion, of all epochs), completion_tokens, seconds, tokens_per_s.

    Raises:
        ValueError: no demonstrations, one that is empty, or neither folder nor tiny model.
    """
    rows = _checked(demonstrations)
    torch.set_num_threads(config.threads)
    model, tokenizer = _starting_model(config, model_folder, tokenizer, seed=seed)
    longest = max(len(p) + len(c) for p, c in rows)
    limit = model.config.get_text_config().max_position_embeddings
    if longest > limit:
        raise ValueError(f"a demonstration has {longest} tokens but the model takes {limit}: raise max_position")
    scorer = PolicyScorer(model.eval())
    _check_scores(scorer, make_probe(model, [[*prompt, *completion] for prompt, completion in rows[:NUM_CHECKED]]))
    scorer.train()
    batches = list(_batches(rows, config=config, seed=seed))
    started, losses, num_tokens, num_targets = time.perf_counter(), [], 0, 0
    for step, (batch, loss) in enumerate(_steps(scorer, rows, batches, config=config), 1):
        losses.append(loss)
        num_tokens += batch.num_tokens
        num_targets += len(batch.targets)
        if not np.isfinite(loss):
            raise ValueError(f"warm start: loss {loss} at step {step}; lower warmstart.optimizer.lr")
        if progress is not None:
            progress(step, len(batches), loss)
    seconds = time.perf_counter() - started
    if model_folder is None:
        save_folder(model.eval(), tokenizer, out)
    else:
        save_model(model.eval(), out, source=Path(model_folder))
        tokenizer.save_pretrained(out)
    return {
        "warmstart/loss": float(np.mean(losses[-max(len(losses) // 10, 1) :])),
        "warmstart/first_loss": losses[0],
        "warmstart/steps": float(len(losses)),
        "warmstart/tokens": float(num_tokens),
        "warmstart/completion_tokens": float(num_targets),
        "warmstart/seconds": seconds,
        "warmstart/tokens_per_s": num_tokens / seconds,
    }


def _steps(
    scorer: PolicyScorer, rows: Sequence[Demonstration], batches: Sequence[list[int]], *, config: WarmstartConfig
) -> Iterator[tuple[Batch, float]]:
    """Makes the optimizer steps; yields each batch with its mean loss per completion token."""
    optimizer = adamw(scorer.parameters(), config.optimizer)
    # Batches hold rows of about one length. Divided by its own number of targets, a batch of short completions would weigh each of its
    # tokens more than others do, and the model would say the short ones more often than the demonstrations.
    mean_targets = sum(len(completion) for _, completion in rows) / len(rows) * config.batch_turns
    for step, picked in enumerate(batches, 1):
        batch = collate_turns([rows[i] for i in picked])
        for group in optimizer.param_groups:
            group["lr"] = config.optimizer.lr * _factor(step, len(batches), config.optimizer.warmup_steps)
        loss = -completion_logprobs(scorer, batch).sum()
        (loss / mean_targets).backward()
        torch.nn.utils.clip_grad_norm_(scorer.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield batch, loss.item() / len(batch.targets)


def adopt(
    folder: Path,
    *,
    store: WeightStore,
    model_group: str,
    run_id: str,
    sequences: Sequence[Sequence[int]] | None = None,
    note: str = "",
) -> ModelVersionRef:
    """Commits an existing folder in Hugging Face layout as version 0 of `model_group`, without `_what_no_version_needs`.

    Args:
        sequences: token ids by which the version is recognised after a weight sync; None takes a plain text.

    Raises:
        ValueError: the folder lacks config, tokenizer or safetensors; its files do not fit together, or ask for code of their
            own; it stores a head of its own beside a config that says it is the input embeddings: trainer and engine
            would each take another one; or the trainer cannot load, score or export the model.
    """
    path = Path(folder)
    lacking = [
        what
        for what, pattern in (
            ("config.json", "config.json"),
            ("a tokenizer (tokenizer.json or tokenizer_config.json)", "tokenizer*.json"),
            ("safetensors", "*.safetensors"),
        )
        if not any(path.glob(pattern))
    ]
    if lacking:
        raise ValueError(
            f"{folder} is no model folder: it lacks {' and '.join(lacking)}; give a folder in Hugging Face layout "
            "(save_pretrained of model and tokenizer)"
        )
    check_model_files(path)
    model = _load_model(path).eval()
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if getattr(model.config, "tie_word_embeddings", False) and not is_tied:
        raise ValueError(
            f"{folder}: config.json has tie_word_embeddings = true, but the weights hold an output head that differs from "
            "the input embeddings: set it to false, or remove the head's tensor"
        )
    probe = make_probe(model, sequences if sequences is not None else probe_sequences(path))
    del model
    _check_training(path, probe)
    with tempfile.TemporaryDirectory(prefix="troupe-adopt-") as links:
        shutil.copytree(
            path.resolve(), links, ignore=_what_no_version_needs, copy_function=os.symlink, dirs_exist_ok=True
        )
        return store.commit(
            links,
            model_group=model_group,
            version=0,
            parent=None,
            run_id=run_id,
            iteration=0,
            probe=probe,
            note=note or f"adopted from {path.name}",
        )


def _what_no_version_needs(folder: str, names: list[str]) -> set[str]:
    """Names what is no part of a model in its folder: a clone's `.git`, the same weights for other libraries, a training's checkpoints.

    All versions to come would hold a copy of it.
    """
    folders = {name for name in names if name != CHAT_TEMPLATES and Path(folder, name).is_dir()}
    return folders | shutil.ignore_patterns(*OTHER_WEIGHTS)(folder, names)


def make_probe(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Probe:
    """Computes `model`'s logprobs of fixed token sequences, in float32 by a plain forward pass.

    After a weight sync the engine must answer the same sequences with the same logprobs: that proves which weights it holds.
    """
    logprobs = []
    with torch.no_grad():
        for ids in sequences:
            logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, :-1].float()
            targets = torch.tensor(list(ids[1:]))[:, None]
            logprobs.append(tuple(logits.log_softmax(-1).gather(1, targets)[:, 0].tolist()))
    return Probe(sequences=tuple(tuple(int(i) for i in ids) for ids in sequences), logprobs=tuple(logprobs))


def probe_sequences(folder: str | Path, *, num_sequences: int = 4, length: int = 32) -> list[list[int]]:
    """Returns token ids of plain text, cut into sequences of `length` tokens, the same ones at every call.

    Tokens without meaning would do for float32 alone. Their logprobs are so low that an engine in bfloat16 rounds them by
    up to 1.4 nats, and those of text by 0.2 (SmolLM2-135M-Instruct).
    """
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)(PARAGRAPH)["input_ids"]
    sequences = [ids[begin : begin + length] for begin in range(0, len(ids) - 1, length)]
    return [sequence for sequence in sequences[:num_sequences] if len(sequence) > 1]


def _check_training(folder: Path, probe: Probe) -> None:
    """Raises ValueError where the trainer could not load the model, score its tokens right, or export it."""
    try:
        policy = load_policy(folder, DeepSpeedConfig()).eval()
        _check_scores(policy, probe)
    except Exception as error:  # whatever its code for one of hundreds of families makes of it
        raise ValueError(
            f"{folder} cannot be trained, take another base model: {type(error).__name__}: {error}"
        ) from error
    export_layout(policy.model, folder)


def _check_scores(policy: PolicyScorer, probe: Probe) -> None:
    """Raises ValueError where the scorer's logprobs are not the model's own: some scale their logits, or cap them."""
    scored = probe_logprobs(policy, probe.sequences)
    pairs = zip(chain.from_iterable(scored), chain.from_iterable(probe.logprobs), strict=True)
    difference = max((abs(ours - own) for ours, own in pairs), default=0.0)
    if not difference <= MAX_DIFFERENCE:
        raise ValueError(
            f"logprobs of {type(policy.model).__name__} are not those of head(hidden), which is trained: they differ by {difference:.2g} nats"
        )


def _checked(demonstrations: Sequence[Demonstration]) -> list[Demonstration]:
    if not demonstrations:
        raise ValueError("warm start: no demonstrations; the demonstrator made none")
    for i, (prompt, completion) in enumerate(demonstrations):
        if not prompt or not completion:
            raise ValueError(
                f"demonstration {i} has {len(prompt)} prompt and {len(completion)} completion tokens; each needs one"
            )
    return list(demonstrations)


def _starting_model(
    config: WarmstartConfig, model_folder: Path | None, tokenizer: Any, *, seed: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if model_folder is not None:
        from transformers import AutoTokenizer

        return _load_model(model_folder), tokenizer or AutoTokenizer.from_pretrained(
            model_folder, trust_remote_code=False
        )
    if config.tiny_model is None or tokenizer is None:
        raise ValueError("warm start: give a model folder, or warmstart.tiny_model and its tokenizer")
    return build_model(config.tiny_model, tokenizer, seed=seed), tokenizer


def _load_model(folder: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)


def _batches(rows: Sequence[Demonstration], *, config: WarmstartConfig, seed: int) -> Iterator[list[int]]:
    """Yields the row indices of every step of every epoch."""
    random = np.random.default_rng(seed)
    lengths = np.array([len(p) + len(c) for p, c in rows])
    bucket = config.batch_turns * BUCKET_BATCHES
    for _ in range(config.num_epochs):
        order = random.permutation(len(rows))
        # Each bucket of some batches is sorted by length, so that rows of about one length are padded together.
        sorted_rows = np.concatenate(
            [
                part[np.argsort(lengths[part], kind="stable")]
                for part in np.split(order, range(bucket, len(rows), bucket))
            ]
        )
        cuts = np.split(sorted_rows, range(config.batch_turns, len(rows), config.batch_turns))
        yield from (cuts[i].tolist() for i in random.permutation(len(cuts)))


def _factor(step: int, num_steps: int, warmup_steps: int) -> float:
    """Returns the factor of the learning rate at `step` (from 1): it rises linearly, then falls as a cosine from 1 to 0.1."""
    warmup_steps = min(warmup_steps, num_steps // 4)  # a short training would end in its warm-up
    if step <= warmup_steps:
        return step / warmup_steps
    return 0.55 + 0.45 * cos(pi * (step - warmup_steps) / max(num_steps - warmup_steps, 1))

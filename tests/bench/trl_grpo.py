"""The peer of `against_trl`: TRL's GRPOTrainer, run by the interpreter of its own environment.

    python -P trl_grpo.py SETTINGS_JSON    prints a line `@@peer {"seconds": [s per iteration]}`

One iteration samples `num_completions`, scores them and takes `num_minibatches` optimizer steps, one epoch.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def letter_share(text: str) -> float:
    """As in `credit`, which this environment cannot import."""
    return sum(c in "abcdefghijklm01234" for c in text) / max(len(text), 1)


def reward_letters(completions: list[Any], **columns: Any) -> list[float]:
    """The reward function."""
    return [letter_share(completion[0]["content"]) for completion in completions]


class Clock(TrainerCallback):
    """When each optimizer step began and ended; sampling happens within the first of an iteration."""

    def __init__(self) -> None:
        self.began: list[float] = []
        self.ended: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Before sampling."""
        self.began.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """After the optimizer step."""
        self.ended.append(time.perf_counter())


def main() -> None:
    """Trains and prints seconds per iteration."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    per_step = settings["num_completions"] // settings["num_minibatches"]
    num_steps = settings["num_iterations"] * settings["num_minibatches"]
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(settings["model"]),
            reward_funcs=reward_letters,
            train_dataset=Dataset.from_list(
                [{"prompt": [{"role": "user", "content": prompt}]} for prompt in settings["prompts"]]
            ),
            args=GRPOConfig(
                output_dir=scratch,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=per_step,
                gradient_accumulation_steps=1,
                steps_per_generation=settings["num_minibatches"],
                num_generations=settings["group_size"],
                max_completion_length=settings["max_tokens"],
                num_iterations=1,
                max_steps=num_steps,
                learning_rate=settings["lr"],
                lr_scheduler_type="constant",
                weight_decay=0.0,
                max_grad_norm=1.0,
                beta=0.0,
                temperature=1.0,
                loss_type="dapo",
                dataloader_pin_memory=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=0,
            ),
            callbacks=[clock],
        )
        trainer.train()
    size = settings["num_minibatches"]
    seconds = [clock.ended[i + size - 1] - clock.began[i] for i in range(0, num_steps, size)]
    print("@@peer " + json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()

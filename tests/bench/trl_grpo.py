"""The peer of `against_trl`: TRL's GRPOTrainer, run by the interpreter of its own environment.

    python -I trl_grpo.py SETTINGS_JSON    per line of its input one iteration, then a line `@@peer {"seconds": s}`

One iteration samples `num_completions`, scores them and takes `num_minibatches` optimizer steps, one epoch. The lines
are those of `tests.bench.peer`, which this environment cannot import.
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


class Turns(TrainerCallback):
    """Waits before the first optimizer step of an iteration, in which TRL samples, and answers after its last one."""

    def __init__(self, steps_per_iteration: int) -> None:
        self._size = steps_per_iteration
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Waits for a question; ends the program where there is none to come."""
        if state.global_step % self._size == 0:
            if not sys.stdin.readline():
                raise SystemExit(0)
            self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Answers it."""
        if state.global_step % self._size == 0:
            print("@@peer " + json.dumps({"seconds": time.perf_counter() - self._began}), flush=True)


def main() -> None:
    """Trains as long as it is asked to."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    per_step = settings["num_completions"] // settings["num_minibatches"]
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
                max_steps=settings["max_iterations"] * settings["num_minibatches"],
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
            callbacks=[Turns(settings["num_minibatches"])],
        )
        trainer.train()


if __name__ == "__main__":
    main()

"""setting: what several benchmarks stand on: runs in the demo's shape, and a model of 100M parameters."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.config.run_config import load_config
from pipelines.run.run import Run

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "infra" / "runs" / "demo.yaml"
VOCABULARY_100M = 32_000
SHAPE_100M = {
    "hidden_size": 640,
    "intermediate_size": 1920,
    "num_layers": 16,
    "num_heads": 10,
    "num_kv_heads": 5,
    "head_dim": 64,
    "max_position": 512,
    "vocab_size": VOCABULARY_100M,
}
"""99M parameters, 20M of them the (tied) embeddings."""
SHORT_WARMSTART = {"warmstart.num_demonstrations": 600, "warmstart.num_epochs": 3}
"""Enough for completions that look as they do in the demo's first iterations."""


def open_run(name: str, folder: Path, changes: Mapping[str, Any]) -> Run:
    """A run of the demo's config with `changes` (dotted keys), kept below `folder`; opened."""
    run = Run(load_config(DEMO, {"run": name, "storage": {"root": str(folder)}, **changes}))
    run.open()
    return run


def build_100m(folder: Path) -> Path:
    """An untrained Qwen3-shaped model of 100M parameters with a vocabulary of 32,000, in Hugging Face layout.

    The tokenizer knows the words of the math chain; made-up words fill it up, so that sampled text is words too.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from serve_apps.workflows.math_chain import MathChain
    from train_loops.config import TinyModelConfig
    from train_loops.engine.tiny_model import CHAT_TEMPLATE, END, PAD, build_model, build_tokenizer, save_folder

    small = build_tokenizer([*MathChain().prompts.values(), "user\nassistant\n12+3*45-6/7=890"], vocab_size=600)
    data = json.loads(small.backend_tokenizer.to_str())
    vocabulary = data["model"]["vocab"]
    tags = [token["content"] for token in data["added_tokens"] if token["id"] >= len(vocabulary)]
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < len(vocabulary)]
    letters, rng = "abcdefghijklmnopqrstuvwxyz", random.Random(0)
    while len(vocabulary) < VOCABULARY_100M - len(tags):
        word = "Ġ" + "".join(rng.choices(letters, k=rng.randint(3, 8)))
        vocabulary.setdefault(word, len(vocabulary))
    grown = Tokenizer.from_str(json.dumps(data))
    grown.add_tokens(tags)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=grown, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = CHAT_TEMPLATE
    return save_folder(build_model(TinyModelConfig(**SHAPE_100M), tokenizer, seed=0), tokenizer, folder)  # type: ignore[arg-type]


def pretrained() -> Path | None:
    """Returns the folder of SmolLM2-135M-Instruct in float32; None, with a line on how to get it, where it is missing."""
    folder = Path("models/smollm2")
    if (folder / "config.json").is_file():
        return folder.resolve()
    print(f"SmolLM2 is left out: make {folder} with `troupe model get smollm2 {folder}`", flush=True)
    return None

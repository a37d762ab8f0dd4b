"""tiny_model: a shape and some texts -> a model folder (Qwen3 or Llama) with its own tokenizer and chat template.

For laptops, tests and the demo. The folder has the layout of any Hugging Face model, so nothing downstream knows
that it is tiny.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from train_loops.config import TinyModelConfig

ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
"""Config and model class by `TinyModelConfig.architecture`; both take the same settings."""


PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\nTools:' }}"
    "{% for t in tools %}{{ '\\n' + t['function'] | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}"
    "{{ '<tool_call>' + {'name': c['function']['name'], 'arguments': c['function']['arguments']} | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A short form of Qwen's template: tools stand before the messages, and calls have Hermes' form."""
PARAGRAPH = (
    "The sun had just gone down behind the hills when the two children came home from school. Their mother was in the kitchen, "
    "and the smell of fresh bread filled the whole house. They put their bags on the floor, washed their hands, and sat down at "
    "the table. While they were eating, they told her about the new teacher, who had come from a small town near the sea."
)
"""Plain English, written for Troupe."""


def build_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE in which every digit and every XML-like tag is one token.

    Args:
        texts: the vocabulary is learned from them.
        vocab_size: upper bound of the vocabulary, special tokens included.
    """
    texts = list(texts)
    tags = sorted({tag for text in texts for tag in _tags(text)})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|[^\w\s]|\n| ?[^\W\d]+|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocab_size - len(tags), 300),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(tags)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _tags(text: str) -> list[str]:
    return re.findall(r"</?[A-Z_]+>", text)


def build_model(shape: TinyModelConfig, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> PreTrainedModel:
    """Builds an untrained float32 model for `tokenizer`; the same seed gives the same weights."""
    config_class, model_class = ARCHITECTURES[shape.architecture]
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=shape.hidden_size**-0.5,
        dtype="float32",
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = model_class(config)
    torch.random.set_rng_state(state)  # the caller's random numbers do not depend on this
    return model


def save_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> Path:
    """Writes weights, config, tokenizer and chat template in Hugging Face layout."""
    path = Path(folder)
    model.save_pretrained(path, safe_serialization=True)
    tokenizer.save_pretrained(path)
    settings = path / "tokenizer_config.json"
    data = json.loads(settings.read_text())
    data["chat_template"] = CHAT_TEMPLATE
    settings.write_text(json.dumps(data, indent=2))
    return path

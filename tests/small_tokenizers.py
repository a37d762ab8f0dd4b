"""Small tokenizers with the parts and the chat templates of Qwen, Llama 3, Gemma, Mistral and DeepSeek, as model folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [
    "You are a helpful assistant. Compute the sum of two numbers and say the answer.",
    '{"name": "add", "arguments": {"a": 1, "b": 2}} <ANSWER>13</ANSWER> user assistant system tool model',
    "im_start im_end start_of_turn end_of_turn begin_of_text eot_id start_header_id INST TOOL_CALLS \n\n  \t<think> </think>",
]


def template_of(family: str) -> str:
    """The chat template that models of a family are published with, shortened."""
    return (Path(__file__).with_name("chat_templates") / f"{family}.jinja").read_text()


QWEN = template_of("qwen")
NO_THOUGHT = "<think>\n\n</think>\n\n"
SWITCH = "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
"""The end of Qwen3's template, by which a caller turns thinking off."""
FAMILIES = ("qwen", "llama", "gemma", "mistral", "deepseek")


def build(family: str, folder: Path) -> Path:
    """Writes tokenizer, template and configs of a family into `folder`."""
    make = {"qwen": _qwen, "llama": _llama, "gemma": _gemma, "mistral": _mistral, "deepseek": _deepseek}[family]
    tokenizer, settings, ends = make()
    return write(folder, tokenizer, template_of(family), settings, ends)


def write(folder: Path, tokenizer: Tokenizer, template: str, settings: dict[str, Any], ends: dict[str, Any]) -> Path:
    """Writes a folder. Args: ends: `eos_token_id` by the name of a config."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings})
    )
    for name in ("config", "generation_config"):
        (folder / f"{name}.json").write_text(json.dumps({"eos_token_id": ends.get(name)}))
    return folder


def byte_level(special: list[str], added: tuple[str, ...] = (), **settings: Any) -> Tokenizer:
    """A byte-level BPE whose special tokens come after its vocabulary, as Qwen's and Llama's do."""
    tokenizer = Tokenizer(models.BPE(**settings))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"),
                behavior="isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
    return tokenizer


def sentence_pieces(special: list[str], *, prepend: str) -> Tokenizer:
    """A BPE on whole text with byte fallback, whose special tokens stand in its vocabulary, as Gemma's and Mistral's do."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if prepend == "never":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prepend, split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *special], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    data = json.loads(tokenizer.to_str())
    vocabulary = data["model"]["vocab"]
    for piece in fallback:
        vocabulary.setdefault(piece, len(vocabulary))
    return Tokenizer.from_str(json.dumps(data))


def _qwen() -> Any:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"]
    tags = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    tokenizer = byte_level(special, tags)
    end = tokenizer.token_to_id("<|endoftext|>")
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return tokenizer, settings, {"config": end, "generation_config": end}


def _llama() -> Any:
    names = ["begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag"]
    tokenizer = byte_level([f"<|{name}|>" for name in names], ignore_merges=True)
    ends = [tokenizer.token_to_id(text) for text in ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")]
    settings = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    return tokenizer, settings, {"config": ends, "generation_config": ends}


def _gemma() -> Any:
    tokenizer = sentence_pieces(["<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], prepend="never")
    eos = tokenizer.token_to_id("<eos>")
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    both = [eos, tokenizer.token_to_id("<end_of_turn>")]
    return tokenizer, settings, {"config": eos, "generation_config": both}


def _mistral() -> Any:
    names = ["INST", "/INST", "TOOL_CALLS", "AVAILABLE_TOOLS", "/AVAILABLE_TOOLS", "TOOL_RESULTS", "/TOOL_RESULTS"]
    tokenizer = sentence_pieces(["<s>", "</s>", *(f"[{name}]" for name in names)], prepend="first")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return tokenizer, settings, {"config": tokenizer.token_to_id("</s>")}


def _deepseek() -> Any:
    special = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
    plain = (
        "<｜User｜>",
        "<｜Assistant｜>",
        "<think>",
        "</think>",
        "<｜tool▁outputs▁begin｜>",
        "<｜tool▁outputs▁end｜>",
    )
    settings = {"bos_token": special[0], "eos_token": special[1], "pad_token": special[1]}
    return byte_level(special, plain), settings, {}

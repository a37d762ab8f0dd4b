"""folder: a model folder -> what is wrong with its files, read without torch: config, weights, tokenizer and chat template."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stores.weights.loading import can_load
from stores.weights.model_folder import check_model_files, vocabulary_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFolder:
    """A folder in which nothing was found wrong."""

    shape: dict[str, Any]
    """Its config.json, with the values of `text_config` beside the others."""
    notes: list[str]
    """What is worth knowing, and what could not be looked at here."""


def check_model_folder(folder: Path) -> CheckedFolder:
    """Checks what an engine and a trainer need of a folder; ValueError names the file and the fix of the first fault."""
    if not folder.is_dir():
        raise ValueError(f"folder {folder} does not exist")
    for name, what in (("config.json", "model config"), ("tokenizer.json", "tokenizer")):
        if not (folder / name).is_file():
            raise ValueError(f"folder {folder} has no {what} ({name}): save it beside the weights")
    notes: list[str] = []
    shape = check_model_files(folder)
    if not can_load():
        notes.append(
            f"which tensors a model of type {shape['model_type']} needs was not looked at, because transformers is not installed: "
            "only sizes and the number of layers were compared with config.json"
        )
    text = shape.get("text_config")
    shape |= text if isinstance(text, dict) else {}
    vocabulary = vocabulary_rows(folder)
    if vocabulary is not None and vocabulary.num_padded:
        notes.append(
            f"{vocabulary.num_padded} of {vocabulary.num_rows} rows of the vocabulary stand for no token: they are "
            "masked when turns are sampled and trained on"
        )
    if all(find_spec(name) is not None for name in ("tokenizers", "jinja2")):
        from serve_apps.chat.chat_files import check_chat_files  # needs tokenizers

        notes += check_chat_files(folder, vocab_size=shape.get("vocab_size"))
    else:
        notes.append("tokenizer and chat template were not looked at: tokenizers or jinja2 is not installed")
    return CheckedFolder(shape=shape, notes=notes)

"""chat_files: a model folder -> what is wrong with its tokenizer and chat template, read without torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_apps.end_tokens import configured_end_ids
from serve_apps.template_process import TemplateFault, render
from stores.files import read_json_object

TEMPLATE = "chat_template.jinja"
QUESTION = "Question-2"
EXCHANGE = (
    {"role": "user", "content": "Question-1"},
    {"role": "assistant", "content": "Answer-1"},
    {"role": "user", "content": QUESTION},
)
"""A plain conversation, which every template has to write."""
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALLED = (
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "tool_call_id": "call00001", "content": "1"},
)
"""A call of a tool and its answer."""


def check_chat_files(folder: Path, *, vocab_size: int | None = None) -> None:
    """Loads the tokenizer and renders the chat template once; ValueError for the first thing that is wrong.

    Args:
        vocab_size: rows of the embeddings, which every token of a prompt needs; None where the config names none.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"folder {folder} has no tokenizer (tokenizer.json): save it beside the weights")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises no other, and it is raised again in words
        raise ValueError(f"{file} is no tokenizer ({error}): copy it from the model's source") from None
    if not tokenizer.get_vocab_size():
        raise ValueError(f"{file} has an empty vocabulary: copy it from the model's source")
    settings = folder / "tokenizer_config.json"
    named = special_tokens(read_json_object(settings)) if settings.is_file() else {}
    place, template = read_template(folder)
    text = _rendered(place, template, named)
    ends = [*configured_end_ids(folder)]
    if eos := named.get("eos_token"):
        number = tokenizer.token_to_id(eos)
        if number is None:
            raise ValueError(f"{settings}: eos_token {eos!r} is not in {file.name}: name one of its tokens")
        ends.append(number)
    if not ends:
        raise ValueError(
            f"folder {folder} names no end token, so that every turn would run to max_tokens: set eos_token in {settings.name}, or "
            "eos_token_id in generation_config.json"
        )
    tokenizer.no_truncation()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not ids:
        raise ValueError(f"{file} has no token for any of {QUESTION!r}: copy it from the model's source")
    if vocab_size is not None and (beyond := [number for number in (*ids, *ends) if number >= vocab_size]):
        word = tokenizer.id_to_token(beyond[0])
        raise ValueError(
            f"{file} gives {word!r} the id {beyond[0]}, but config.json says vocab_size = {vocab_size}, so that the model has no row for it: "
            "resize the embeddings, or take the tokenizer that belongs to the weights"
        )


def read_template(folder: Path) -> tuple[Path, str]:
    """Returns the file with the chat template, and the template; ValueError where there is none."""
    file, settings = folder / TEMPLATE, folder / "tokenizer_config.json"
    template: Any = None
    if file.is_file():
        try:
            template = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is not UTF-8 (byte {error.start}): save it so, or copy it from the model's source"
            ) from None
    elif settings.is_file():
        file = settings
        template = read_json_object(settings).get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
    if not isinstance(template, str) or not template.strip():
        raise ValueError(
            f"folder {folder} has no chat template: add {TEMPLATE}, as the model's source or its family has it"
        )
    return file, template


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the named tokens of a tokenizer_config.json, like `eos_token`."""
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in settings.items()}
    return {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str)}


def _rendered(file: Path, template: str, named: Mapping[str, str]) -> str:
    """Returns a plain conversation as the template writes it. With tools, or without a last header, it has to end as well."""
    plain: dict[str, Any] = {
        "messages": EXCHANGE,
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        **named,
    }
    others: list[Mapping[str, Any]] = [
        {**plain, "add_generation_prompt": False},
        {**plain, "messages": [*EXCHANGE[:1], *CALLED], "tools": [TOOL]},
    ]
    try:
        (text,) = render(template, [plain], may_refuse=others)
    except TemplateFault as fault:
        line = f", line {fault.line}" if fault.line else ""
        raise ValueError(
            f"{file}{line}: the chat template fails on a plain conversation (user, assistant, user): {fault}; correct it, or copy it from "
            "the model's source"
        ) from None
    if QUESTION not in text:
        raise ValueError(
            f"{file}: the chat template leaves out what the user says (it wrote {text[:60]!r}): copy it from the model's source"
        )
    return text

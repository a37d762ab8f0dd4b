"""chat_files: a model folder -> what is wrong with its tokenizer and chat template, read without torch or transformers.

A template has to write all of a conversation, in order, and ends it with the header of the assistant's answer where that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serve_apps.chat.template_process import TemplateFault, render
from serve_apps.chat.tokenizer import configured_end_ids
from stores.files import read_json_object

TEMPLATE = "chat_template.jinja"
SYSTEM = {"role": "system", "content": "System-0"}
FIRST, ANSWER, QUESTION = "Question-1", "Answer-1", "Question-2"
ARGUMENT, RESULT = "Argument-1", "Result-1"
EXCHANGE = (
    {"role": "user", "content": FIRST},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": QUESTION},
)
"""A plain conversation, which every template has to write."""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "description": "Adds-1", "parameters": {"type": "object"}},
}
CALLED = (
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": ARGUMENT}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call00001", "content": RESULT},
)
"""A call of a tool and its answer."""
TEXTS = {
    SYSTEM["content"]: "the system message",
    FIRST: "what the user says first",
    ANSWER: "what the assistant says",
    QUESTION: "what the user says last",
    ARGUMENT: "the arguments of a tool's call",
    RESULT: "what a tool answers",
}
"""What each text of a conversation is."""


def check_chat_files(folder: Path, *, vocab_size: int | None = None) -> list[str]:
    """Loads the tokenizer and renders the chat template; returns notes on what the template does not know.

    Raises ValueError for the first thing that is wrong.

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
    text, notes = _rendered(place, template, named)
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
    return notes


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


def _rendered(file: Path, template: str, named: Mapping[str, str]) -> tuple[str, list[str]]:
    """Returns a plain conversation as the template writes it, and notes on what it does not know.

    ValueError where it fails on it or leaves out a part of it. A system message and tools it may refuse, but not leave out in
    silence; how calls are written some published templates leave to the program, so that it is a note.
    """
    plain: dict[str, Any] = {
        "messages": EXCHANGE,
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        **named,
    }
    instructed = {**plain, "messages": [SYSTEM, *EXCHANGE]}
    others: list[Mapping[str, Any]] = [
        {**plain, "add_generation_prompt": False},
        instructed,
        {**instructed, "add_generation_prompt": False},
        {**plain, "messages": [*EXCHANGE[:1], *CALLED], "tools": [TOOL]},
    ]
    try:
        text, (past, with_system, past_with_system, with_tools) = render(template, plain, may_refuse=others)
    except TemplateFault as fault:
        line = f", line {fault.line}" if fault.line else ""
        raise ValueError(
            f"{file}{line}: the chat template fails on a plain conversation (user, assistant, user): {fault}; correct it, or copy it from "
            "the model's source"
        ) from None
    spoken = (FIRST, ANSWER, QUESTION)
    wrong = _wrong(text, past, spoken)
    if not wrong and with_system is not None:
        wrong = _wrong(with_system, past_with_system, (SYSTEM["content"], *spoken))
    if wrong:
        raise ValueError(f"{file}: the chat template {wrong}; correct it, or copy it from the model's source")
    notes = [] if with_system is not None else [f"{file.name} refuses a system message: no agent can have one"]
    if with_tools is not None and TOOL["function"]["description"] in with_tools:
        notes += [
            f"{file.name} leaves out {TEXTS[text]}, though it shows tools: later prompts lack it"
            for text in (ARGUMENT, RESULT)
            if text not in with_tools
        ]
    return text, notes


def _wrong(prompt: str, past: str | None, spoken: Sequence[str]) -> str:
    """Returns what a template does wrong with a conversation; empty where nothing is.

    Args:
        prompt: what it writes with a header for the assistant's answer.
        past: what it writes without one, None where it refuses. It may end in another way, as Phi 3's does.
        spoken: the texts of the messages. That of the system may stand anywhere, as Mistral's does.
    """
    for text in spoken:
        if text not in prompt:
            return f"leaves out {TEXTS[text]} (it wrote {prompt[:200]!r})"
    places = [prompt.index(text) for text in spoken if text != SYSTEM["content"]]
    if places != sorted(places):
        return f"changes the order of the messages (it wrote {prompt[:200]!r})"
    conversation, _, header = prompt.partition(QUESTION)
    if past is None:
        return ""
    if not past.startswith(conversation + QUESTION):
        return f"writes another conversation where add_generation_prompt is false ({past[:200]!r})"
    before_answer = prompt.partition(FIRST)[2].partition(ANSWER)[0]
    if prompt == past and not header.strip().startswith(before_answer.strip()):
        return (
            f"writes no header for the assistant's answer where add_generation_prompt is true (it ends with {header!r}; before an "
            f"earlier answer stands {before_answer!r})"
        )
    return ""

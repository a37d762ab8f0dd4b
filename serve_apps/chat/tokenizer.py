"""tokenizer: chat messages -> token ids and back, for one model folder. Loads without torch.

Content makes no control token, whatever it says: only what the chat template writes itself does (see `control_tokens`).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from serve_apps.chat.control_tokens import ControlTokens, MarkedText
from stores.files import read_json_object

TOKENIZER_FILE = "tokenizer.json"
ANSWER = "Answer-1"
EXCHANGE = (
    {"role": "user", "content": "Question-1"},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "Question-2"},
)
"""A plain conversation, which shows what a template writes around messages."""
MARKER = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
"""The form of a control token that the tokenizer does not call special, as DeepSeek's are."""
TAG = re.compile(r"<(/?)([^<>/\s]+)>")
"""A tag like `<think>`, which is a part of what is said where there is one to close it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """How a prompt ends, and what else its template is told."""

    add_generation_prompt: bool = True
    """Whether it ends with the header of the assistant's turn."""
    continue_final_message: bool = False
    """Whether it ends within the last message."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template: those that `ChatTokenizer.known_variables` knows."""


READY = PromptSettings()
"""A prompt that is ready for the assistant's turn."""


class ChatTokenizer:
    """Wraps a Hugging Face tokenizer that has a chat template."""

    folder: str = ""
    """The model folder; empty where it was made of none."""

    def __init__(self, folder: str | Path) -> None:
        """Loads the tokenizer of a model folder; ValueError where it has no tokenizer or no chat template."""
        from transformers import PreTrainedTokenizerFast

        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"model folder {folder} has no tokenizer.json: save the tokenizer beside the weights")
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
        if not self._tokenizer.chat_template:
            raise ValueError(f"model folder {folder} has no chat template: add chat_template.jinja")
        self.folder = str(folder)
        self._backend = self._tokenizer.backend_tokenizer
        # A script for fine-tuning may have saved its settings here: a prompt is neither cut nor filled up.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._sort_tokens(configured_end_ids(Path(folder)))

    def _sort_tokens(self, configured: Sequence[int]) -> None:
        """Finds out which tokens end a completion, which only the template writes, and which no reader sees."""
        named = {self._tokenizer.eos_token_id, self._tokenizer.bos_token_id, self._tokenizer.pad_token_id} - {None}
        eos = self._tokenizer.eos_token_id
        ends = {*configured, *([] if eos is None else [eos])}
        added = {number: token.content for number, token in self._backend.get_added_tokens_decoder().items()}
        special = {n for n, token in self._backend.get_added_tokens_decoder().items() if token.special}
        special |= set(self._tokenizer.all_special_ids)
        tags = {number for number, text in added.items() if _is_pair(text, added.values())} - named - ends
        plain = self._render_exchange(EXCHANGE, add_generation_prompt=True)
        markers = {n for n, text in added.items() if n in special or MARKER.fullmatch(text)} - tags
        written = {n for n in markers if added[n] in self.chat_template or added[n] in plain}
        control = (special | named | ends | written) & added.keys()
        self._control = ControlTokens(self._backend, control, unknown=self._tokenizer.unk_token_id)
        turn_end = self._control.begins(self._render_exchange(EXCHANGE[:2]).partition(ANSWER)[2].lstrip())
        if turn_end is not None and turn_end not in tags:
            ends.add(turn_end)
            eos = turn_end
        if eos is None:
            eos = min(ends, default=None)
        self._eos_id = eos
        self.end_ids = frozenset(ends)
        """The tokens that end a completion: what tokenizer, config and generation config name, and what the template
        writes after an assistant's message. They are no part of its text."""
        # What a template writes behind the header of the assistant's turn alone, like [THINK], begins what is said.
        past = [self._render_exchange(EXCHANGE), self._render_exchange(EXCHANGE[:2])]
        around = self._control.found("".join(past) if all(past) else plain)
        self._unseen = frozenset(ends | named | (around - tags))
        self.turn_ids = self._unseen & added.keys() - self.end_ids
        """The control tokens that begin a turn or fill a row: no answer holds one."""
        # In a completion tags and the marks of tool calls are tokens; what begins or ends a turn comes of no text.
        self._turns = ControlTokens(self._backend, self._unseen & added.keys())

    def _render_exchange(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        """Returns how the template writes a plain conversation; empty where it refuses it."""
        from jinja2 import TemplateError

        try:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **settings))
        except (TemplateError, TypeError):
            return ""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: PromptSettings = READY,
    ) -> list[int]:
        """Returns prompt ids, ready for the assistant's turn.

        They are those of `apply_chat_template`, but that the text of a control token in a message or a tool stays text.
        Raises jinja2's TemplateError where the template refuses the messages.
        """
        return self.encode_marked(self.mark_chat(messages, tools=tools, settings=settings))

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """Returns the text that `encode_chat` tokenizes, as it is read."""
        return self.plain(self.mark_chat(messages, tools=tools))

    def mark_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: PromptSettings = READY,
    ) -> str:
        """Returns the text of a prompt in which the control tokens of the template differ from text like them."""
        from jinja2 import TemplateError

        def render(chat: Sequence[Mapping[str, Any]]) -> str:
            hidden = [self._control.hide(message) for message in chat]
            text = self._tokenizer.apply_chat_template(
                hidden,
                tools=self._control.hide(list(tools)) if tools else None,
                add_generation_prompt=settings.add_generation_prompt,
                continue_final_message=settings.continue_final_message,
                tokenize=False,
                **self._control.hide(settings.variables),
            )
            return str(text)

        try:
            return render(messages)
        except (TemplateError, TypeError):
            # Mistral's templates want ids of nine letters or digits, and some join every content to a text.
            plainer = [_plainer(message) for message in messages]
            if plainer == list(messages):
                raise
        return render(plainer)

    def encode_marked(self, marked: str) -> list[int]:
        """Returns the ids of marked text, or of the rest of one."""
        return self._control.encode(marked)

    def plain(self, marked: str) -> str:
        """Returns marked text as it is read."""
        return self._control.plain(marked)

    def mark_completion(self, token_ids: Sequence[int]) -> str:
        """Returns the text of a completion as `mark_chat` takes it for content: tokens that were sampled stay tokens."""
        parts = []
        for is_control, run in groupby((t for t in token_ids if t not in self._unseen), key=self._control.has):
            text = self._backend.decode(list(run), skip_special_tokens=False)
            parts.append(text if is_control else self._control.hide(text))
        return MarkedText("".join(parts))

    def folder_for_others(self) -> str:
        """Returns a folder from which another process can load this tokenizer; empty where it was made of none.

        It is the model folder, or a copy where that is gone: caches drop what nobody has fetched for a while, and a team may be served for days.
        """
        if self.folder and not Path(self.folder, TOKENIZER_FILE).is_file():
            self._copy = TemporaryDirectory(prefix="troupe-tokenizer-")
            self.folder = self._copy.name
            self._tokenizer.save_pretrained(self.folder)
            ends = json.dumps({"eos_token_id": sorted(self.end_ids)})
            Path(self.folder, "generation_config.json").write_text(ends)
        return self.folder

    @property
    def chat_template(self) -> str:
        """The source of the chat template; of several, all of them."""
        return str(self._tokenizer.chat_template)

    @property
    def knows_tools(self) -> bool:
        """True where the chat template shows tools to the model."""
        return "tools" in self.chat_template

    def known_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those variables that the chat template reads, and that are not arguments of `apply_chat_template`."""
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters
        words = set(re.findall(r"\w+", self.chat_template))
        return {name: value for name, value in variables.items() if name in words - own.keys()}

    @property
    def hugging_face(self) -> Any:
        """The tokenizer as transformers and vLLM know it."""
        return self._tokenizer

    def token_id(self, text: str) -> int | None:
        """Returns the id of the token that is this text; None where the vocabulary has none."""
        number: int | None = self._backend.token_to_id(text)
        return number

    def encode(self, text: str) -> list[int]:
        """Returns the ids of text in which every token's text stands for the token: never of what a caller or a model wrote."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_completion(self, text: str) -> list[int]:
        """Returns the ids of a whole completion, ended by the token that ends a turn.

        Tags of a contract and marks of a tool call become tokens where the tokenizer has them; what begins or ends a turn
        stays text.
        """
        return [*self._turns.encode(self._turns.hide(text)), self.eos_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ids, without the tokens that end a completion, fill up, or begin and end turns.

        Other special tokens are shown, because contracts, tool parsers and credit rules look for them.
        """
        shown = [t for t in token_ids if t not in self._unseen]
        return self._backend.decode(shown, skip_special_tokens=False)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ids with all that stand among them, also what begins and ends turns."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    @property
    def num_tokens(self) -> int:
        """The number of tokens, the added ones included; ids are smaller."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def most_characters(self, num_tokens: int) -> int | None:
        """Returns how long a text of so many tokens can be, at most; None where the tokenizer shortens texts first.

        A longer text need not be tokenized to know that it does not fit.
        """
        return None if self._longest_token is None else num_tokens * self._longest_token

    @cached_property
    def _longest_token(self) -> int | None:
        from tokenizers.decoders import ByteLevel
        from tokenizers.models import BPE

        backend = self._backend
        keeps_every_byte = isinstance(backend.model, BPE) and isinstance(backend.decoder, ByteLevel)
        if not keeps_every_byte or backend.normalizer is not None:
            return None
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token, special ones included.

        Bytes that are no character become the replacement character.
        """
        return self._backend.decode([token_id], skip_special_tokens=False)

    def decode_stream(self) -> TokenStream:
        """Returns a decoder for tokens that come one after the other."""
        return TokenStream(self)

    @property
    def eos_id(self) -> int:
        """The id of the token that ends a completion in the chat template; else the tokenizer's own."""
        if self._eos_id is None:
            raise ValueError(
                "the tokenizer names no eos_token, and neither config does: set it in tokenizer_config.json"
            )
        return int(self._eos_id)


def _is_pair(text: str, others: Collection[str]) -> bool:
    """Whether a text is a tag, and the tag that closes or opens it is a token, too."""
    match = TAG.fullmatch(text)
    return match is not None and (f"<{match[2]}>" if match[1] else f"</{match[2]}>") in others


def _plainer(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message with ids of nine letters or digits, and empty content for none."""
    plainer = dict(message)
    if plainer.get("content", "") is None:
        plainer["content"] = ""
    if plainer.get("tool_call_id"):
        plainer["tool_call_id"] = _short_id(str(plainer["tool_call_id"]))
    if plainer.get("tool_calls"):
        plainer["tool_calls"] = [
            {**call, "id": _short_id(str(call["id"]))} if "id" in call else call for call in plainer["tool_calls"]
        ]
    return plainer


def _short_id(call_id: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return sha256(call_id.encode()).hexdigest()[:9]


class TokenStream:
    """Decodes a growing completion, and holds back a character until all of its bytes have come."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._done = 0
        """Tokens whose text was returned.
        A few before them are decoded again: the text of a token may depend on its neighbours."""
        self._start = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens add, as far as its characters are complete."""
        self._ids += token_ids
        before = self._tokenizer.decode(self._ids[self._start : self._done])
        text = self._tokenizer.decode(self._ids[self._start :])
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return text[len(before) :]

    def end(self) -> str:
        """Returns the text that was held back, a broken character included."""
        before = self._tokenizer.decode(self._ids[self._start : self._done])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]


@lru_cache(maxsize=16)
def load_tokenizer(folder: str) -> ChatTokenizer:
    """Returns the tokenizer of a folder, loaded once per process."""
    return ChatTokenizer(folder)


def configured_end_ids(folder: Path) -> list[int]:
    """Returns what config and generation config of a folder say ends a completion, in ascending order.

    The two may differ, and the tokenizer may name a third: a base model's configs name the end of a document where its tokenizer
    names the end of a turn. ValueError names the file whose `eos_token_id` is no token id.
    """
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        settings = read_json_object(file)
        for part in (settings, settings.get("text_config")):
            eos = part.get("eos_token_id") if isinstance(part, dict) else None
            for token in eos if isinstance(eos, list) else [] if eos is None else [eos]:
                if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                    raise ValueError(f"{file}: eos_token_id = {eos!r} is no token id and no list of them: correct it")
                ids.add(token)
    return sorted(ids)


def stop_token_ids(folder: Path) -> list[int]:
    """Returns every token that a model folder says ends a completion: see `ChatTokenizer.end_ids`.

    Without a tokenizer in the folder, those of its two configs.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        return configured_end_ids(folder)
    return sorted(load_tokenizer(str(folder)).end_ids)

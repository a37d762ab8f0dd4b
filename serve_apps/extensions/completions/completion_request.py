"""completion_request: the bodies of bare completions, which have no chat template, and of tokenizing."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from serve_apps.openai_api.chat_request import MAX_MESSAGES, ChatRequest, Message
from serve_apps.openai_api.protocol import RequestBody
from serve_apps.openai_api.sampling_fields import MAX_CHOICES, SamplingFields, Whole

MAX_PROMPT_TOKENS = 1_000_000
"""Tokens of a prompt that is given as numbers; the context of the model is the limit that counts."""
MAX_WITH_STRINGS = 100_000
"""Characters of a text whose tokens are also returned as text, one by one."""
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
Prompts = Annotated[list[str] | list[Tokens], Field(min_length=1, max_length=MAX_CHOICES)]


class CompletionRequest(SamplingFields):
    """The body of `POST /v1/completions`."""

    prompt: str | Tokens | Prompts
    max_tokens: Whole = Field(16, ge=1)
    logprobs: Whole | None = Field(None, ge=0, le=20)
    """How many of the most likely tokens to name at each position."""
    echo: Literal[False] = False
    suffix: Literal[""] | None = None
    best_of: Whole | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionRequest:
        if self.n * len(self.prompts) > MAX_CHOICES:
            raise ValueError(f"n times the number of prompts is more than {MAX_CHOICES}")
        if self.best_of not in (None, self.n):
            raise ValueError("best_of must be n or left out: every completion is returned")
        if not self.prompts or not all(self.prompts):
            raise ValueError("prompt is empty: there is nothing to continue")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or several, as text or as tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]

    @property
    def limit(self) -> int:
        """The limit of completion tokens."""
        return self.max_tokens

    @property
    def top_logprobs(self) -> int:
        """How many alternatives are named at each position."""
        return self.logprobs or 0


class TokenizeRequest(ChatRequest):
    """The body of `POST /tokenize`: a chat, or the text of a bare prompt."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)] = Field(default_factory=list)
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Taken, and without effect: a chat's special tokens come from its template, and a bare prompt gets none."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeRequest:
        if bool(self.messages) == (self.prompt is not None):
            raise ValueError("needs either prompt or messages")
        said = self.prompt or "".join(message.text or "" for message in self.messages)
        if self.return_token_strs and len(said) > MAX_WITH_STRINGS:
            raise ValueError(
                f"return_token_strs is for texts of at most {MAX_WITH_STRINGS} characters, and this one has {len(said)}"
            )
        return self


class DetokenizeRequest(RequestBody):
    """The body of `POST /detokenize`."""

    model: str
    tokens: Tokens

"""grammars: a model folder, `Sampling.constraint` -> the tokens that may come next, as vLLM's backend `xgrammar` says.

The engine samples a constrained token from the softmax over those that its grammar allows; the trainer makes the masks of such a
turn again. Both, and the trial of a caller's form, compile it here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

CACHE_BYTES = 2**29
"""How much memory compiled grammars may take, as in vLLM."""


class Grammars:
    """Compiles constraints for one tokenizer; the compiler keeps what it has compiled, up to CACHE_BYTES."""

    def __init__(self, folder: Path) -> None:
        """Loads the tokenizer. Args: folder: the model with its tokenizer, in Hugging Face layout."""
        import xgrammar
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        self.vocabulary: int = config.get_text_config().vocab_size
        """Rows of the head."""
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=self.vocabulary)
        self._compiler = xgrammar.GrammarCompiler(info, cache_limit_bytes=CACHE_BYTES)

    def matcher(self, constraint: str, *, end_ids: Collection[int] = ()) -> Any:
        """Returns a matcher at the beginning of the grammar; ValueError or RuntimeError where there is none.

        Args: end_ids: further tokens that may follow when the form is complete.
        """
        import xgrammar

        form, own_ends, never = stated(constraint)
        ends = sorted({*own_ends, *end_ids})
        return Matcher(xgrammar.GrammarMatcher(compiled(self._compiler, form), override_stop_tokens=ends), never)


class Matcher:
    """An xgrammar matcher, and tokens that it takes for the text of their names but that no answer holds."""

    def __init__(self, matcher: Any, never: Collection[int]) -> None:
        self._matcher, self._never = matcher, frozenset(never)

    def is_terminated(self) -> bool:
        """Whether the form is complete and a token that ends it was taken."""
        return bool(self._matcher.is_terminated())

    def fill_next_token_bitmask(self, mask: Any) -> None:
        """Sets the bits of the tokens that may come next. Args: mask: int32 [1, ceil(V / 32)], a tensor on the CPU."""
        self._matcher.fill_next_token_bitmask(mask)
        bits = mask.numpy().view("uint32")
        for token in self._never:
            bits[0, token // 32] &= ~(1 << token % 32) & 0xFFFFFFFF

    def accept_token(self, token: int) -> bool:
        """Goes on by a token; False where it is not allowed."""
        return token not in self._never and bool(self._matcher.accept_token(token))


def stated(constraint: str) -> tuple[dict[str, Any], list[int], list[int]]:
    """Returns what `Sampling.constraint` says: {kind: form}, the tokens that may end it, and those that it never holds."""
    form = json.loads(constraint)
    return form, form.pop("end_ids"), form.pop("never", [])


def compiled(compiler: Any, form: Mapping[str, Any]) -> Any:
    """Compiles {kind: form} as vLLM's `XgrammarBackend.compile_grammar` does; ValueError for an unknown kind, and xgrammar's errors."""
    ((kind, value),) = form.items()
    match kind:
        case "json":
            return compiler.compile_json_schema(value if isinstance(value, str) else json.dumps(value))
        case "regex":
            return compiler.compile_regex(value)
        case "grammar" if _is_lark(value):
            return compiler.compile_lark(value)
        case "grammar":
            return compiler.compile_grammar(value)
        case "structural_tag":
            return compiler.compile_structural_tag(value)
    raise ValueError(f"{kind!r} is no kind of constraint: json, regex, grammar and structural_tag are")


def _is_lark(grammar: str) -> bool:
    """Whether a grammar is written as Lark reads it, not as EBNF: by the rule of vLLM's `grammar_is_likely_lark`."""
    return bool(grammar) and not any("::=" in re.split("#|//", line, maxsplit=1)[0] for line in grammar.split("\n"))

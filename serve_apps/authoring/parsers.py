"""parsers: the names of what reads the completions of a model group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names what reads the completions of a model group: `auto` (the model folder shows it) or a parser of vLLM.

    A reasoning parser `none` leaves thoughts in the text.
    """

    tool: str = "auto"
    reasoning: str = "auto"

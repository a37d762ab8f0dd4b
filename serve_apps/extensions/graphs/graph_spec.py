"""graph_spec: the YAML file of a declared workflow, as it is written -> pydantic models. `graph.py` checks what joins fields."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from serve_apps.authoring.choices import Choice
from serve_apps.authoring.contracts import Contract, JsonKeys, OneOf, Raw, Tags

NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)


class ParserSpec(_Strict):
    """Describes how a model node's completion is read, in exactly one form."""

    tags: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    json_keys: tuple[str, ...] = Field((), alias="json")
    choices: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """The values that a tag may have, where `tags` is used."""
    max_items: int | None = Field(None, ge=1)
    """How many items of a list are read, where `json` is used."""
    valid_reward: float = 0.0
    invalid_reward: float = -1.0

    def contract(self) -> Contract:
        """Returns the output contract; raw text where no form is set."""
        forms = [f for f in (self.tags, self.one_of, self.json_keys) if f]
        if len(forms) > 1:
            raise ValueError("parser: give one of tags, one_of and json")
        odd = [name for name in (*self.tags, *self.one_of) if not NAME.fullmatch(name)]
        if odd:
            raise ValueError(f"parser: {odd[0]!r} is no name of a tag: letters, digits and _")
        if self.tags:
            return Tags(*self.tags, choices=self.choices)
        if self.one_of:
            return OneOf(*self.one_of)
        return JsonKeys(*self.json_keys, max_items=self.max_items) if self.json_keys else Raw()


class NodeSpec(_Strict):
    """Describes one node as it is written in the file."""

    type: Literal["model", "tool", "choice"]
    prompt: str = ""
    """The prompt of a model or choice node, a template over `question` and earlier nodes. The node is an agent of the same name. That
    of a choice node has `{options}`, where it lists what is offered."""
    system: str = ""
    parser: ParserSpec = ParserSpec()
    max_tokens: int = Field(512, ge=1)
    cut: tuple[str, ...] = ()
    """The fields of a model node's templates that lose text where the prompt has no room, the least needed first."""
    options: dict[str, str] = Field(default_factory=dict)
    """What a choice node may choose, with what its prompt says of each: nodes, to which it then leads, and `stop`, which ends the
    episode. A node that has no visits left is not offered."""
    messages: tuple[str, ...] = ()
    """The options of a choice node to which it writes a message, its field `message`."""
    tool: str = ""
    """The tool of the workflow's settings that a tool node calls."""
    arguments: dict[str, str] = Field(default_factory=dict)
    """The arguments of a tool node, as templates;
    a template that is a single `{name}` passes the value on, a list as a list."""
    each: str = ""
    """An argument of a tool node that is a list. The tool is called for each of its items side by side, and the node's value
    is the list of the results."""
    timeout_s: float = Field(60.0, gt=0)
    fail_open: bool = False
    """True: the fields of a node that fails are empty, and the graph goes on."""
    max_visits: int | None = Field(None, ge=1)
    """How often it may run in an episode; default once. A cycle needs a node with this bound."""
    trainable: bool = True
    """Whether `GraphReward` pays a model or choice node, and so whether it trains."""

    @property
    def is_agent(self) -> bool:
        """Whether a model is called."""
        return self.type != "tool"

    def contract(self) -> Contract:
        """Returns the output contract of a model or choice node; ValueError where what it says of that is wrong."""
        return Choice(self.options, messages=self.messages) if self.type == "choice" else self.parser.contract()


class EdgeSpec(_Strict):
    """Describes one edge as it is written in the file."""

    source: str = Field(alias="from")
    target: str = Field(alias="to")
    when: str = ""


class GraphSpec(_Strict):
    """Describes the whole file."""

    nodes: dict[str, NodeSpec] = Field(min_length=1)
    edges: tuple[EdgeSpec, ...] = ()
    start: tuple[str, ...] = Field(min_length=1)
    end: tuple[str, ...] = ()
    answer: str
    max_steps: int = Field(32, ge=1)
    stop_on_end: bool = True
    """True: an end node ends the episode; else it goes on while nodes are left to run."""

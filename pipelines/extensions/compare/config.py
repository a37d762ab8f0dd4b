"""The section `compare` of a run config."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from pipelines.config.sections import DottedConfig
from stores.settings import Settings


class CompareConfig(Settings):
    """This section names the single agent that `troupe compare` trains on the same tasks, from the same model and with as many
    episodes, and compares with the team at as many completion tokens."""

    agent: str = ""
    """The name of an agent of the workflow whose prompt has one input, the task."""
    answer: str = "answer"
    """The field of its contract that is its answer."""
    workflow: DottedConfig | None = None
    """In the place of `agent`: a workflow of one agent, with its settings."""
    model_group: str = ""
    """The model group whose version 0 the agent begins from; empty: the agent's own, or with `workflow` the first."""
    credit: DottedConfig | None = None
    """The credit rule of its training; null: the run's."""
    set: dict[str, Any] = Field(default_factory=dict)
    """The dotted keys of the run config that differ for it, for example `{agents.solver.max_tokens: 64}`."""

    @model_validator(mode="after")
    def _names_one_agent(self) -> Self:
        if bool(self.agent) == (self.workflow is not None):
            raise ValueError("give either `agent`, an agent of the workflow, or `workflow`, a workflow of one agent")
        return self

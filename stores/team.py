"""team: a team version as it is registered: workflow, prompts, credit rule and one model version per model group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from stores.types import ModelVersionRef

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Everything that is evaluated, promoted, served and rolled back as one."""

    workflow: str
    """Dotted path."""
    prompts: Mapping[str, str]
    """By agent."""
    credit: Mapping[str, Any]
    """`path`, `settings`, `version` of the credit rule."""
    models: Mapping[str, ModelVersionRef]
    """By model group."""
    git_commit: str
    run_id: str
    iteration: int
    evaluation: Mapping[str, Any]
    """Summary of the report that the gate saw; JSON values."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The run config: agents, sampling, model groups, serving; what is needed to let the team act anywhere. No secrets."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """What it was trained on, who made it, commits: see `pipelines/run/provenance.py`; JSON values."""

    def to_json(self) -> str:
        """The text of `team.json`."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Team:
        """The inverse of `to_json`."""
        data = json.loads(text)
        models = {group: ModelVersionRef(**ref) for group, ref in data.pop("models").items()}
        return cls(models=models, **data)

    @property
    def sha256(self) -> str:
        """Identity of what acts, wherever and however often it was evaluated."""
        data = {name: value for name, value in asdict(self).items() if name not in ("evaluation", "origin")}
        return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    @property
    def prompts_sha256(self) -> str:
        """Identity of the prompts, as `Workflow.prompts_sha256`."""
        return sha256(json.dumps(dict(self.prompts), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamVersion:
    """One line of a list of team versions."""

    version: int
    aliases: tuple[str, ...]
    run_id: str
    iteration: int
    policy_versions: Mapping[str, int]
    evaluation: Mapping[str, float]
    """The numbers of the evaluation summary, by path."""
    created_at: float
    """Unix seconds."""

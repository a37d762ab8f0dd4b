"""team: the record of a registered team: workflow, prompts, credit rule and one model version per model group."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from typing import Any

from stores.types import ModelVersionRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Everything that is evaluated, promoted, served and rolled back as one."""

    workflow: str
    """The workflow's dotted path."""
    prompts: Mapping[str, str]
    """The system prompts by agent."""
    credit: Mapping[str, Any]
    """`path`, `settings` and `version` of the credit rule."""
    models: Mapping[str, ModelVersionRef]
    """The model versions by model group."""
    git_commit: str
    run_id: str
    iteration: int
    evaluation: Mapping[str, Any]
    """Summary of the evaluation that the gate decided on; JSON values."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The run config: agents, sampling, model groups, serving: all that is needed to run the team elsewhere. No secrets."""
    code: Mapping[str, str] = field(default_factory=dict)
    """The user's own modules, path -> text: workflow, credit rule and what they import. What is installed is no part of it."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """The data it was trained on, who made it, commits: see `pipelines/run/provenance.py`; JSON values."""

    def to_json(self) -> str:
        """Returns the text of `team.json`."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Team:
        """Reads the text of `team.json`; the inverse of `to_json`. Raises ValueError for one of another version of Troupe."""
        data = json.loads(text)
        if unlike := data.keys() ^ {known.name for known in fields(cls)}:
            raise ValueError(
                f"team.json was written by another version of Troupe (it differs in {', '.join(sorted(unlike))})"
            )
        models = {group: ModelVersionRef(**ref) for group, ref in data.pop("models").items()}
        return cls(models=models, **data)

    @property
    def sha256(self) -> str:
        """Identifies the team by what acts: it does not depend on evaluations, nor on how the team came to be."""
        data = {name: value for name, value in asdict(self).items() if name not in ("evaluation", "provenance")}
        return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    @property
    def prompts_sha256(self) -> str:
        """Identifies the prompts, like `Workflow.prompts_sha256`."""
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
    """The numbers of the evaluation summary, by their path in it."""
    created_at: float
    """Unix seconds."""

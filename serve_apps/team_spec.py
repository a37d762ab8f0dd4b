"""team_spec: a team in plain data, which crosses process borders -> an `ActingTeam`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from serve_apps.acting_team import ActingTeam
from serve_apps.config import EpisodeConfig
from serve_apps.tokenizer import load_tokenizer
from serve_apps.workflow import load_workflow
from stores.manifest import whole_model
from stores.types import ModelVersionRef, Sampling
from stores.weight_cache import fetch


@dataclass(frozen=True, kw_only=True)
class TeamSpec:
    """Describes an `ActingTeam` in plain data, so that it crosses a process border."""

    workflow: str
    settings: dict[str, Any]
    group_of: dict[str, str]
    tokenizers: dict[str, str | ModelVersionRef]
    """The model version whose folder holds the tokenizer of a model group, fetched where the team acts;
    or a local folder."""
    max_model_len: dict[str, int]
    sampling: dict[str, Sampling]
    policy_versions: dict[str, int]
    team_key: str
    limits: EpisodeConfig

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values only."""
        return asdict(self) | {"limits": self.limits.model_dump(mode="json")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TeamSpec:
        """Is the inverse of `to_dict`; raises pydantic's error or TypeError for anything else."""
        tokenizers = {
            g: ModelVersionRef(**at) if isinstance(at, Mapping) else at for g, at in data["tokenizers"].items()
        }
        sampling = {name: Sampling(**of) for name, of in data["sampling"].items()}
        limits = EpisodeConfig.model_validate(data["limits"])
        return cls(**{**data, "tokenizers": tokenizers, "sampling": sampling, "limits": limits})

    def build(self) -> ActingTeam:
        """Loads the workflow and the tokenizers."""
        folders = {
            group: source if isinstance(source, str) else str(fetch(whole_model(source), with_tensors=False))
            for group, source in self.tokenizers.items()
        }
        return ActingTeam(
            workflow=load_workflow(self.workflow, self.settings),
            workflow_path=self.workflow,
            group_of=self.group_of,
            tokenizers={group: load_tokenizer(folder) for group, folder in folders.items()},
            max_model_len=self.max_model_len,
            sampling=self.sampling,
            policy_versions=self.policy_versions,
            team_key=self.team_key,
        )

"""team_spec: a team in plain data, which crosses process borders -> an `ActingTeam`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from serve_apps.authoring.parsers import Parsers
from serve_apps.authoring.workflow import load_carried
from serve_apps.chat.tokenizer import load_tokenizer
from serve_apps.config import EpisodeConfig
from serve_apps.episode.acting_team import ActingTeam
from serve_apps.openai_api.answer_reader import answer_format
from stores.types import ModelVersionRef, Sampling
from stores.weights.manifest import whole_model
from stores.weights.weight_cache import fetch


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
    parsers: dict[str, Parsers] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)
    """The user's own modules by path, of a registered team; empty: they are imported from where the team acts."""

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
        parsers = {group: Parsers(**of) for group, of in data.get("parsers", {}).items()}
        read = {"tokenizers": tokenizers, "sampling": sampling, "limits": limits, "parsers": parsers}
        return cls(**{**data, **read})

    def build(self) -> ActingTeam:
        """Loads the workflow and the tokenizers; ValueError where one of them does not load, or a parser does not fit its model."""
        folders = {
            group: source if isinstance(source, str) else str(fetch(whole_model(source), with_tensors=False))
            for group, source in self.tokenizers.items()
        }
        tokenizers = {group: load_tokenizer(folder) for group, folder in folders.items()}
        for group, parsers in self.parsers.items():
            answer_format(tokenizers[group], parsers)
        return ActingTeam(
            workflow=load_carried(self.code, self.workflow, self.settings),
            workflow_path=self.workflow,
            group_of=self.group_of,
            tokenizers=tokenizers,
            max_model_len=self.max_model_len,
            sampling=self.sampling,
            policy_versions=self.policy_versions,
            team_key=self.team_key,
            parsers=self.parsers,
        )

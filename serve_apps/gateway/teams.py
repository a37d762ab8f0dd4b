"""production: what the gateway was told to serve -> for each request one team, which it keeps to its end.

    user_config of the gateway ──> Production per team: champion on one set of policy apps, perhaps a candidate on the other
    request ── user key, salt, share ──> arm ──> ServedTeam: team spec, apps, versions

A `ServedTeam` is made whole before it takes the place of another; a request holds on to the one it began on, so that no
answer comes from two teams.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from serve_apps.openai_api.protocol import ApiError
from serve_apps.runner import ActingTeam
from serve_apps.team_spec import TeamSpec


class DeployedTeam(BaseModel):
    """One team version on one set of policy apps; plain values, as they stand in the gateway's `user_config`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    team_version: int
    set_name: str
    """`blue` or `green`."""
    apps: dict[str, str]
    """Serve application of every model group."""
    team_spec: dict[str, Any]
    """`TeamSpec.to_dict()`: workflow, agents, sampling, versions."""


class TeamStores(BaseModel):
    """Where a team's episodes are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    traces: str
    """LanceDB URI of what its run has sampled."""
    served: str
    """LanceDB URI of answers that may be kept: see `stores/served.py`."""
    weights: str = ""
    """URI of its model versions; empty: nothing that lies beside them can be looked at."""


class TeamRoute(BaseModel):
    """How requests for one team are answered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    champion: DeployedTeam
    candidate: DeployedTeam | None = None
    share: float = Field(0.0, ge=0, le=1)
    """Of requests that the candidate answers."""
    shadow: float = Field(0.0, ge=0, le=1)
    """Of the champion's requests that the candidate gets too, once they are answered; nobody is told what it says."""
    salt: str = ""
    """Of the assignment of users: another one deals them anew."""
    previous: DeployedTeam | None = None
    """Who answered before, while its set still holds it: the way back is a change of the route."""
    stores: TeamStores | None = None
    """None: nothing can be looked up or kept."""


@dataclass(frozen=True, kw_only=True)
class ServedTeam:
    """A team that answers."""

    name: str
    arm: str
    """`champion` or `candidate`."""
    version: int
    set_name: str
    apps: Mapping[str, str]
    acting: ActingTeam
    team_spec: TeamSpec

    @property
    def models(self) -> dict[str, tuple[str, str | None]]:
        """Model ids that callers name -> model group, and the agent if it is one: `TEAM/AGENT`, `TEAM/group/GROUP`."""
        agents = {f"{self.name}/{agent}": (group, agent) for agent, group in self.acting.group_of.items()}
        groups = {f"{self.name}/group/{group}": (group, None) for group in self.apps}
        return {**agents, **groups}

    @property
    def about(self) -> dict[str, Any]:
        """What every answer says of the team that gave it."""
        return {"team": self.name, "team_version": self.version, "policy_versions": dict(self.acting.policy_versions)}

    @property
    def fingerprint(self) -> str:
        """`TEAM@VERSION`: what a caller can tell answers of different teams apart by."""
        return f"{self.name}@{self.version}"

    def headers(self, request_id: str) -> dict[str, str]:
        """Of an answer."""
        return {"x-request-id": request_id, "x-troupe-team": self.fingerprint}


@dataclass(kw_only=True)
class Production:
    """One team name: who answers for it."""

    name: str
    config: TeamRoute
    champion: ServedTeam
    candidate: ServedTeam | None = None
    _count: Any = field(default_factory=itertools.count)
    _num_shadows: Any = field(default_factory=itertools.count)

    @classmethod
    def build(cls, name: str, config: TeamRoute) -> Production:
        """Loads workflows and tokenizers: seconds, to be done before anything is switched."""
        candidate = None if config.candidate is None else _served(name, "candidate", config.candidate)
        return cls(name=name, config=config, champion=_served(name, "champion", config.champion), candidate=candidate)

    def choose(self, user: str | None) -> ServedTeam:
        """Who answers: the same for every request of a user while shares only grow, by turns for those without a name."""
        if self.candidate is None or not self.config.share:
            return self.champion
        if user is None:
            n = next(self._count)
            is_candidate = int((n + 1) * self.config.share) > int(n * self.config.share)
        else:
            is_candidate = place_of(user, self.config.salt) < self.config.share
        return self.candidate if is_candidate else self.champion

    def holds(self, team: ServedTeam) -> bool:
        """Whether a set of policy apps is known to hold this team still: as an arm, or for the way back."""
        arms = (self.config.champion, self.config.candidate, self.config.previous)
        wanted = (team.version, team.set_name, team.acting.team_key)
        return any((a.team_version, a.set_name, a.team_spec["team_key"]) == wanted for a in arms if a is not None)

    def shadow(self, answered: ServedTeam) -> ServedTeam | None:
        """Who gets a request once more that the champion has answered; by turns, as `shadow` says."""
        if self.candidate is None or not self.config.shadow or answered.arm != "champion":
            return None
        n = next(self._num_shadows)
        return self.candidate if int((n + 1) * self.config.shadow) > int(n * self.config.shadow) else None


def teams_of(user_config: Mapping[str, Any]) -> dict[str, TeamRoute]:
    """What a gateway's `user_config` says of each team; ValueError where it is none."""
    return {name: TeamRoute.model_validate(of) for name, of in user_config["teams"].items()}


async def built(running: Mapping[str, Production], wanted: Mapping[str, TeamRoute]) -> dict[str, Production]:
    """Every team, loaded; those that stay as they are, as they are. ValueError, OSError or ImportError where one cannot be."""
    return {
        name: running[name]
        if name in running and running[name].config == of
        else await asyncio.to_thread(Production.build, name, of)
        for name, of in wanted.items()
    }


def place_of(user: str, salt: str) -> float:
    """Where a user stands in [0, 1): those below the share meet the candidate."""
    return int.from_bytes(sha256(f"{salt}/{user}".encode()).digest()[:7], "big") / 2**56


def find(teams: Mapping[str, Production], model: str) -> Production:
    """Whose model id this is; 404 names those there are."""
    for production in teams.values():
        if model in production.champion.models:
            return production
    raise _unknown(model, [name for production in teams.values() for name in production.champion.models])


def model_of(team: ServedTeam, model: str) -> tuple[str, str | None]:
    """Model group, and agent if it is one, of a model id of this team: a candidate may have others than the champion."""
    if model not in team.models:
        raise _unknown(model, list(team.models))
    return team.models[model]


def _unknown(model: str, known: list[str]) -> ApiError:
    return ApiError(
        404,
        f"there is no model {model!r}; models are {', '.join(sorted(known)) or 'none: no team is in service'}",
        code="model_not_found",
        param="model",
    )


def _served(name: str, arm: str, config: DeployedTeam) -> ServedTeam:
    team_spec = TeamSpec.from_dict(config.team_spec)
    return ServedTeam(
        name=name,
        arm=arm,
        version=config.team_version,
        set_name=config.set_name,
        apps=config.apps,
        acting=team_spec.build(),
        team_spec=team_spec,
    )

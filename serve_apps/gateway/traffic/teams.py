"""teams: the gateway's route of each team -> the team that answers a request, which the request keeps to its end.

    user_config of the gateway ──> Production per team: champion on one set of policy apps, perhaps a candidate on the other
    request ── user, salt, share ──> alias (champion or candidate) ──> ServedTeam: team spec, apps, versions

A `ServedTeam` is loaded completely before it replaces another. A request keeps the team that it began on, so that no answer
mixes two teams.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from serve_apps.config import GatewayTeamConfig
from serve_apps.episode.team import ActingTeam, TeamSpec
from serve_apps.openai_api.protocol import MAX_ECHO, ApiError
from serve_apps.spans import Served

logger = logging.getLogger(__name__)


class DeployedTeam(BaseModel):
    """One team version on one set of policy apps. It holds plain values, as they stand in the gateway's `user_config`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    team_version: int
    set_name: str
    """`blue` or `green`."""
    apps: dict[str, str]
    """Serve application of every model group."""
    team_spec: dict[str, Any]
    """`TeamSpec.to_dict()`: workflow, agents, sampling, versions."""


class TeamStores(BaseModel):
    """Where the episodes of a team are stored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    traces: str
    """LanceDB URI of the episodes that the team's run has sampled."""
    served: str
    """LanceDB URI of the captured answers: see `stores/traces/served.py`."""
    weights: str = ""
    """URI of its model versions. Empty: files that are stored beside the weights cannot be read."""


class TeamRoute(BaseModel):
    """How requests for one team are answered."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    champion: DeployedTeam
    candidate: DeployedTeam | None = None
    share: float = Field(0.0, ge=0, le=1)
    """Share of the requests that the candidate answers."""
    shadow: float = Field(0.0, ge=0, le=1)
    """Share of the champion's requests that are copied to the candidate after the champion has answered. Callers never see
    the candidate's replies to them."""
    salt: str = ""
    """Seed of the assignment of users to champion and candidate. A new salt assigns all users anew."""
    previous: DeployedTeam | None = None
    """The champion before this one, while its set of policy apps still has it loaded: going back only changes the route."""
    stores: TeamStores | None = None
    """None: no trace can be read and no answer captured."""
    settings: GatewayTeamConfig = GatewayTeamConfig()
    """Who may ask the team, and what is stored of it. `routes.route` sets them."""


@dataclass(frozen=True, kw_only=True)
class ServedTeam:
    """A deployed team in its loaded form, ready to answer."""

    name: str
    alias: str
    """`champion` or `candidate`."""
    version: int
    set_name: str
    apps: Mapping[str, str]
    acting: ActingTeam
    team_spec: TeamSpec

    @property
    def models(self) -> dict[str, tuple[str, str | None]]:
        """Model ids for callers -> (model group, agent or None).

        The ids are `TEAM/AGENT` and `TEAM/group/GROUP`, and the same with `--` for the slash: some frameworks take what stands
        before a slash for the name of a provider.
        """
        agents = {f"{self.name}/{agent}": (group, agent) for agent, group in self.acting.group_of.items()}
        groups = {f"{self.name}/group/{group}": (group, None) for group in self.apps}
        named = {**agents, **groups}
        return {name.replace("/", "--"): model for name, model in named.items()} | named

    @property
    def reply_fields(self) -> dict[str, Any]:
        """What the `troupe` object of every reply says about the team that gave it."""
        return {
            "team": self.name,
            "team_version": self.version,
            "policy_versions": dict(self.acting.policy_versions),
            "alias": self.alias,
        }

    @property
    def fingerprint(self) -> str:
        """`TEAM@VERSION`, by which a caller can tell the replies of different teams apart."""
        return f"{self.name}@{self.version}"

    def headers(self, request_id: str) -> dict[str, str]:
        """The HTTP headers of a reply: which request it answers and which team gave it."""
        return {"x-request-id": request_id, "x-troupe-team": self.fingerprint}

    def in_spans(self, *, episode_id: str = "", hides_texts: bool = False) -> Served:
        """Returns what the spans of an episode say of this team; see `Served`."""
        return Served(
            team=self.name,
            team_version=self.version,
            alias=self.alias,
            episode_id=episode_id,
            hides_texts=hides_texts,
        )


@dataclass(kw_only=True)
class Production:
    """All that is deployed under one team name, loaded, and the choice between champion and candidate."""

    name: str
    config: TeamRoute
    champion: ServedTeam
    candidate: ServedTeam | None = None

    @classmethod
    def build(cls, name: str, config: TeamRoute) -> Production:
        """Loads workflows and tokenizers. This takes seconds: do it before any request is switched."""
        candidate = None if config.candidate is None else _load_team(name, "candidate", config.candidate)
        return cls(
            name=name, config=config, champion=_load_team(name, "champion", config.champion), candidate=candidate
        )

    def choose_contender(self, user: str | None) -> ServedTeam:
        """Returns the team that answers a request.

        A user stays on one team as long as the share only grows. Requests without a user are drawn at random: in turn, a caller
        that asks its agents in turn would give each team another kind of request.
        """
        if self.candidate is None or not self.config.share:
            return self.champion
        position = random.random() if not user else user_position(user, self.config.salt)
        return self.candidate if position < self.config.share else self.champion

    def has_loaded(self, team: ServedTeam) -> bool:
        """Whether a set of policy apps is known to still have this team loaded: as champion, candidate or previous."""
        deployed = (self.config.champion, self.config.candidate, self.config.previous)
        identity = (team.version, team.set_name, team.acting.team_key)
        return any((d.team_version, d.set_name, d.team_spec["team_key"]) == identity for d in deployed if d is not None)

    def choose_shadow_team(self, answered_by: ServedTeam) -> ServedTeam | None:
        """Returns the candidate if this request of the champion's is to be copied to it; draws the share at random."""
        return self.candidate if answered_by.alias == "champion" and random.random() < self.config.shadow else None


def parse_teams(user_config: Mapping[str, Any]) -> dict[str, TeamRoute]:
    """Reads the route of each team from the gateway's `user_config`; ValueError where it is not valid."""
    return {name: TeamRoute.model_validate(config) for name, config in user_config["teams"].items()}


async def build_teams(
    running: Mapping[str, Production], routes: Mapping[str, TeamRoute]
) -> tuple[dict[str, Production], dict[str, str]]:
    """Loads every team whose route has changed and keeps the others as they are.

    One that cannot be loaded stays as it runs, or away: the others are not kept from their callers. Returns with the teams why, by team.
    """
    teams, faults = dict[str, Production](), dict[str, str]()
    for name, config in routes.items():
        present = running.get(name)
        try:
            is_same = present is not None and present.config == config
            teams[name] = present if present and is_same else await asyncio.to_thread(Production.build, name, config)
        except Exception as error:  # noqa: BLE001 - a damaged file or record may raise anything, and the replica has other teams
            logger.warning("team %r stays as it is: %s", name, error)
            faults[name] = str(error) or type(error).__name__
            if present is not None:
                teams[name] = present
    return teams, faults


def user_position(user: str, salt: str) -> float:
    """Returns the fixed position of a user in [0, 1); users below the share get the candidate."""
    return int.from_bytes(sha256(f"{salt}/{user}".encode()).digest()[:7], "big") / 2**56


def team_named(teams: Mapping[str, Production], name: str) -> Production:
    """Returns a team by its name; ApiError 404 names the teams that there are."""
    if name not in teams:
        raise ApiError(
            404,
            f"there is no team {name[:MAX_ECHO]!r}; teams are {', '.join(sorted(teams))}",
            code="team_not_found",
            param="team",
        )
    return teams[name]


def team_of_model(teams: Mapping[str, Production], model: str) -> Production:
    """Returns the team that has this model id; ApiError 404 names the model ids that there are."""
    for production in teams.values():
        if model in production.champion.models:
            return production
    raise _unknown_model(model, [name for production in teams.values() for name in production.champion.models])


def model_of(team: ServedTeam, model: str) -> tuple[str, str | None]:
    """Returns model group and agent (or None) of a model id of this team; ApiError 404.

    It is asked for again once the team is chosen, since a candidate may have other models than the champion.
    """
    if model not in team.models:
        raise _unknown_model(model, list(team.models))
    return team.models[model]


def _unknown_model(model: str, known: list[str]) -> ApiError:
    return ApiError(
        404,
        f"there is no model {model[:MAX_ECHO]!r}; models are {', '.join(sorted(n for n in known if '/' in n))}",
        code="model_not_found",
        param="model",
    )


def _load_team(name: str, alias: str, config: DeployedTeam) -> ServedTeam:
    team_spec = TeamSpec.from_dict(config.team_spec)
    return ServedTeam(
        name=name,
        alias=alias,
        version=config.team_version,
        set_name=config.set_name,
        apps=config.apps,
        acting=team_spec.build(),
        team_spec=team_spec,
    )

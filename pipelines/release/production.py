"""production: a registered team -> the team that serves production traffic, on one of two sets of policy apps.

    idle set (blue or green) ── load, prove ──> gateway's route switches, whole ──> the other set is idle, still loaded

The set that was deployed before stays loaded, so that the way back is one change of the gateway's route. Requests end on the set on
which they began; a set is only loaded anew when none is left on it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from pipelines.cluster.owner_links import stage_owner
from pipelines.run.champions import hold_promotion, set_champion
from pipelines.run.kept_weights import STATE_FILE
from pipelines.run.run import Run, plain
from pipelines.run.serving import app_names, serve, start
from serve_apps.gateway.routes import Change, check_settings, gateway_statuses, gateway_teams, route
from serve_apps.gateway.traffic.peer_replicas import Status
from serve_apps.gateway.traffic.teams import DeployedTeam, TeamRoute, TeamStores
from serve_apps.policy.live_settings import set_low_priority
from stores.journal.journal import Lease
from stores.journal.waiting import waiting
from stores.registry.team import Team

SETS = ("blue", "green")
DRAIN_S = 120.0
"""The time that requests on the idle set have to end before it is loaded with another team."""
ANSWER_S = 10.0
POLL_S = 0.2
SWITCH_S = 30.0
"""The time within which every gateway replica must follow a new route."""
START_S = 180.0
"""The same for a gateway that must start first."""


def deploy_team(run: Run, version: int, team: Team, *, change: Change = "none") -> dict[str, Any]:
    """Deploys a team version: it answers all of the gateway's requests, and a canary ends with it.

    `change` says what of the gateway's settings may become those of the run's config, where the team is deployed already.

    Returns {"team_version", "set_name", "before", "url", "load_s", "switch_s", "proofs"}.

    Raises SyncError where the idle set does not serve the team's weights, RouteError where the gateway refuses the team,
    ValueError for settings that it may not change; what is deployed stays then.
    """
    with hold(run):
        check_settings(run.config.gateway, run.team_name, change=change)  # before the minutes that engines take
        before = deployed_route(run)
        if before is not None and before.champion.team_version == version:
            deployed, proofs, seconds = _proven(run, team, before.champion)
        else:
            deployed, proofs, seconds = _load(run, version, team, before)
        began = time.perf_counter()
        switch(run, TeamRoute(champion=deployed, previous=_still_loaded(before, deployed)), change=change)
        return {
            "team_version": version,
            "set_name": deployed.set_name,
            "before": None if before is None else before.champion.team_version,
            "url": f"http://{run.config.gateway.host}:{run.config.gateway.port}/v1",
            "load_s": seconds,
            "switch_s": time.perf_counter() - began,
            "proofs": proofs,
        }


def deploy_alias(run: Run, alias: str, *, change: Change = "none") -> dict[str, Any]:
    """Deploys the team that has an alias, and again where a promotion has given it to another one meanwhile.

    Returns and raises what `deploy_team` does, and ValueError for an unknown alias. The lock is held to look, and not to deploy,
    which takes minutes: a stage `promote` waits for it.
    """
    version, team = _team_with(run, alias)
    while True:
        deployed = deploy_team(run, version, team, change=change)
        before, (version, team) = version, _team_with(run, alias)
        if version == before:
            return deployed


def _team_with(run: Run, alias: str) -> tuple[int, Team]:
    """Returns the team that has an alias once no promotion is under way."""
    with hold_promotion(run):
        return run.load_team(alias)


def move_champion(
    run: Run, version: int, team: Team, *, reason: str, is_rollback: bool = False
) -> dict[str, Any] | None:
    """Makes a team version the champion, and deploys it where the team is behind a gateway.

    One at a time, so that of two promotions at once neither is ever half of each. Returns what `deploy_team` does, None
    where the team is not deployed; raises as it does, and the champion stays then.
    """
    with hold_promotion(run):
        return move_champion_alone(run, version, team, reason=reason, is_rollback=is_rollback)


def move_champion_alone(
    run: Run, version: int, team: Team, *, reason: str, is_rollback: bool = False
) -> dict[str, Any] | None:
    """`move_champion` for a caller that has `hold_promotion`."""
    switched = None if deployed_route(run) is None else deploy_team(run, version, team)
    set_champion(run, team.models, version, reason=reason, is_rollback=is_rollback)
    return switched


def canary(
    run: Run,
    version: int,
    team: Team,
    *,
    share: float,
    shadow: float = 0.0,
    salt: str | None = None,
    goes_on: bool = False,
) -> dict[str, Any]:
    """Lets a team version answer a share of the requests beside the deployed one; loaded and proven first.

    Another share for the same version is a change of the route alone. Users keep their team while the share only grows;
    another `salt` deals them anew, None keeps the present one. `shadow` is the share of the other's requests that it gets as well, once
    they are answered; where it only shadows, its engines run at low CPU priority.

    Returns {"team_version", "share", "shadow", "beside", "proofs"}; raises as `deploy_team`, and ValueError where nothing
    is deployed, or it `goes_on` and is not there any more.
    """
    low_priority = shadow > 0 and share == 0
    with hold(run):
        before = _current_route(run)
        if goes_on and not is_beside(before, version):
            raise ValueError(
                f"team {run.team_name!r}: somebody else has ended the canary of version {version}: begin it anew"
            )
        if before.champion.team_version == version:
            raise ValueError(f"team version {version} of {run.team_name!r} is deployed itself: give another one")
        deployed, proofs, _ = _load(run, version, team, before, low_priority=low_priority)
        salt = before.salt if salt is None else salt
        switch(run, TeamRoute(champion=before.champion, candidate=deployed, share=share, shadow=shadow, salt=salt))
        beside = before.champion.team_version
        return {"team_version": version, "share": share, "shadow": shadow, "beside": beside, "proofs": proofs}


def is_beside(route_now: TeamRoute | None, version: int) -> bool:
    """Says whether a team version is the one beside the deployed one."""
    return route_now is not None and route_now.candidate is not None and route_now.candidate.team_version == version


def end_canary(run: Run) -> dict[str, Any]:
    """Lets the deployed team answer everything again; returns {"team_version", "ended"}.

    Raises ValueError where the team beside it answers nothing and gets copies of requests.
    """
    return _end_beside(run, is_shadow=False)


def end_shadow(run: Run) -> dict[str, Any]:
    """Ends the copies of requests to the team beside the deployed one; returns {"team_version", "ended"}.

    Raises ValueError where that team answers a share of the requests.
    """
    return _end_beside(run, is_shadow=True)


def _end_beside(run: Run, *, is_shadow: bool) -> dict[str, Any]:
    with hold(run):
        before = _current_route(run)
        if before.candidate is not None and is_shadow and before.share > 0:
            raise ValueError(
                f"team {run.team_name!r}: version {before.candidate.team_version} is a canary that answers {before.share:g} of the "
                f"requests: end it with `troupe canary {run.team_name} --end`"
            )
        if before.candidate is not None and not is_shadow and before.share == 0 and before.shadow > 0:
            raise ValueError(
                f"team {run.team_name!r}: version {before.candidate.team_version} only gets copies of requests: end that with "
                f"`troupe shadow {run.team_name} --end`"
            )
        switch(run, TeamRoute(champion=before.champion, previous=before.previous))
        ended = None if before.candidate is None else before.candidate.team_version
        return {"team_version": before.champion.team_version, "ended": ended}


def go_back(run: Run, version: int) -> dict[str, Any]:
    """Ends the deployment of a team version without loading anything: its canary, or in favour of the team before it.

    Returns {"team_version", "ended"}: who answers now, and who no longer does. Raises ValueError where it does not answer, or
    the team before it is not loaded any more.
    """
    with hold(run):
        route_now = _current_route(run)
        at_fault = route_now.candidate or route_now.champion
        if at_fault.team_version != version:
            raise ValueError(f"team {run.team_name!r}: version {at_fault.team_version} was deployed after {version}")
        if route_now.candidate is not None:
            next_route = TeamRoute(champion=route_now.champion)
        elif route_now.previous is not None:
            next_route = TeamRoute(champion=route_now.previous)
        else:
            raise ValueError(
                f"team {run.team_name!r}: no team is loaded beside version {route_now.champion.team_version}: use `troupe rollback`"
            )
        switch(run, next_route)
        return {"team_version": next_route.champion.team_version, "ended": at_fault.team_version}


def _still_loaded(before: TeamRoute | None, deployed: DeployedTeam) -> DeployedTeam | None:
    """Returns the team whose set is untouched by the team that is deployed now."""
    if before is None:
        return None
    if before.champion.set_name != deployed.set_name:
        return before.champion
    return before.previous


def hold(run: Run) -> AbstractContextManager[Lease]:
    """Keeps others from changing which version of this team is deployed."""
    return run.journal.hold(run.run_id, "production", owner=stage_owner())


def deployed_route(run: Run) -> TeamRoute | None:
    """Returns how the team's requests are answered now; None where there is no gateway, or it does not know the team."""
    return gateway_teams(run.config.gateway).get(run.team_name)


def gateway_answers(run: Run) -> list[Status]:
    """Returns the statuses of all gateway replicas with the figures of their answers.

    The list is empty where a replica is too busy to answer: one check is missed, which does not end the watch.
    """
    try:
        return gateway_statuses(run.config.gateway)
    except TimeoutError:
        return []


def switch(run: Run, next_route: TeamRoute, *, change: Change = "none") -> None:
    """Routes the team's requests by a new route, on every gateway replica; starts the gateway where there is none."""
    gateway = run.config.gateway
    timeout_s = SWITCH_S if change == "none" and _is_up(run) else START_S
    stores = TeamStores(run_id=run.run_id, traces=run.traces_uri, served=run.served_uri, weights=run.weights_uri)
    next_route = next_route.model_copy(update={"stores": stores})
    state_file = f"{run.folder}/{STATE_FILE}"
    route(gateway, run.team_name, next_route, state_file=state_file, timeout_s=timeout_s, change=change)


def _is_up(run: Run) -> bool:
    try:
        return bool(gateway_statuses(run.config.gateway))
    except TimeoutError:  # busy
        return True


def _current_route(run: Run) -> TeamRoute:
    route_now = deployed_route(run)
    if route_now is None:
        raise ValueError(f"team {run.team_name!r} is not deployed: begin with `troupe serve {run.team_name}@champion`")
    return route_now


def _load(
    run: Run, version: int, team: Team, before: TeamRoute | None, *, low_priority: bool = False
) -> tuple[DeployedTeam, list[dict[str, Any]], float]:
    """Loads the team on the idle set and proves it; returns the deployed team, the proofs and the seconds."""
    began = time.perf_counter()
    set_name = SETS[0] if before is None else next(s for s in SETS if s != before.champion.set_name)
    models = dict(team.models)
    deployed = DeployedTeam(
        team_version=version,
        set_name=set_name,
        apps=app_names(run, set_name),
        team_spec=run.team_spec(models, code=team.code).to_dict(),
    )
    loaded = None if before is None else before.candidate or before.previous
    if before is not None and loaded not in (None, deployed):
        switch(run, TeamRoute(champion=before.champion))  # the set is needed for another team
    if loaded != deployed:
        _wait_until_idle(run, set_name)
    timeout_s = max(run.config.serve_config(group).start_timeout_s for group in models)
    start(run, models, kind=set_name)
    if not low_priority:
        set_low_priority(deployed.apps.values(), False, timeout_s=timeout_s)
    proofs, _ = serve(run, models, kind=set_name, always_prove=True)
    if low_priority:
        set_low_priority(deployed.apps.values(), True, timeout_s=timeout_s)
    return deployed, [plain(proof) for proof in proofs], time.perf_counter() - began


def _proven(run: Run, team: Team, deployed: DeployedTeam) -> tuple[DeployedTeam, list[dict[str, Any]], float]:
    """Proves once more the set of the team that is deployed; returns what `_load` does."""
    began = time.perf_counter()
    proofs, _ = serve(run, dict(team.models), kind=deployed.set_name, always_prove=True)
    return deployed, [plain(proof) for proof in proofs], time.perf_counter() - began


def _wait_until_idle(run: Run, set_name: str) -> None:
    """Waits until no request of this team is on its way on a set, by what every gateway replica says.

    A replica that has been missing for `ANSWER_S` is one that Serve replaces: nothing is on its way there any more. One that is too busy
    to answer is waited for.
    """
    gateway, began = run.config.gateway, time.monotonic()
    if not gateway_teams(gateway):
        return
    while True:
        waited = time.monotonic() - began
        num = _in_flight(run, set_name, may_be_missing=waited > ANSWER_S)
        if num == 0:
            return
        left = "an unknown number of" if num is None else num
        if waited > DRAIN_S:
            raise TimeoutError(
                f"{left} requests of team {run.team_name!r} are still on set {set_name} after {DRAIN_S:g} s: lower "
                "gateway.request_timeout_s, or try again"
            )
        with waiting(f"{left} requests on set {set_name} of team {run.team_name}"):
            time.sleep(POLL_S)


def _in_flight(run: Run, set_name: str, *, may_be_missing: bool) -> int | None:
    """Returns the number of requests of this team on a set; None where a replica is too busy to say, or missing."""
    try:
        statuses = gateway_statuses(run.config.gateway)
    except TimeoutError:
        return None
    entries: list[Mapping[str, Any]] = [entry for status in statuses for entry in status["in_flight"]]
    num = sum(entry["num"] for entry in entries if (entry["team"], entry["set_name"]) == (run.team_name, set_name))
    num_replicas = max((status["port"]["num_replicas"] for status in statuses), default=1)
    return num if may_be_missing or len(statuses) >= num_replicas else None

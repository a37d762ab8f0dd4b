"""app: the Serve application that callers use. It is OpenAI's API over deployed teams, with whole workflows.

    caller ── HTTP ──> Gateway replica (FastAPI, uvicorn) ──> policy apps of the set that its team is on
                            ▲ user_config: which team version on which set, whom each team lets in and what is stored of it;
                              replaced as a whole while the replica runs

Each replica listens itself, on one port for all replicas of a machine. Serve's own proxies are not used: they are configured
once per cluster, when Serve starts, which a run's cluster does without them; and they would copy every token of a stream.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import ray
from ray import serve

from serve_apps.config import GatewayPortConfig
from serve_apps.gateway.http.connections import DRAIN_S, make_server
from serve_apps.gateway.http.http_api import build_api
from serve_apps.gateway.traffic.peer_replicas import ServePeers
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.shadowing import ServePlayer
from serve_apps.gateway.traffic.teams import TeamRoute, build_teams, parse_teams
from serve_apps.http.peer import Peer, PeerError
from serve_apps.policy.app_list import new_entry
from serve_apps.spans import Spans, begin_spans, use_spans
from stores.logs import bound, configure

logger = logging.getLogger(__name__)

DEPLOYMENT = "Gateway"
TELL_S = 2.0
"""How long before its end a replica that stops ends the answers that have begun, so that their callers learn of it."""
IMPORT_PATH = "serve_apps.gateway.app:build_app"


def app_name(config: GatewayPortConfig) -> str:
    """Returns the name of the gateway's app: there is one gateway per port."""
    return f"gateway-{config.port}"


def shadows_name(config: GatewayPortConfig) -> str:
    """Returns the name of the app that answers this gateway's shadow requests; it starts with the first shadow traffic."""
    return f"shadows-{config.port}"


def build_app(args: dict[str, Any]) -> serve.Application:
    """Builds a Serve application with one deployment, `Gateway`, from `GatewayPortConfig` as JSON."""
    config = GatewayPortConfig.model_validate(args)
    return Gateway.options(  # type: ignore[attr-defined]
        num_replicas=config.num_replicas,
        ray_actor_options={"num_cpus": config.cpus, "runtime_env": {"env_vars": {"HF_HUB_OFFLINE": "1"}}},
        graceful_shutdown_timeout_s=DRAIN_S + 5,
        max_surge_percent=100,  # with other settings of the port, a replica listens before the one that it replaces stops
        health_check_period_s=5,
    ).bind(args)


def gateway_entry(name: str, config: GatewayPortConfig, teams: Mapping[str, TeamRoute]) -> dict[str, Any]:
    """Returns the application's entry in Serve's config, JSON values only."""
    args = config.model_dump(mode="json")
    return new_entry(name, import_path=IMPORT_PATH, args=args, deployment=DEPLOYMENT, user_config=user_config(teams))


def user_config(teams: Mapping[str, TeamRoute]) -> dict[str, Any]:
    """Returns the routes of all teams, with the settings of each, as `Gateway.reconfigure` takes them."""
    return {"teams": {name: team.model_dump(mode="json") for name, team in teams.items()}}


@serve.deployment(name=DEPLOYMENT)
class Gateway:
    """One replica of the gateway."""

    def __init__(self, args: dict[str, Any]) -> None:
        """Binds its sockets; Serve then calls `reconfigure` with the teams.

        ValueError where the port is taken, or a variable of `telemetry.headers` is not set.
        """
        configure()
        config = GatewayPortConfig.model_validate(args)
        begin_spans(config.telemetry, service="troupe-gateway")
        cluster = sha256(ray.get_runtime_context().gcs_address.encode()).hexdigest()[
            :16
        ]  # tells apart, not where it is
        peers = ServePeers(serve.get_replica_context().app_name)
        own_socket, address = _own_socket(config.host)
        player = ServePlayer(shadows_name(config), request_timeout_s=config.request_timeout_s)
        self._service = Service(config, name=cluster, peers=peers, player=player, address=address)
        self._sockets = [_shared_socket(config.host, config.port, cluster=cluster), own_socket]
        self._server = make_server(build_api(self._service), config)
        self._serving: asyncio.Task[None] | None = None
        self._error = ""
        """Why teams of the last `user_config` were refused; empty where none was."""
        self._refused: Mapping[str, Any] = {}

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Deploys these teams at once; one that is refused stays as it is, and `status` reports the error. Then it listens.

        Requests that have begun stay on the team that they began on.
        """
        teams, faults = await build_teams(self._service.teams, parse_teams(user_config))
        try:
            self._service.deploy(teams)
        except ValueError as error:
            logger.warning("keeps the teams that are deployed: %s", error)
            faults = dict.fromkeys(user_config["teams"], str(error))
        self._error = "; ".join(dict.fromkeys(faults.values()))
        self._refused = {name: user_config["teams"][name] for name in faults}
        with bound(app=serve.get_replica_context().app_name):
            deployed = self._service.teams.items()
            champions = ", ".join(f"{name}@{p.champion.version} on {p.champion.set_name}" for name, p in deployed)
            logger.info("deployed: %s", champions or "no team")
        if self._serving is None:  # only now, so that no request meets a replica without teams
            self._serving = asyncio.ensure_future(self._server.serve(sockets=self._sockets))

    async def status(self) -> dict[str, Any]:
        """Returns what `Service.status` does, the port's settings, the teams deployed here, and why the last change was refused."""
        return {
            **self._service.status(),
            "replica_id": serve.get_replica_context().replica_tag,
            "port": self._service.config.model_dump(mode="json"),
            "teams": {name: p.config.model_dump(mode="json") for name, p in self._service.teams.items()},
            "refused": self._refused,
            "error": self._error,
        }

    async def check_health(self) -> None:
        """Raises RuntimeError where the HTTP server has ended; Serve then replaces the replica."""
        if self._serving is not None and self._serving.done():
            raise RuntimeError(f"the HTTP server has ended: {self._serving.exception()}")

    async def __del__(self) -> None:
        """Finishes the requests that have begun and takes no more."""
        if self._serving is not None:
            self._server.should_exit = True
            self._service.end_answers(within_s=DRAIN_S - TELL_S)
            await self._serving
        await self._service.capture.close()
        await asyncio.to_thread(use_spans, Spans())


def _own_socket(host: str) -> tuple[socket.socket, str]:
    """Returns a socket on a free port, through which the other replicas reach this one, and its `http://HOST:PORT`."""
    listener = _socket(host)
    listener.bind((host, 0))
    address = ray.util.get_node_ip_address() if host in ("0.0.0.0", "::") else host
    return listener, f"http://{_in_url(address)}:{listener.getsockname()[1]}"


def _shared_socket(host: str, port: int, *, cluster: str) -> socket.socket:
    """Returns a socket that all replicas of this cluster share on a machine; ValueError where others listen on the port."""
    # With SO_REUSEPORT another cluster's gateway could bind the same port and get half of the connections: ask who it is.
    try:
        url = f"http://{_in_url(host)}:{port}/health"
        other = Peer(url, timeout_s=2, is_ours=True).ask("GET", url).json()
    except (PeerError, ValueError):
        other = {}
    if isinstance(other, dict) and other.get("gateway", cluster) != cluster:
        raise ValueError(f"gateway.port = {port}: the gateway of another cluster listens there; take another port")
    listener = _socket(host)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise ValueError(
            f"gateway.host and port = {host}:{port} cannot be listened on: {error.strerror}; take another port"
        ) from None
    return listener


def _socket(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off for TCP by name only; else replies wait 40 ms for an ACK.
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host

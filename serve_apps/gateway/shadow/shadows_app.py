"""shadows_app: the Serve application that answers a gateway's shadow requests, at low CPU priority."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve

from serve_apps.config import GatewayPortConfig
from serve_apps.gateway.shadow.shadow_player import ShadowPlayer
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.shadowing import ShadowJob, ShadowResult
from serve_apps.gateway.traffic.teams import build_teams, parse_teams
from serve_apps.policy.app_list import new_entry
from serve_apps.policy.policy_stream import CoalescedStreams
from serve_apps.policy.priority import set_process_priority, warn_if_others_are_nice
from stores.logs import configure

logger = logging.getLogger(__name__)

DEPLOYMENT = "Shadows"
IMPORT_PATH = "serve_apps.gateway.shadow.shadows_app:build_app"


def build_app(args: dict[str, Any]) -> serve.Application:
    """Builds a Serve application with one deployment, `Shadows`, from `GatewayPortConfig` as JSON."""
    config = GatewayPortConfig.model_validate(args)
    return Shadows.options(  # type: ignore[attr-defined]
        max_ongoing_requests=config.num_replicas * config.max_shadows,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": {"HF_HUB_OFFLINE": "1"}}},
        health_check_timeout_s=120,  # at low priority it may have to wait for the CPU
    ).bind(args)


def shadows_entry(name: str, config: GatewayPortConfig, user_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the application's entry in Serve's config, JSON values only; `user_config` is the gateway's."""
    args = config.model_dump(mode="json")
    return new_entry(name, import_path=IMPORT_PATH, args=args, deployment=DEPLOYMENT, user_config=user_config)


@serve.deployment(name=DEPLOYMENT)
class Shadows:
    """The one replica of the application."""

    def __init__(self, args: dict[str, Any]) -> None:
        """Sets the low priority; Serve then calls `reconfigure` with the teams."""
        configure()
        set_process_priority(low_priority=True)
        import transformers  # noqa: F401 - takes seconds of CPU: now, not when the first shadow request comes

        warn_if_others_are_nice()
        config = GatewayPortConfig.model_validate(args)
        self._service = Service(config, streams=CoalescedStreams(timeout_s=config.request_timeout_s))
        self._shadow_player = ShadowPlayer(self._service)

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Loads these teams. Where one cannot be loaded it keeps the teams that it has, and the gateway reports the error.

        Requests for teams that are not loaded here are dropped.
        """
        try:
            # Not `deploy`: no caller reaches this process, and files of keys may exist on the gateway's machine only.
            self._service.teams = await build_teams(self._service.teams, parse_teams(user_config))
        except (ValueError, OSError, ImportError) as error:
            logger.warning("keeps the teams that are loaded: %s", error)

    async def play_jobs(self, jobs: Sequence[ShadowJob]) -> list[ShadowResult]:
        """Plays shadow requests and returns one result for each."""
        return await self._shadow_player.play_jobs(jobs)

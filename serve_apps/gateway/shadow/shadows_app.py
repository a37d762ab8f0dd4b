"""shadows_app: the Serve application that answers a gateway's shadow requests, at low CPU priority."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray import serve

from serve_apps.config import GatewayPortConfig
from serve_apps.gateway.calls.chat import complete_chat, is_trainable, prepare_chat, trace_of
from serve_apps.gateway.calls.workflow_runs import INVALID_TASK, episode_spec, run_workflow
from serve_apps.gateway.traffic.figures import chat_figures, run_figures
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.shadowing import DROPPED, ShadowJob, ShadowResult
from serve_apps.gateway.traffic.teams import ServedTeam, build_teams, model_of, parse_teams
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.protocol import ApiError, RunRequest
from serve_apps.policy.app_list import new_entry
from serve_apps.policy.policy_stream import CoalescedStreams
from serve_apps.policy.priority import set_process_priority, warn_if_others_are_nice
from stores.logs import configure
from stores.types import EpisodeStatus

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
        """Loads these teams. Requests for teams that are not loaded here are dropped; the gateway reports why one cannot be."""
        # Not `deploy`: no caller reaches this process, and files of keys may exist on the gateway's machine only.
        self._service.teams, _ = await build_teams(self._service.teams, parse_teams(user_config))

    async def play_jobs(self, jobs: Sequence[ShadowJob]) -> list[ShadowResult]:
        """Plays shadow requests and returns one result for each."""
        return await self._shadow_player.play_jobs(jobs)


WITHOUT_READER = {"stream": False, "stream_options": None, "logprobs": False, "top_logprobs": 0}
"""Request fields that only change the form of the reply, set to what costs least: nobody reads it."""


class ShadowPlayer:
    """A Player that answers in this process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        """Its candidates answer the shadow requests."""

    async def play_jobs(self, jobs: Sequence[ShadowJob]) -> list[ShadowResult]:
        """See Player; an error of one job does not touch the others."""
        outcomes = await asyncio.gather(*map(self._play_job, jobs), return_exceptions=True)
        return [
            outcome if isinstance(outcome, ShadowResult) else _failed(job, outcome)
            for job, outcome in zip(jobs, outcomes, strict=True)
        ]

    async def _play_job(self, job: ShadowJob) -> ShadowResult:
        production = self.service.teams.get(job.team)
        team = None if production is None else production.candidate
        if team is None or (team.version, team.set_name) != (job.team_version, job.set_name):
            return DROPPED
        try:
            async with asyncio.timeout(self.service.config.request_timeout_s):
                if isinstance(job.request, RunRequest):
                    return await self._run_workflow(job, job.request, team)
                return await self._chat(job, job.request, team)
        except TimeoutError:
            return ShadowResult(outcome="late")

    async def _chat(self, job: ShadowJob, request: ChatRequest, team: ServedTeam) -> ShadowResult:
        began = time.perf_counter()
        body = request.model_copy(update=WITHOUT_READER)
        chat = await prepare_chat(body, team, *model_of(team, body.model))
        figures = chat_figures(await complete_chat(chat, self.service.streams))
        if not job.is_kept:
            return ShadowResult(outcome="answered", figures=figures)
        trace = trace_of(chat, task_id=job.task_id, seconds=time.perf_counter() - began)
        return ShadowResult(outcome="answered", figures=figures, trace=trace, is_trainable=is_trainable(chat))

    async def _run_workflow(self, job: ShadowJob, request: RunRequest, team: ServedTeam) -> ShadowResult:
        spec = episode_spec(team, request)
        run = await run_workflow(self.service, team, replace(spec, task=replace(spec.task, task_id=job.task_id)))
        trace, figures = run.trace if job.is_kept else None, run_figures(run.reply)
        if figures is None:
            return ShadowResult(outcome="dropped", trace=trace, is_trainable=True)
        return ShadowResult(outcome="answered", figures=figures, trace=trace, is_trainable=True)


def _failed(job: ShadowJob, error: BaseException) -> ShadowResult:
    """Counts against the candidate, since the champion could answer, unless its workflow refuses the task or this process is busy.

    An unforeseen error is logged with its traceback.
    """
    if isinstance(error, ApiError):
        if error.code == INVALID_TASK or error.status == 429:
            return DROPPED
        if error.code == EpisodeStatus.TIMEOUT.value:
            return ShadowResult(outcome="late")
        logger.info("a shadow request of %s@%d failed: %s", job.team, job.team_version, error.code)
    else:
        logger.error("a shadow request of %s@%d failed", job.team, job.team_version, exc_info=error)
    return ShadowResult(outcome="failed")

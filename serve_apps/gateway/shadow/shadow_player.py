"""shadow_player: shadow requests -> the replies of a candidate, which no caller ever sees."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from serve_apps.gateway.calls.chat import prepare_chat
from serve_apps.gateway.calls.chat_reply import complete_chat
from serve_apps.gateway.calls.chat_trace import is_trainable, trace_of
from serve_apps.gateway.calls.workflow_runs import INVALID_TASK, episode_spec, run_workflow
from serve_apps.gateway.traffic.figures import chat_figures, run_figures
from serve_apps.gateway.traffic.service import Service
from serve_apps.gateway.traffic.shadowing import ShadowJob, ShadowResult
from serve_apps.gateway.traffic.teams import ServedTeam, model_of
from serve_apps.openai_api.chat_request import ChatRequest
from serve_apps.openai_api.protocol import ApiError, RunRequest

logger = logging.getLogger(__name__)

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
            return ShadowResult(outcome="dropped")
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
    """Counts against the candidate, since the champion could answer, unless its workflow refuses the task.

    An unforeseen error is logged with its traceback.
    """
    if isinstance(error, ApiError):
        if error.code == INVALID_TASK:
            return ShadowResult(outcome="dropped")
        logger.info("a shadow request of %s@%d failed: %s", job.team, job.team_version, error.code)
    else:
        logger.error("a shadow request of %s@%d failed", job.team, job.team_version, exc_info=error)
    return ShadowResult(outcome="failed")

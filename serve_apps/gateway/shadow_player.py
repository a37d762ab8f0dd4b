"""shadow_player: shadow requests -> the replies of a candidate, which no caller ever sees."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from serve_apps.gateway.chat import complete, prepare
from serve_apps.gateway.chat_trace import is_trainable, trace_of
from serve_apps.gateway.figures import chat_figures, run_figures
from serve_apps.gateway.service import Service
from serve_apps.gateway.shadowing import Played, ShadowJob
from serve_apps.gateway.teams import ServedTeam, model_of
from serve_apps.gateway.workflow_runs import episode_spec, run_workflow
from serve_apps.openai_api.protocol import ApiError, ChatRequest, RunRequest

logger = logging.getLogger(__name__)

UNSEEN = {"stream": False, "stream_options": None, "logprobs": False, "top_logprobs": 0}
"""What a request asks for that shows in its answer only."""


class ShadowPlayer:
    """A Player in this process."""

    def __init__(self, service: Service) -> None:
        self.service = service
        """Whose candidates answer."""

    async def play(self, jobs: Sequence[ShadowJob]) -> list[Played]:
        """See Player."""
        ended = await asyncio.gather(*map(self._play, jobs), return_exceptions=True)
        return [one if isinstance(one, Played) else _failed(job, one) for job, one in zip(jobs, ended, strict=True)]

    async def _play(self, job: ShadowJob) -> Played:
        production = self.service.teams.get(job.team)
        team = None if production is None else production.candidate
        if team is None or (team.version, team.set_name) != (job.team_version, job.set_name):
            return Played(outcome="dropped")
        try:
            async with asyncio.timeout(self.service.config.request_timeout_s):
                if isinstance(job.request, RunRequest):
                    return await self._run(job, job.request, team)
                return await self._chat(job, job.request, team)
        except TimeoutError:
            return Played(outcome="late")

    async def _chat(self, job: ShadowJob, request: ChatRequest, team: ServedTeam) -> Played:
        began = time.perf_counter()
        body = request.model_copy(update=UNSEEN)
        chat = prepare(body, team, *model_of(team, body.model))
        figures = chat_figures(await complete(chat, self.service.streams))
        if not job.is_kept:
            return Played(outcome="answered", figures=figures)
        trace = trace_of(chat, task_id=job.task_id, seconds=time.perf_counter() - began)
        return Played(outcome="answered", figures=figures, trace=trace, is_trainable=is_trainable(chat))

    async def _run(self, job: ShadowJob, request: RunRequest, team: ServedTeam) -> Played:
        spec = episode_spec(team, request)
        run = await run_workflow(self.service, team, replace(spec, task=replace(spec.task, task_id=job.task_id)))
        trace = run.trace if job.is_kept else None
        return Played(outcome="answered", figures=run_figures(run.answer), trace=trace, is_trainable=True)


def _failed(job: ShadowJob, error: BaseException) -> Played:
    """The champion could answer it. What nobody foresaw is told with its traceback; jobs beside it are not its fault."""
    if isinstance(error, ApiError):
        logger.info("a shadow of %s@%d failed: %s", job.team, job.team_version, error.code)
    else:
        logger.error("a shadow of %s@%d failed", job.team, job.team_version, exc_info=error)
    return Played(outcome="failed")

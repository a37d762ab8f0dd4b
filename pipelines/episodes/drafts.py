"""drafts: an iteration about to be sampled -> engines that know the completions of the one before; afterwards, what drafts gained.

An engine remembers what it sampled itself, see serve_apps/policy/drafter.py. One that has just started is told the last iteration's
completions out of the trace store. Drafts change no token, so that nothing depends on them: what fails here is logged, and that is all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pipelines.run.run import Run
from pipelines.run.serving import app_names
from serve_apps.policy.draft_tables import WINDOW
from serve_apps.policy.drafter import HISTORY_TOKENS
from serve_apps.policy.replicas import UNANSWERED, Broadcast
from serve_apps.policy.wire import WireCompletion
from stores.journal.stage_results import Collected
from stores.types import Turn

logger = logging.getLogger(__name__)

Counts = dict[str, dict[str, int]]
"""By agent {steps, sampled, drafted, kept}, see `Drafter.counts`."""


class Drafts:
    """The drafts of one pass through collect; does nothing where no model group has `serve.speculation`."""

    def __init__(self, run: Run, iteration: int) -> None:
        """Tells engines that have just started what the iteration before sampled."""
        self._apps = {
            group: app
            for group, app in app_names(run).items()
            if run.config.serve_config(group).speculation is not None
        }
        self._num_replicas = {app: run.config.serve_config(group).num_replicas for group, app in self._apps.items()}
        self._before: dict[str, Counts] | None = None
        """By replica; None where one did not answer."""
        try:
            answers = self._ask()
            self._before = {answer["replica_id"]: answer["agents"] for of_app in answers.values() for answer in of_app}
            new = {app for app, of_app in answers.items() if any(not answer["num_positions"] for answer in of_app)}
            if new and iteration > 1:
                self._teach(run, iteration - 1, new)
        except (*UNANSWERED, OSError, RuntimeError, ValueError) as error:  # of replicas, of the trace store
            logger.warning("drafts of iteration %d begin with what the engines know: %s", iteration, error)

    def gained(self) -> Counts | None:
        """Returns what was counted since, by agent; None without speculation, or where a replica did not answer, now or before.

        A replica that started meanwhile counts from its start.
        """
        if not self._apps or self._before is None:
            return None
        try:
            answers = [answer for of_app in self._ask().values() for answer in of_app]
        except UNANSWERED as error:
            logger.warning("what drafts gained is not known: %s", error)
            return None
        total: Counts = {}
        for answer in answers:
            before = self._before.get(answer["replica_id"], {})
            for agent, counts in answer["agents"].items():
                into = total.setdefault(agent, dict.fromkeys(counts, 0))
                for name, count in counts.items():
                    into[name] += count - before.get(agent, {}).get(name, 0)
        return total

    def _ask(self) -> dict[str, list[dict[str, Any]]]:
        sent = {app: Broadcast(app, "draft_counts") for app in self._num_replicas}
        return {app: broadcast.answers(self._num_replicas[app]) for app, broadcast in sent.items()}

    def _teach(self, run: Run, iteration: int, apps: set[str]) -> None:
        collected = run.iteration(iteration).find(Collected)
        if collected is None:
            return
        by_app: dict[str, list[WireCompletion]] = {app: [] for app in apps}
        for trace in run.traces.read_traces(collected.traces):
            for turn in trace.turns:
                if (app := self._apps.get(turn.model_group)) in apps and turn.completion_token_ids:
                    by_app[app].append(_completion(trace.task.task_id, turn))
        for app, completions in by_app.items():
            newest = _newest(completions)
            Broadcast(app, "learn_drafts", newest).answers(self._num_replicas[app])
            logger.info("app %s drafts from %d completions of iteration %d", app, len(newest), iteration)


def _completion(task_id: str, turn: Turn) -> WireCompletion:
    tail = list(turn.prompt_token_ids[-WINDOW:])
    return WireCompletion(turn.agent, task_id, [*tail, *turn.completion_token_ids], num_prompt=len(tail))


def _newest(completions: Sequence[WireCompletion]) -> list[WireCompletion]:
    """Returns the last completions that a drafter remembers."""
    newest: list[WireCompletion] = []
    room = HISTORY_TOKENS
    for one in reversed(completions):
        room -= len(one.token_ids) - one.num_prompt
        if room < 0:
            break
        newest.append(one)
    return newest[::-1]

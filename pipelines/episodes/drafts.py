"""drafts: an iteration about to be sampled -> engines that know the completions of the one before; afterwards, what drafts gained.

An engine remembers what it sampled itself, see serve_apps/policy/drafter.py. One that has just started is told the last iteration's
completions out of the trace store. Drafts change no token, so that nothing depends on whether an engine was told.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.run.run import Run
from pipelines.run.serving import app_names
from serve_apps.policy.draft_tables import WINDOW
from serve_apps.policy.drafter import HISTORY_TOKENS
from serve_apps.policy.replicas import Broadcast
from serve_apps.policy.wire import WireCompletion
from stores.stage_results import Collected

logger = logging.getLogger(__name__)

Counts = dict[str, dict[str, int]]
"""By agent {steps, sampled, drafted, kept}, see `Drafter.counts`."""


class Drafts:
    """The drafts of one pass through collect; does nothing where no model group has `serve.speculation`."""

    def __init__(self, run: Run, iteration: int) -> None:
        """Tells engines that have just started what the iteration before sampled."""
        apps = app_names(run)
        self._replicas = {
            apps[group]: run.config.serve_config(group).num_replicas
            for group in run.config.model_groups
            if run.config.serve_config(group).speculation is not None
        }
        self._groups = {group for group, app in apps.items() if app in self._replicas}
        answers = self._ask()
        if new := [app for app, of_replicas in answers.items() if any(not a["num_positions"] for a in of_replicas)]:
            self._teach(run, iteration, {group for group in self._groups if apps[group] in new}, apps)
        self._before = _added_up(answers)

    def gained(self) -> Counts | None:
        """Returns what was counted since; None without speculation. A replica that started meanwhile counts from its start."""
        if not self._replicas:
            return None
        after = _added_up(self._ask())
        return {
            agent: {name: max(0, count - self._before.get(agent, {}).get(name, 0)) for name, count in counts.items()}
            for agent, counts in after.items()
        }

    def _ask(self) -> dict[str, list[dict[str, Any]]]:
        sent = {app: Broadcast(app, "draft_counts") for app in self._replicas}
        return {app: broadcast.answers(self._replicas[app]) for app, broadcast in sent.items()}

    def _teach(self, run: Run, iteration: int, groups: set[str], apps: Mapping[str, str]) -> None:
        before = run.iteration(iteration - 1).find(Collected) if iteration > 1 else None
        if before is None:
            return
        by_app: dict[str, list[WireCompletion]] = {}
        for trace in run.traces.read_traces(before.traces):
            for turn in trace.turns:
                if turn.model_group in groups and turn.completion_token_ids:
                    tail = list(turn.prompt_token_ids[-WINDOW:])
                    one = WireCompletion(
                        turn.agent, trace.task.task_id, [*tail, *turn.completion_token_ids], num_prompt=len(tail)
                    )
                    by_app.setdefault(apps[turn.model_group], []).append(one)
        for app, completions in by_app.items():
            newest = _newest(completions)
            Broadcast(app, "learn_drafts", newest).answers(self._replicas[app])
            logger.info("app %s drafts from %d completions of iteration %d", app, len(newest), iteration - 1)


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


def _added_up(answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> Counts:
    total: Counts = {}
    for of_replicas in answers.values():
        for answer in of_replicas:
            for agent, counts in answer["agents"].items():
                into = total.setdefault(agent, dict.fromkeys(counts, 0))
                for name, count in counts.items():
                    into[name] += count
    return total

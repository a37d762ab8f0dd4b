"""lost_tasks: a candidate and its champion at the gate -> the tasks that the candidate lost, and which agents lost them.

evaluate of an iteration ── lost_episodes ──> ids, the worst first ── why.explain ──> blame_by_agent
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Group, RenderableType
from rich.table import Table

from pipelines.extensions.samples.samples import outcomes_by_task
from pipelines.report.inspect import ForeignText
from pipelines.run.run import Run
from stores.traces.explanations import Explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """What one agent cost the episodes that were explained."""

    agent: str
    num_episodes: int
    """Episodes whose decisive turn is the agent's."""
    num_certain: int
    """Of these, those whose interval is above 0."""
    cost: float
    """What these turns cost the expected outcome, in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostTasks:
    """Explanations of the episodes that cost a candidate its lost tasks."""

    iteration: int
    num_lost: int
    """Tasks on which the candidate did worse than the champion."""
    explanations: list[Explanation]
    faults: list[str]
    """Why other episodes could not be explained."""


def lost_episodes(run: Run, iteration: int) -> list[str]:
    """Returns an episode of the candidate for each task on which it did worse than the champion, the largest loss first.

    Of a task with several episodes it is the worst of the candidate's. Raises NotDone before evaluate is done, ValueError where it played
    no two teams.
    """
    evaluated = run.iteration(iteration, needed_by="why").evaluated
    if evaluated.candidate is None or evaluated.champion is None:
        reason = evaluated.skipped or evaluated.condition
        raise ValueError(f"no champion was met at the gate of iteration {iteration}: {reason}")
    new, old = outcomes_by_task(run, evaluated.candidate), outcomes_by_task(run, evaluated.champion)
    lost = {}
    for task in new.keys() & old.keys():
        mine, theirs = new[task], old[task]
        loss = fmean(theirs.values()) - fmean(mine.values())  # of equal outcomes 0, in whatever order they come
        if loss > 0:
            lost[task] = (-loss, min(mine, key=lambda episode: (mine[episode], episode)))
    return [episode for _, episode in sorted(lost.values())]


def blame_by_agent(explanations: Sequence[Explanation]) -> list[Blame]:
    """Returns what the agents cost, the dearest first."""
    agents = dict.fromkeys(found["agent"] for found in explanations)
    blames = []
    for agent in agents:
        own = [found for found in explanations if found["agent"] == agent]
        blames.append(
            Blame(
                agent=agent,
                num_episodes=len(own),
                num_certain=sum(found["is_certain"] for found in own),
                cost=sum(found["cost"] for found in own),
            )
        )
    return sorted(blames, key=lambda blame: (-blame.cost, blame.agent))


def lost_tasks_view(found: LostTasks) -> RenderableType:
    """Shows which agents lost the tasks that a candidate lost at the gate."""
    if not found.num_lost:
        return ForeignText(f"the candidate of iteration {found.iteration} did worse than the champion on no task")
    table = Table("agent", "episodes that it decided", "of these certainly", "cost in all")
    for blame in blame_by_agent(found.explanations):
        table.add_row(ForeignText(blame.agent), str(blame.num_episodes), str(blame.num_certain), f"{blame.cost:.3f}")
    head = (
        f"iteration {found.iteration}: the candidate did worse than the champion on {found.num_lost} tasks; "
        f"{len(found.explanations)} are explained"
    )
    shown = ForeignText(
        "each of them: troupe show EPISODE, with " + ", ".join(e["episode_id"][:12] for e in found.explanations)
    )
    return Group(ForeignText(head), table, shown, *(ForeignText(f"not explained: {fault}") for fault in found.faults))

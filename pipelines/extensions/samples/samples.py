"""samples: two teams that played the same tasks -> a few episodes of both: what changed, the best and the worst.

the test tasks before and after training, or the last gate's champion and candidate ──> pairs of episode ids
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from pipelines.run.run import Run
from stores.journal.stage_results import Evaluated, Measured, TeamScore
from stores.types import COUNTED

NUM_CHANGED = 2
"""Tasks that are shown of those that the second team did better, and of those that it did worse."""
MAX_BACK = 50
"""Iterations that are looked at for the last gate at which a champion was met."""

Outcomes = Mapping[str, float]
"""Outcome by episode id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An episode of either team on one task."""

    title: str
    task_id: str
    episodes: Mapping[str, str]
    """Id by what the team is called."""


def samples(run: Run, *, last: int) -> list[Sample]:
    """Returns episodes to look at; empty where no two teams have played the same tasks yet.

    Args: last: the last finished iteration.
    """
    teams = _teams(run, last)
    if teams is None:
        return []
    (before, after), scores = zip(*teams.items(), strict=True)
    first, second = (outcomes_by_task(run, score) for score in scores)
    return [
        Sample(title=f"{title} {before}" if change else title, task_id=task, episodes={before: old, after: new})
        for title, change, task, old, new in choose(first, second)
    ]


def _teams(run: Run, last: int) -> dict[str, TeamScore] | None:
    """Returns the two teams to compare, the older one first."""
    first, trained = (run.iteration(number).find(Measured) for number in (0, run.config.iterations))
    if first is not None and trained is not None:
        return {"before training": first.score, "after training": trained.score}
    for number in range(last, max(last - MAX_BACK, 0), -1):
        evaluated = run.iteration(number).find(Evaluated)
        if evaluated is not None and evaluated.candidate is not None and evaluated.champion is not None:
            return {"champion": evaluated.champion, f"candidate of iteration {number}": evaluated.candidate}
    return None


def choose(first: Mapping[str, Outcomes], second: Mapping[str, Outcomes]) -> Iterator[tuple[str, bool, str, str, str]]:
    """Yields title, whether the outcome changed, task, and an episode of either team, the one that shows it most.

    Args: first, second: by task, what each team's episodes earned.
    """
    change = {task: _mean(second[task]) - _mean(first[task]) for task in sorted(first.keys() & second.keys())}
    gained = sorted((task for task in change if change[task] > 0), key=lambda task: -change[task])[:NUM_CHANGED]
    lost = sorted((task for task in change if change[task] < 0), key=lambda task: change[task])[:NUM_CHANGED]
    others = [task for task in change if task not in (*gained, *lost)]
    for title, tasks, old, new in (("better than", gained, min, max), ("worse than", lost, max, min)):
        yield from ((title, True, task, _episode(first[task], old), _episode(second[task], new)) for task in tasks)
    for title, extreme in (("among the best", max), ("among the worst", min)):
        if others:
            task = extreme(others, key=lambda task: _mean(second[task]))
            others.remove(task)
            yield title, False, task, _episode(first[task], extreme), _episode(second[task], extreme)


def _mean(outcomes: Outcomes) -> float:
    return fmean(outcomes.values())


def _episode(outcomes: Outcomes, extreme: Callable[..., str]) -> str:
    return extreme(sorted(outcomes), key=lambda episode: outcomes[episode])


def outcomes_by_task(run: Run, score: TeamScore) -> dict[str, dict[str, float]]:
    """Returns by task the outcome of each episode that counts and has a turn, by its id."""
    ref, columns = score.traces, ["episode_id", "task_id", "num_turns", "is_version_mixed"]
    batches = run.traces.read_batches(ref, causes=COUNTED, columns=columns)
    rows = [row for batch in batches for row in batch.to_pylist() if row["num_turns"] and not row["is_version_mixed"]]
    stored = run.traces.outcomes_of(row | {"run_id": ref.run_id, "iteration": ref.iteration} for row in rows)
    outcomes: dict[str, dict[str, float]] = {}
    for row in rows:
        by_version = stored.get(row["episode_id"], {})
        only = next(iter(by_version.values())) if len(by_version) == 1 else None  # of a rule that has changed since
        outcome = by_version.get(run.credit_version, only)
        if outcome is not None:
            outcomes.setdefault(row["task_id"], {})[row["episode_id"]] = outcome
    return outcomes

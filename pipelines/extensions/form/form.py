"""form: evaluation episodes before and after training -> how the gain splits into form and substance.

A model that learns to end its answer and to keep its contract gains accuracy without knowing more. With f the share of
well-formed episodes, a the accuracy among them and b that among the others, accuracy is f a + (1 - f) b, and exactly

    gain = form + substance
    form      = (f1 - f0) ((a0 + a1) / 2 - (b0 + b1) / 2)
    substance = (f0 + f1) / 2 (a1 - a0) + (1 - (f0 + f1) / 2) (b1 - b0)

(Kitagawa 1955, "Components of a Difference Between Two Rates", JASA 50:1168; the twofold Oaxaca-Blinder decomposition with
both sides weighted alike). Where one side has no episode of a kind, its accuracy is taken as the other side's: what nobody
saw counts as no change. It is an account, not a cause: the episodes that became well-formed may have easier tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.evaluation.statistics import RESAMPLING, Interval, Resampling, by_family
from pipelines.report.page import section
from pipelines.report.parts import Part
from pipelines.run.run import Run
from stores.journal.stage_results import Measured
from stores.types import EpisodeStatus, Trace

TEMPLATE = Path(__file__).with_name("form.html.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """An evaluation episode as the split sees it."""

    is_well_formed: bool
    outcome: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FormShare:
    """One side of the comparison. Shares and accuracies are means over tasks of the means over their episodes."""

    num_episodes: int
    num_well_formed: int
    num_solved: float
    """Sum of the outcomes."""
    num_solved_well_formed: float
    """The same of the well-formed episodes."""
    accuracy: float
    well_formed_share: float
    accuracy_well_formed: float | None
    """None where no episode is well-formed."""
    accuracy_other: float | None
    """None where every episode is well-formed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormSplit:
    """A gain, and what form and substance have in it."""

    before: FormShare
    after: FormShare
    gain: float
    form: Interval
    substance: Interval


def is_well_formed(trace: Trace) -> bool:
    """Whether an episode ended soundly, untruncated, and each of its turns kept its contract."""
    return trace.status is EpisodeStatus.OK and all(turn.is_format_ok for turn in trace.turns)


def split_gain(
    before: Mapping[str, Sequence[Judged]],
    after: Mapping[str, Sequence[Judged]],
    how: Resampling = RESAMPLING,
) -> FormSplit | None:
    """Splits the gain on the tasks that both sides have, by task id; None where they share none.

    Intervals: percentile bootstrap of the families of tasks.
    """
    tasks = sorted(task for task in before.keys() & after.keys() if before[task] and after[task])
    if not tasks:
        return None
    old, new = _means(before, tasks), _means(after, tasks)
    form, substance = _parts(old.mean(axis=0), new.mean(axis=0))
    units = [np.stack([by_family(tasks, values, how.families) for values in side.T], axis=1) for side in (old, new)]
    n = len(units[0])
    drawn = np.random.default_rng(how.seed).multinomial(n, np.full(n, 1 / n), size=how.num_samples) / n
    samples = _parts(*(drawn @ side for side in units))

    def interval(mean: np.ndarray, values: np.ndarray) -> Interval:
        low, high = np.quantile(values, how.tails)
        return Interval(mean=float(mean), low=float(low), high=float(high), num_tasks=len(tasks))

    sides = [_share(side, tasks, means) for side, means in ((before, old), (after, new))]
    return FormSplit(
        before=sides[0],
        after=sides[1],
        gain=sides[1].accuracy - sides[0].accuracy,
        form=interval(form, samples[0]),
        substance=interval(substance, samples[1]),
    )


def _means(side: Mapping[str, Sequence[Judged]], tasks: Sequence[str]) -> np.ndarray:
    """[num_tasks, 3]: of each task's episodes the share that is well-formed, and the mean outcome of these and of the others.

    Both outcomes are divided by all episodes of the task.
    """
    rows = []
    for task in tasks:
        well = [judged.outcome for judged in side[task] if judged.is_well_formed]
        other = [judged.outcome for judged in side[task] if not judged.is_well_formed]
        n = len(side[task])
        rows.append((len(well) / n, math.fsum(well) / n, math.fsum(other) / n))
    return np.array(rows)


def _parts(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Form and substance of means [..., 3] over tasks, as `_means` has them."""
    f0, f1 = old[..., 0], new[..., 0]
    a0, a1 = _rates(old[..., 1], f0, new[..., 1], f1)
    b0, b1 = _rates(old[..., 2], 1 - f0, new[..., 2], 1 - f1)
    form = (f1 - f0) * ((a0 + a1) / 2 - (b0 + b1) / 2)
    middle = (f0 + f1) / 2
    return form, middle * (a1 - a0) + (1 - middle) * (b1 - b0)


def _rates(old: np.ndarray, old_share: np.ndarray, new: np.ndarray, new_share: np.ndarray) -> list[np.ndarray]:
    """Accuracy among the episodes of one kind on both sides; that of the other side where there are none, 0 where nowhere."""
    rates = [
        np.divide(solved, share, out=np.full_like(solved, np.nan), where=share > 1e-12)
        for solved, share in ((old, old_share), (new, new_share))
    ]
    known = [np.where(np.isnan(rate), other, rate) for rate, other in zip(rates, reversed(rates), strict=True)]
    return [np.nan_to_num(rate) for rate in known]


def _share(side: Mapping[str, Sequence[Judged]], tasks: Sequence[str], means: np.ndarray) -> FormShare:
    episodes = [judged for task in tasks for judged in side[task]]
    well = [judged for judged in episodes if judged.is_well_formed]
    share, solved_well, solved_other = (float(value) for value in means.mean(axis=0))
    return FormShare(
        num_episodes=len(episodes),
        num_well_formed=len(well),
        num_solved=math.fsum(judged.outcome for judged in episodes),
        num_solved_well_formed=math.fsum(judged.outcome for judged in well),
        accuracy=solved_well + solved_other,
        well_formed_share=share,
        accuracy_well_formed=solved_well / share if well else None,
        accuracy_other=solved_other / (1 - share) if len(well) < len(episodes) else None,
    )


def part(run: Run, last: int) -> Part:
    """Returns the split as the report has it: `form` in report.json, null before both measurements are there.

    Keys: `before` and `after` (the fields of `FormShare`), `gain`, `form` and `substance` with their intervals. The episodes
    are those that count in the accuracy, scored by the run's present credit rule.
    """
    before, after = (run.iteration(number).find(Measured) for number in (0, run.config.iterations))
    if before is None or after is None:
        return Part(values={"form": None})
    split = split_gain(_judged(run, before), _judged(run, after), Resampling.of(run.config, after.families))
    return Part(values={"form": None}) if split is None else part_of(split)


def part_of(split: FormSplit) -> Part:
    """Returns what the report says of a split."""
    shown: dict[str, Any] = {
        "method": "Kitagawa 1955",
        "before": asdict(split.before),
        "after": asdict(split.after),
        "gain": split.gain,
        **{name: part.mean for name, part in (("form", split.form), ("substance", split.substance))},
        **{f"{name}_ci95": part.ci95 for name, part in (("form", split.form), ("substance", split.substance))},
    }
    return Part(html=section(TEMPLATE, form=shown), is_result=True, values={"form": shown})


def _judged(run: Run, measured: Measured) -> dict[str, list[Judged]]:
    """By task id, the episodes of a measurement that have an outcome."""
    traces = [t for t in run.traces.read_traces(measured.score.traces) if t.is_outcome and not t.is_version_mixed]
    keys = [{"episode_id": t.episode_id, "run_id": t.run_id, "iteration": t.iteration} for t in traces]
    outcomes = run.traces.outcomes_of(keys)
    judged: dict[str, list[Judged]] = {}
    for trace in traces:
        outcome = outcomes.get(trace.episode_id, {}).get(run.credit_version)
        if outcome is not None:
            episode = Judged(is_well_formed=is_well_formed(trace), outcome=outcome)
            judged.setdefault(trace.task.task_id, []).append(episode)
    return judged

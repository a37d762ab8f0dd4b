"""evaluate: held-out tasks, candidate and champion -> evaluation traces, a paired report and the gate's verdict on it.

Reads: the gate's tasks; the versions just trained; the champion. Writes: evaluation episodes (their purpose keeps them
apart from training), report and verdict into the journal; `promote` acts on it. All teams play the same tasks with the same
seeds on the same engines, swapped in place and swapped back, each with proof.

    tasks of one look ── champion, candidate, with cross-play the mixed teams ──> evidence ── gate ──> sure, or more tasks
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from pipelines.config.sections import TEST_FORM
from pipelines.credit.rule import worst_outcome
from pipelines.episodes.collector import end_collectors
from pipelines.evaluation.gate import (
    Evidence,
    LooksToCome,
    Verdict,
    decide_promotion,
    margin_after,
    num_alike,
    worst_case,
)
from pipelines.evaluation.guards import check_guards
from pipelines.evaluation.played import Played, play_team, versions_of
from pipelines.evaluation.statistics import (
    Families,
    Interval,
    Outcomes,
    Resampling,
    exact_interval,
    paired_interval,
    paired_sequence,
)
from pipelines.evaluation.teams import (
    Contender,
    Models,
    choose_contender,
    first_contenders,
    helpful_contender,
    num_possible,
)
from pipelines.run.run import Run, plain
from pipelines.run.serving import serve
from pipelines.stages.table import StageCall
from pipelines.tasks.splits import task_slice
from stores.by_name import open_by_name
from stores.journal.stage_results import Evaluated, Gain
from stores.registry.registry import CHAMPION
from stores.types import Purpose, Task, families

NewGroups = tuple[str, ...]
"""The model groups in which a contender differs from the champion: what identifies it in one evaluation."""
UNSEEN = Interval(mean=0.0, low=-math.inf, high=math.inf, num_tasks=0)
"""The gain on a data set of which no task was played."""


def evaluate(call: StageCall) -> Evaluated:
    """Compares the iteration's versions with the champion on the gate's tasks, until the gate is sure or all are played.

    Where a model group kept its parent because training failed, the condition says so; where all did, or `evaluate.every`
    leaves the iteration out, nothing is played and the verdict is `skipped`.
    """
    failed = call.iteration.failed_groups
    if not failed:
        return _compare(call)
    reasons = "; ".join(f"model group {group}: {reason}" for group, reason in failed.items())
    if len(failed) == len(call.run.config.model_groups):
        return Evaluated(verdict="skipped", condition=reasons, skipped=reasons, failed_groups=failed)
    evaluated = _compare(call)
    return replace(evaluated, condition=f"{evaluated.condition}; {reasons}", failed_groups=failed)


def recover(run: Run, model_group: str) -> None:
    """Ends the collectors: see `Stage.recover`."""
    end_collectors()


def _compare(call: StageCall) -> Evaluated:
    run, iteration, settings = call.run, call.iteration.number, call.run.config.evaluate
    if iteration % settings.every and iteration != run.config.iterations:
        reason = f"evaluate.every = {settings.every}"
        call.skip(reason)
        return Evaluated(verdict="skipped", condition=reason, skipped=reason)
    candidate, champion = call.iteration.models, run.champion()
    tasks = decision_tasks(run, iteration)
    play = partial(play_team, run, iteration=iteration, purpose=Purpose.GATE, progress=call.progress)
    if versions_of(candidate) == versions_of(champion):
        played = play(candidate, tasks)
        return Evaluated(
            verdict="skipped",
            condition="candidate and champion are the same",
            candidate=played.score(run),
            sampling_seconds=played.sampled.sampling_seconds,
            num_tokens=played.sampled.num_tokens,
        )
    evaluated = _look_until_sure(run, candidate, champion, tasks, play)
    serve(run, candidate)
    return evaluated


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What the gate is asked about at one look: every team on the same first tasks."""

    num_tasks: int
    champion: Played
    contenders: Mapping[NewGroups, Played]
    """The whole candidate first."""
    evidence: Mapping[NewGroups, Evidence]
    verdicts: Mapping[NewGroups, Verdict]
    chosen: NewGroups
    """The contender that the decision is about."""
    verdict: Verdict


Play = Callable[[Models, list[Task]], Played]


def _look_until_sure(run: Run, candidate: Models, champion: Models, tasks: list[Task], play: Play) -> Evaluated:
    """Looks at ever more tasks until the gate's verdict is clear or there are no more."""
    sizes = look_sizes(tasks, run.config.evaluate.tasks_per_look)
    cross_play = run.config.promote.cross_play
    contenders = first_contenders(candidate, champion, cross_play=cross_play)
    margin_spent = _margin_spent(run)
    sources = sorted({task.source for task in run.tasks("gate")})
    seconds, num_tokens = 0.0, 0
    for num_looks, num_tasks in enumerate(sizes, 1):
        examine = partial(
            _examine,
            run,
            tasks[:num_tasks],
            planned=len(tasks) if len(sizes) > 1 else None,
            family_of=families(tasks),
            sources=sources,
            num_looks=len(sizes),
            margin_spent=margin_spent,
            num_contenders=num_possible(candidate, champion, cross_play=cross_play),
        )
        old = play(champion, tasks[:num_tasks])
        played = {contender.groups: play(contender.models, tasks[:num_tasks]) for contender in contenders}
        evidence = {groups: examine(old, new) for groups, new in played.items()}
        # The teams are settled at the first look: the later ones ask about the same teams again.
        if num_looks == 1 and (helpful := helpful_contender(evidence, candidate, champion)) is not None:
            contenders = [*contenders, helpful]
            played[helpful.groups] = play(helpful.models, tasks[:num_tasks])
            evidence[helpful.groups] = examine(old, played[helpful.groups])
        verdicts = {groups: decide_promotion(run.config.promote, found) for groups, found in evidence.items()}
        chosen, verdict = choose_contender(verdicts, evidence)
        look = _Look(
            num_tasks=num_tasks,
            champion=old,
            contenders=played,
            evidence=evidence,
            verdicts=verdicts,
            chosen=chosen,
            verdict=verdict,
        )
        teams = (old, *played.values())
        seconds += sum(team.sampled.sampling_seconds for team in teams)
        num_tokens += sum(team.sampled.num_tokens for team in teams)
        if look.verdict.verdict != "inconclusive":
            break
    return _evaluated(run, look, contenders, num_looks=num_looks, sampling_seconds=seconds, num_tokens=num_tokens)


def _evaluated(run: Run, look: _Look, contenders: Sequence[Contender], *, num_looks: int, **totals: Any) -> Evaluated:
    """The report on the last look; `totals` are those of all looks."""
    new, old, chosen = look.contenders[look.chosen], look.champion, look.evidence[look.chosen]
    is_promoted, whole = look.verdict.verdict == "promote", contenders[0].groups
    return Evaluated(
        verdict=look.verdict.verdict,
        condition=look.verdict.condition,
        promotes=look.chosen if is_promoted else (),
        candidate=look.contenders[whole].score(run),
        champion=old.score(run),
        promoted=new.score(run) if is_promoted and look.chosen != whole else None,
        gain=_gain(chosen.gain),
        bound=_gain(chosen.bound),
        guards={g.figure.name: {**plain(g.found), "limit": g.limit, "state": g.state} for g in chosen.guards},
        contenders=tuple(
            {
                "groups": list(groups),
                **plain(look.verdicts[groups]),
                "gain": None if evidence.gain is None else plain(evidence.gain),
                "bound": None if evidence.bound is None else plain(evidence.bound),
            }
            for groups, evidence in look.evidence.items()
        ),
        num_looks=num_looks,
        num_unpaired=look.num_tasks - len(new.outcomes.keys() & old.outcomes.keys()),
        num_missing={"candidate": new.num_failed, "champion": old.num_failed},
        margin_spent=_margin_after(run, chosen) if is_promoted else None,
        **totals,
    )


def look_sizes(tasks: Sequence[Task], per_look: int | None) -> list[int]:
    """Numbers of tasks after which the gate is asked; the first that do not cut through a family, which stands together."""
    if per_look is None:
        return [len(tasks)]
    family_of = families(tasks)
    sizes: list[int] = []
    for size, (last, following) in enumerate(pairwise(tasks), 1):
        is_one_family = last.task_id in family_of and family_of[last.task_id] == family_of.get(following.task_id)
        if size - (sizes[-1] if sizes else 0) >= per_look and not is_one_family:
            sizes.append(size)
    return [*sizes, len(tasks)]


def _examine(
    run: Run,
    tasks: Sequence[Task],
    old: Played,
    new: Played,
    *,
    planned: int | None,
    family_of: Families,
    sources: Sequence[str],
    num_looks: int,
    num_contenders: int,
    margin_spent: float,
) -> Evidence:
    """The evidence on a team that played the champion's tasks, which come in the order of play; the families are those of all looks.

    The chance of an error that `evaluate.confidence` allows is divided among all intervals that are looked at (Bonferroni).
    A confidence sequence, which is used where several looks are `planned`, holds for all of them by itself.
    """
    settings = run.config.evaluate
    error_chance = (1 - settings.confidence) / num_contenders
    both = [t.task_id for t in tasks if t.task_id in new.outcomes and t.task_id in old.outcomes]
    pair = {t: new.outcomes[t] for t in both}, {t: old.outcomes[t] for t in both}
    filled = worst_case(
        new.outcomes,
        old.outcomes,
        tasks=[t.task_id for t in tasks],
        episodes_per_task=settings.episodes_per_task,
        lost=worst_outcome(run.credit),
    )
    compare = partial(_interval, run, families=family_of, planned=planned, confidence=1 - error_chance)
    bound = compare(*filled) if filled != pair else None
    gain = compare(*pair) if both else bound
    guards = check_guards(
        new.acted,
        old.acted,
        config=run.config.promote.guards,
        figures=run.figures,
        confidence=1 - error_chance / num_looks,
        seed=run.config.seed,
    )
    return Evidence(
        gain=gain,
        ok_share=new.ok_share,
        looks_to_come=None
        if planned is None or len(tasks) == planned
        else _to_come(tasks, new, family_of, confidence=1 - error_chance / num_looks),
        not_ok=new.not_ok(run) if new.ok_share < run.config.promote.min_ok_share else "",
        format_shares={agent: figures["format_share"] for agent, figures in new.score(run).agents.items()},
        guards=guards,
        sources=_gain_by_source(run, tasks, *filled, sources=sources, error_chance=error_chance / num_looks),
        small_sources=_small_sources(run, tasks, filled[1], sources=sources, error_chance=error_chance / num_looks),
        margin_spent=margin_spent,
        bound=bound,
        num_missing=(new.num_failed, old.num_failed),
    )


def _to_come(tasks: Sequence[Task], new: Played, family_of: Families, *, confidence: float) -> LooksToCome:
    def problem(task: Task) -> str:
        return family_of.get(task.task_id, task.task_id)

    turns: dict[str, Counter[str]] = {}
    for trace in new.traces:
        for turn in trace.turns:
            turns.setdefault(turn.agent, Counter())[problem(trace.task)] += 1
    return LooksToCome(
        num_problems=num_alike(Counter(map(problem, tasks)).values()),
        num_by_agent={agent: num_alike(by_problem.values()) for agent, by_problem in turns.items()},
        confidence=confidence,
    )


def _interval(
    run: Run, new: Outcomes, old: Outcomes, *, families: Families, planned: int | None = None, confidence: float
) -> Interval:
    """The interval of the gain. Args: planned: tasks of all looks where there are several; None for one look."""
    how = Resampling.of(run.config, families, confidence=confidence)
    if planned is not None:
        return paired_sequence(new, old, how, planned=planned)
    name = run.config.evaluate.test
    if name in ("auto", "mcnemar"):
        return (exact_interval if name == "mcnemar" else paired_interval)(new, old, how)
    gain = open_by_name(name, place="evaluate.test")(new, old, how)
    if not isinstance(gain, Interval) or not -math.inf < gain.low <= gain.mean <= gain.high < math.inf:
        raise ValueError(
            f"evaluate.test: {name} returned {gain!r}: it must be {TEST_FORM}, with finite low <= mean <= high"
        )
    return gain


def _gain_by_source(
    run: Run, tasks: Sequence[Task], new: Outcomes, old: Outcomes, *, sources: Sequence[str], error_chance: float
) -> dict[str, Interval]:
    """The gain on the tasks of each of the gate's data sets, missing episodes against the candidate; empty where there is one only."""
    if len(sources) < 2:
        return {}

    def gain(own: Sequence[Task]) -> Interval:
        if not own:
            return UNSEEN
        sides = ({t.task_id: side[t.task_id] for t in own} for side in (new, old))
        return _interval(run, *sides, families=families(own), confidence=1 - error_chance / len(sources))

    return {source: gain([task for task in tasks if task.source == source]) for source in sources}


def _small_sources(
    run: Run, tasks: Sequence[Task], outcomes: Outcomes, *, sources: Sequence[str], error_chance: float
) -> list[str]:
    """Returns the data sets that would be in doubt if the two teams were equal on each task."""
    limit = run.config.promote.max_source_loss
    if limit is None:
        return []
    equal = _gain_by_source(run, tasks, outcomes, outcomes, sources=sources, error_chance=error_chance)
    return [source for source, gain in equal.items() if gain.low < -limit]


def _margin_after(run: Run, chosen: Evidence) -> float | None:
    if run.config.promote.non_inferiority is None or chosen.deciding_gain is None:
        return None
    return margin_after(chosen.margin_spent, chosen.deciding_gain.low)


def _margin_spent(run: Run) -> float:
    """Returns what the champion's promotion left spent of the margin; 0 where no margin is set."""
    if run.config.promote.non_inferiority is None:
        return 0.0
    _, champion = run.load_team(CHAMPION)
    return float(champion.evaluation.get("margin_spent") or 0.0)


def _gain(interval: Interval | None) -> Gain | None:
    return None if interval is None else Gain(**asdict(interval))


def decision_tasks(run: Run, iteration: int) -> list[Task]:
    """The gate's tasks for one decision: fresh ones each time while they last, then a new order.

    Decisions are counted, not iterations: those that `evaluate.every` leaves out take no tasks. The last iteration's is the next one,
    and where `iterations` was raised after it, those that follow count on from it.
    """
    tasks, settings = run.tasks("gate"), run.config.evaluate
    count = settings.tasks_per_decision
    if count is None or count >= len(tasks):
        if settings.tasks_per_look is None or settings.tasks_per_look >= len(tasks):
            return tasks
        count = len(tasks)  # all, in an order by chance: the first tasks of a sorted file say nothing of the others
    earlier = run.journal.finished(run.run_id, Evaluated.STAGE) if settings.every > 1 else []
    out_of_turn = (run.key(k, Evaluated.STAGE) for k in earlier if k < iteration and k % settings.every)
    num_more = sum("skipped" not in (run.journal.ref(key) or {}) for key in out_of_turn)
    number = math.ceil(iteration / settings.every) + num_more
    return task_slice(tasks, number=number, count=count, seed=f"gate/{run.config.seed}", families=families(tasks))

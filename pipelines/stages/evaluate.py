"""evaluate: held-out tasks, candidate and champion -> evaluation traces, a paired report and what the gate says to it.

Reads: the gate's tasks; the versions just trained; the champion. Writes: evaluation episodes (their purpose keeps them
apart from training), report and verdict into the journal; `promote` acts on it. All teams play the same tasks with the same
seeds on the same engines, swapped in place and swapped back, each with proof.

    tasks of one look ── champion, candidate, with cross-play the mixed teams ──> evidence ── gate ──> sure, or more tasks
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from pipelines.episodes.sampling import Progress
from pipelines.evaluation.confidence_sequence import paired_sequence
from pipelines.evaluation.gate import Evidence, decide
from pipelines.evaluation.guards import guard
from pipelines.evaluation.played import Played, _versions, play
from pipelines.evaluation.statistics import (
    Interval,
    Outcomes,
    exact_interval,
    paired_interval,
)
from pipelines.evaluation.teams import choose, first_contenders, helpful_contender, num_possible
from pipelines.run.run import Run, plain
from pipelines.run.serving import serve
from stores.types import Purpose, Task


def evaluate(run: Run, iteration: int, *, progress: Progress | None = None) -> dict[str, Any]:
    """Compares the iteration's versions with the champion on the gate's tasks, until the gate is sure or they are played.

    Where a model group kept its parent because training failed, the decision says so; where all did there is none to make.

    Returns a report (candidate, champion, gain, per agent) with the gate's `verdict`, the `condition` that decided and the
    model groups that `promotes` names, or {"skipped": reason} with the verdict `skipped` where `evaluate.every` says so.
    """
    failed = run.failed_groups(iteration)
    if not failed:
        return _compare(run, iteration, progress=progress)
    said = "; ".join(f"model group {group}: {reason}" for group, reason in failed.items())
    if len(failed) == len(run.config.model_groups):
        return {"skipped": said, **_decision("skipped", said), "failed_groups": failed}
    report = _compare(run, iteration, progress=progress)
    return {**report, "condition": f"{report['condition']}; {said}", "failed_groups": failed}


def _compare(run: Run, iteration: int, *, progress: Progress | None) -> dict[str, Any]:
    settings = run.config.evaluate
    if iteration % settings.every and iteration != run.config.iterations:
        reason = f"evaluate.every = {settings.every}"
        return {"skipped": reason, **_decision("skipped", reason)}
    candidate, champion = run.trained(iteration), run.champion()
    tasks = decision_tasks(
        run.tasks("gate"), iteration=iteration, count=settings.tasks_per_decision, seed=run.config.seed
    )
    on_tasks = partial(play, run, iteration=iteration, purpose=Purpose.GATE, progress=progress)
    if _versions(candidate) == _versions(champion):
        same = _decision("skipped", "candidate and champion are the same")
        return {**on_tasks(candidate, tasks).report(run), "champion": None, "gain": None, **same}
    looks = _looks(len(tasks), settings.tasks_per_look)
    contenders = first_contenders(candidate, champion, cross_play=run.config.promote.cross_play)
    seconds, num_tokens = 0.0, 0
    for num_tasks in looks:
        played: dict[tuple[str, ...], Played] = {}
        evidence: dict[tuple[str, ...], Evidence] = {}
        old = on_tasks(champion, tasks[:num_tasks])
        examine = partial(
            _examine,
            run,
            old,
            planned=len(tasks) if len(looks) > 1 else None,
            num_looks=len(looks),
            num_contenders=num_possible(candidate, champion, cross_play=run.config.promote.cross_play),
        )
        for contender in contenders:
            played[contender.groups] = on_tasks(contender.models, tasks[:num_tasks])
            evidence[contender.groups] = examine(played[contender.groups])
        if num_tasks == looks[0] and (more := helpful_contender(evidence, candidate, champion)) is not None:
            contenders = [*contenders, more]
            played[more.groups] = on_tasks(more.models, tasks[:num_tasks])
            evidence[more.groups] = examine(played[more.groups])
        seconds += sum(one.sampled.sampling_seconds for one in (old, *played.values()))
        num_tokens += sum(one.sampled.num_tokens for one in (old, *played.values()))
        verdicts = {groups: decide(run.config.promote, of) for groups, of in evidence.items()}
        groups, verdict = choose(verdicts, evidence)
        if verdict.verdict != "inconclusive":
            break
    serve(run, candidate)
    return {
        **played[contenders[0].groups].report(run),
        **plain(verdict),
        "promotes": list(groups) if verdict.verdict == "promote" else [],
        "champion": old.report(run),
        "gain": plain(evidence[groups].gain),
        "guards": {g.name: {**plain(g.found), "limit": g.limit, "state": g.state} for g in evidence[groups].guards},
        "contenders": [
            {"groups": list(of), **plain(verdicts[of]), "gain": plain(found.gain)} for of, found in evidence.items()
        ],
        "num_looks": looks.index(num_tasks) + 1,
        "num_unpaired": num_tasks - len(played[groups].outcomes.keys() & old.outcomes.keys()),
        "sampling_seconds": seconds,
        "num_tokens": num_tokens,
    }


def _looks(num_tasks: int, per_look: int | None) -> list[int]:
    """Numbers of tasks after which the gate is asked."""
    if per_look is None or per_look >= num_tasks:
        return [num_tasks]
    return [*range(per_look, num_tasks, per_look), num_tasks]


def _examine(
    run: Run, old: Played, new: Played, *, planned: int | None, num_looks: int, num_contenders: int
) -> Evidence:
    """What the gate hears of a team that played the champion's tasks. Chances of an error are shared by all that is asked."""
    settings = run.config.evaluate
    doubt = (1 - settings.confidence) / num_contenders
    both = new.outcomes.keys() & old.outcomes.keys()
    pair = {t: o for t, o in new.outcomes.items() if t in both}, {t: old.outcomes[t] for t in new.outcomes if t in both}
    if planned is not None:
        gain = paired_sequence(*pair, planned=planned, confidence=1 - doubt)
    elif settings.test == "mcnemar":
        gain = exact_interval(*pair, confidence=1 - doubt)
    else:
        gain = _bootstrapped(run, *pair, confidence=1 - doubt)
    sources = sorted({trace.task.source for trace in new.traces})
    gains = {}
    for source in sources if len(sources) > 1 else ():
        of_source = {trace.task.task_id for trace in new.traces if trace.task.source == source}
        parts = ({t: o for t, o in side.items() if t in of_source} for side in pair)
        gains[source] = _bootstrapped(run, *parts, confidence=1 - doubt / num_looks / len(sources))
    agents = new.report(run)["agents"].items()
    return Evidence(
        gain=gain,
        ok_share=new.ok_share,
        format_shares={agent: figures["format_share"] for agent, figures in agents},
        guards=guard(
            new.traces,
            old.traces,
            config=run.config.promote.guards,
            confidence=1 - doubt / num_looks,
            seed=run.config.seed,
        ),
        sources=gains,
    )


def _bootstrapped(run: Run, new: Outcomes, old: Outcomes, *, confidence: float) -> Interval:
    num_samples = run.config.evaluate.bootstrap_samples
    return paired_interval(new, old, seed=run.config.seed, num_samples=num_samples, confidence=confidence)


def _decision(verdict: str, condition: str) -> dict[str, Any]:
    return {"verdict": verdict, "condition": condition, "promotes": []}


def decision_tasks(tasks: list[Task], *, iteration: int, count: int | None, seed: int) -> list[Task]:
    """The gate's tasks for one decision: fresh ones each time while they last, then a new order."""
    if count is None or count >= len(tasks):
        return tasks
    per_pass = len(tasks) // count
    number, place = divmod(iteration - 1, per_pass)
    order = list(tasks)
    random.Random(f"gate/{seed}/{number}").shuffle(order)
    return order[place * count : (place + 1) * count]

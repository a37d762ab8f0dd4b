"""against_one: what a team reached on its tasks, and what one agent answered to them again and again -> whether the team is worth it.

The single agent answers each task again until its answers take the mean completion tokens of the team's episodes (why budgets must be equal: "Reasoning
in Token Economies", arXiv 2406.06461), and its answers are used in several ways:

    majority    the most frequent answer, of several the first (self-consistency, arXiv 2203.11171)
    likeliest   the answer with the highest mean logprob of its tokens: best of n by the model's own judgment
    any         whether one of them is right: best of n with a perfect judge, which nobody has; a bound
    longer      one answer that may take all the tokens
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipelines.evaluation.statistics import Interval, Resampling, mean_interval, paired_interval
from stores.types import EpisodeRewards, Trace

Way = Literal["majority", "likeliest", "any", "longer"]
BOUND: Way = "any"
"""The way that needs a judge who is never wrong: it is reported, and decides nothing."""
Winner = Literal["team", "alone", ""]
"""Empty: no difference can be shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One episode of the single agent."""

    text: str
    outcome: float
    num_tokens: int
    logprob: float
    """Mean logprob of its completion tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneScore:
    """The single agent on the team's tasks, its answers used in one way."""

    way: Way
    is_trained: bool
    accuracy: float
    ci95: tuple[float, float]
    num_tokens: float
    """Completion tokens per task."""
    num_answers: float
    """Answers per task."""
    team_minus_alone: Interval
    """Paired over tasks: a trained agent against the trained team, an untrained one against the team before training."""


def answers_by_task(traces: Sequence[Trace], rewards: Sequence[EpisodeRewards]) -> dict[str, list[Answer]]:
    """Returns the answers to each task, by their episode's index."""
    outcome_of = {reward.episode_id: reward.outcome for reward in rewards}
    answers: dict[str, list[Answer]] = {}
    for trace in sorted(traces, key=lambda trace: trace.episode_index):
        logprobs = [logprob for turn in trace.turns for logprob in turn.rollout_logprobs]
        answer = Answer(
            text=str(trace.answer or ""),
            outcome=outcome_of[trace.episode_id],
            num_tokens=sum(len(turn.completion_token_ids) for turn in trace.turns),
            logprob=sum(logprobs) / len(logprobs) if logprobs else float("-inf"),
        )
        answers.setdefault(trace.task.task_id, []).append(answer)
    return answers


def within_budget(answers: Mapping[str, Sequence[Answer]], budget_tokens: float) -> dict[str, list[Answer]]:
    """Returns the first answers to each task, at least one, such that a task takes `budget_tokens` on average.

    Answers are not cut. What one task leaves of its tokens, or takes beyond them, is the next one's, in the order of their ids.
    """
    used: dict[str, list[Answer]] = {}
    left = 0.0
    for task in sorted(answers):
        left += budget_tokens
        used[task] = []
        for answer in answers[task]:
            if used[task] and left < answer.num_tokens / 2:
                break
            used[task].append(answer)
            left -= answer.num_tokens
    return used


def outcome_by(way: Way, answers: Sequence[Answer]) -> float:
    """Returns the outcome of what the agent says after so many answers, at least one. An empty answer has no vote."""
    if way == "any":
        return max(answer.outcome for answer in answers)
    if way == "likeliest":
        return max(answers, key=lambda answer: answer.logprob).outcome
    votes = Counter(answer.text for answer in answers if answer.text)
    chosen = votes.most_common(1)[0][0] if votes else ""
    return next((answer.outcome for answer in answers if answer.text == chosen), 0.0)


def alone_score(
    way: Way,
    answers: Mapping[str, Sequence[Answer]],
    team: Mapping[str, Sequence[float]],
    how: Resampling,
    *,
    is_trained: bool,
) -> AloneScore:
    """Returns how the agent does in one way, on the tasks that the team played, too.

    Args:
        answers: by task, those that are within the budget.
        team: by task, the outcomes of the team's episodes.
        how: its confidence is that of the difference.
    """
    tasks = sorted(answers.keys() & team.keys())
    if not tasks:
        raise ValueError("the team and the single agent have no task in common: play the test tasks again")
    alone = {task: [outcome_by(way, answers[task])] for task in tasks}
    accuracy = mean_interval(alone, replace(how, confidence=0.95))
    return AloneScore(
        way=way,
        is_trained=is_trained,
        accuracy=accuracy.mean,
        ci95=(accuracy.low, accuracy.high),
        num_tokens=sum(a.num_tokens for task in tasks for a in answers[task]) / len(tasks),
        num_answers=sum(len(answers[task]) for task in tasks) / len(tasks),
        team_minus_alone=paired_interval(
            {task: list(team[task]) for task in tasks},
            alone,
            how,
        ),
    )


def winner_of(scores: Sequence[AloneScore]) -> Winner:
    """Returns who wins: the agent if it is better than the team in one way, the team if it is better than the agent in all.

    Where nothing may be said wrongly in more than one of twenty comparisons, the scores' intervals have a confidence of 1 - 0.05 / number
    of ways that count (Bonferroni).
    """
    counted = [score.team_minus_alone for score in scores if score.way != BOUND]
    if any(gain.high < 0 for gain in counted):
        return "alone"
    return "team" if counted and all(gain.low > 0 for gain in counted) else ""


def in_words(scores: Sequence[AloneScore], *, agent: str, team_accuracy: float, team_tokens: float) -> str:
    """Returns the result in one sentence, about the agent's best way that needs no perfect judge."""
    counted = [score for score in scores if score.way != BOUND]
    winner = winner_of(scores)
    best = min(
        counted,
        key=lambda score: (score.team_minus_alone.high if winner == "alone" else -score.accuracy, score.num_tokens),
    )
    gain = best.team_minus_alone
    verdict = {"team": "The team wins", "alone": "The single agent wins", "": "No difference can be shown"}[winner]
    return (
        f"{verdict}: {agent} alone reaches {best.accuracy:.3f} ({best.way}, {best.num_answers:.1f} answers and "
        f"{best.num_tokens:.0f} tokens per task), the team {team_accuracy:.3f} with {team_tokens:.0f} tokens; team minus single agent "
        f"{gain.mean:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
    )


def to_json(score: AloneScore) -> dict[str, Any]:
    """Returns JSON values of a score."""
    gain = score.team_minus_alone
    return {
        "way": score.way,
        "is_trained": score.is_trained,
        "accuracy": score.accuracy,
        "ci95": list(score.ci95),
        "num_tokens": score.num_tokens,
        "num_answers": score.num_answers,
        "team_minus_alone": {"mean": gain.mean, "low": gain.low, "high": gain.high},
    }

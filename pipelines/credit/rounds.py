"""rounds: scores per round and agent -> what a turn is paid for them. Pure functions (seed-systems 1.3, 2.4, 2.5).

An agent that did not speak in a round has no score in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

Scores = Mapping[str, float]
"""By agent, of one round."""
Rounds = Sequence[Scores]
"""In order, from round 0."""
Timing = Literal["dense", "sparse", "accumulative", "discounted"]
Team = Literal["individual", "sum", "max", "mean", "dictator"]
Horizon = Literal["last", "current", "discounted_sum"]
Sharing = Literal["all", "individual"]


def check_choice(name: str, value: str, choices: object) -> None:
    """Raises ValueError where a setting is none of a Literal's values."""
    known = get_args(choices)
    if value not in known:
        raise ValueError(f"credit.settings.{name}: {value!r}: one of {', '.join(known)}")


def team_score(scores: Scores, agent: str, *, team: Team, dictator: str = "") -> float:
    """What a round is worth to `agent`: its own score, or the team's; 0 where nobody's counts.

    `dictator` names the agent whose score is everybody's.
    """
    if team == "individual":
        return scores.get(agent, 0.0)
    if team == "dictator":
        return scores.get(dictator, 0.0)
    values = list(scores.values())
    if not values:
        return 0.0
    return {"sum": sum(values), "max": max(values), "mean": sum(values) / len(values)}[team]


def paid_at(earned: Sequence[float], t: int, *, timing: Timing, gamma: float = 1.0) -> float:
    """Reward of round `t`, where round k earned `earned[k]`: at once, at the end, or with all that came after it."""
    if timing == "dense":
        return earned[t]
    if timing == "sparse":
        return earned[t] if t == len(earned) - 1 else 0.0
    discount = gamma if timing == "discounted" else 1.0
    return sum(discount ** (later - t) * earned[later] for later in range(t, len(earned)))


def influence(rounds: Rounds, t: int, agent: str) -> int:
    """Which way the others moved after round `t`: sign of mean over j != agent of (r_(t+1,j) - r_(t,j)), 0 at the end."""
    if t + 1 >= len(rounds):
        return 0
    changes = [rounds[t + 1][j] - rounds[t][j] for j in rounds[t] if j != agent and j in rounds[t + 1]]
    mean = sum(changes) / len(changes) if changes else 0.0
    return (mean > 0) - (mean < 0)


def shared_score(
    rounds: Rounds, t: int, agent: str, *, horizon: Horizon, sharing: Sharing, gamma: float = 0.3
) -> float:
    """MAPoRL's score of the turn that `agent` took in round `t`.

    discounted_sum = (r_(t,agent) + sum over t' > t of gamma^(t'-t) s_t') / sum over t' >= t of gamma^(t'-t), where s_t' is
    the mean over the agents (`all`) or the agent's own (`individual`). Rounds without such a score do not count.
    """
    score_of = {k: s for k, scores in enumerate(rounds) if (s := _round_score(scores, agent, sharing)) is not None}
    if horizon == "last":
        return score_of[max(score_of)]
    if horizon == "current":
        return score_of[t]
    later = [(gamma ** (k - t), s) for k, s in score_of.items() if k > t]
    return (rounds[t][agent] + sum(w * s for w, s in later)) / (1 + sum(w for w, _ in later))


def _round_score(scores: Scores, agent: str, sharing: Sharing) -> float | None:
    if sharing == "individual":
        return scores.get(agent)
    return mean_of(scores)


def mean_of(scores: Scores, *, but: str = "") -> float | None:
    """Mean over the agents other than `but`; None where there is none."""
    values = [score for agent, score in scores.items() if agent != but]
    return sum(values) / len(values) if values else None

"""rounds: scores per round and agent -> the reward of a turn. Pure functions (UMAD, arXiv 2603.01221; MAPoRL, arXiv 2502.18439).

An agent without a turn in a round has no score in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

Scores = Mapping[str, float]
"""The scores of one round, by agent."""
Rounds = Sequence[Scores]
"""The scores of all rounds, in order from round 0."""
Timing = Literal["dense", "sparse", "accumulative", "discounted"]
Team = Literal["individual", "sum", "max", "mean", "dictator"]
Horizon = Literal["last", "current", "discounted_sum"]
Sharing = Literal["all", "individual"]


def check_choice(name: str, value: str, choices: object) -> None:
    """Raises ValueError if `value` is not among the values of the Literal `choices`."""
    known = get_args(choices)
    if value not in known:
        raise ValueError(f"credit.settings.{name}: {value!r}: one of {', '.join(known)}")


def team_score(scores: Scores, agent: str, *, team: Team, dictator: str = "") -> float:
    """Returns the score of a round for `agent`: its own, or the team's; 0 if there is none.

    `dictator` names the agent whose score is used for all (UMAD, arXiv 2603.01221).
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
    """Returns the reward of round `t`, given the score `earned[k]` of each round k (UMAD, arXiv 2603.01221).

    dense: earned[t]. sparse: earned[t] in the last round, else 0. accumulative: sum over k >= t of earned[k]. discounted:
    the same with gamma^(k - t).
    """
    if timing == "dense":
        return earned[t]
    if timing == "sparse":
        return earned[t] if t == len(earned) - 1 else 0.0
    discount = gamma if timing == "discounted" else 1.0
    return sum(discount ** (later - t) * earned[later] for later in range(t, len(earned)))


def influence(rounds: Rounds, t: int, agent: str) -> int:
    """Returns the sign of mean over j != agent of (r_(t+1,j) - r_(t,j)); 0 in the last round (UMAD, arXiv 2603.01221)."""
    if t + 1 >= len(rounds):
        return 0
    changes = [rounds[t + 1][j] - rounds[t][j] for j in rounds[t] if j != agent and j in rounds[t + 1]]
    mean = sum(changes) / len(changes) if changes else 0.0
    return (mean > 0) - (mean < 0)


def shared_score(
    rounds: Rounds, t: int, agent: str, *, horizon: Horizon, sharing: Sharing, gamma: float = 0.3
) -> float:
    """Returns the score of the turn of `agent` in round `t` (MAPoRL, arXiv 2502.18439).

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
    """Returns the mean over the agents other than `but`; None if there is none."""
    values = [score for agent, score in scores.items() if agent != but]
    return sum(values) / len(values) if values else None

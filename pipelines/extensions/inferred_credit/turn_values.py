"""turn_values: turns of many episodes and how the episodes ended -> what each turn adds to the log-odds of its episode's outcome.

    log-odds of the outcome after the first k turns = b + sum over these turns t of w . x_t

x_t are hashed features (arXiv 0902.2206) of what an agent was asked and what it said: its words, pairs of a word of each, the turn as a
whole, and from which place of what was asked a word was copied. Words that nearly all turns of the agent have are left out. w and b are
fitted by logistic regression with an L2 penalty, at every beginning of every episode; those of one episode weigh as much as those of any other.

So w . x_t is the difference of the predictions from two beginnings, one turn apart, which is return redistribution (RUDDER, arXiv 1806.07857).
A turn whose effect goes through a later one is paid when it is made: until the later one is there, nothing else explains the outcome. That the
parts simply add up is the form of Efroni et al. (arXiv 2008.06036).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, sparse
from scipy.sparse.linalg import LinearOperator, aslinearoperator
from scipy.special import expit

from stores.traces.conventions import word_grams
from stores.types import Turn

NUM_BUCKETS = 1 << 18
MAX_WORDS = 16
"""Of what was said the first, of what was asked the last: their pairs are features, too."""
MAX_CHARS = 1000
"""Of a longer completion the beginning is read, of a longer prompt the end."""
COMMON_SHARE = 0.9
"""Words that are in so many of an agent's texts, such as those of its prompt's frame, tell its turns not apart."""
L2_PENALTY = 1.0
MAX_STEPS = 200

Features = NDArray[np.int32]
"""Buckets of the features of one turn."""


def turn_features(episodes: Sequence[Sequence[Turn]]) -> list[list[Features]]:
    """Returns the features of the turns of each episode; which words are common is counted over all of them."""
    common = _common([turn for turns in episodes for turn in turns])
    return [[_features(turn, common[turn.agent]) for turn in turns] for turns in episodes]


def fit(episodes: Sequence[Sequence[Features]], outcomes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns w, [NUM_BUCKETS], fitted to episodes, by the features of their turns, and their outcomes [number of episodes] in [0, 1]."""
    turns = [features for episode in episodes for features in episode]
    w = np.zeros(NUM_BUCKETS)
    if turns:
        used, at = np.unique(np.concatenate(turns), return_inverse=True)
        ends = np.cumsum([0, *map(len, turns)])
        x = sparse.csr_matrix((np.ones(len(at)), at, ends), shape=(len(turns), len(used)))
        sums, episode_of, weights = beginnings([len(episode) for episode in episodes])
        of_beginnings = aslinearoperator(sums) @ aslinearoperator(x)
        w[used] = logistic_regression(of_beginnings, outcomes[episode_of], weights, l2_penalty=L2_PENALTY)[1]
    return w


def beginnings(lengths: Sequence[int]) -> tuple[sparse.csr_matrix, NDArray[np.int64], NDArray[np.float64]]:
    """Returns all beginnings of episodes of so many turns, one of which ends with each of the T turns.

    They are [T, T], the turns of each; [T], its episode; and [T], its weight: those of an episode weigh one together.
    """
    blocks = [np.tril(np.ones((n, n))) for n in lengths if n]
    episode_of = np.repeat(np.arange(len(lengths)), lengths)
    return sparse.block_diag(blocks, format="csr"), episode_of, 1 / np.array(lengths)[episode_of]


def logistic_regression(
    x: NDArray[np.float64] | LinearOperator,
    outcomes: NDArray[np.float64],
    weights: NDArray[np.float64],
    *,
    l2_penalty: float = 0.0,
    bounds: tuple[float | None, float | None] = (None, None),
) -> tuple[float, NDArray[np.float64]]:
    """Returns the penalized log-likelihood and the coefficients [m] of the regression of outcomes [n] in [0, 1] on `x` [n, m].

    Args: weights: [n]; bounds: of each coefficient. The bias has neither penalty nor bounds.
    """

    def loss(parameters: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        w, bias = parameters[:-1], parameters[-1]
        logits = x @ w + bias
        error = weights * (expit(logits) - outcomes)
        value = (weights * (np.logaddexp(0, logits) - outcomes * logits)).sum() + l2_penalty / 2 * (w @ w)
        return float(value), np.append(x.T @ error + l2_penalty * w, error.sum())

    num = x.shape[1]
    optimum = optimize.minimize(
        loss,
        np.zeros(num + 1),
        jac=True,
        method="L-BFGS-B",
        bounds=[bounds] * num + [(None, None)],
        options={"maxiter": MAX_STEPS},
    )
    return -float(optimum.fun), optimum.x[:-1]


def _features(turn: Turn, common: set[str]) -> Features:
    asked = [gram for gram in _asked(turn) if gram not in common][-MAX_WORDS:]
    said = [gram for gram in _said(turn) if gram not in common][:MAX_WORDS]
    places = {word: place for place, word in reversed(list(enumerate(asked)))}
    names = ["", *said, f"{turn.prompt_text}\x1e{turn.completion_text}"]
    names += [f"{a}\x1f{s}" for a in asked for s in said]
    names += [f"copied\x1f{places.get(word, 'no')}" for word in said]
    return np.array(
        [crc32(f"{turn.agent}\x1d{name}".encode(errors="replace")) % NUM_BUCKETS for name in names], dtype=np.int32
    )


def _asked(turn: Turn) -> list[str]:
    return word_grams(turn.prompt_text[-MAX_CHARS:])


def _said(turn: Turn) -> list[str]:
    """Returns what a turn said: the fields that its contract read, then the words of the completion."""
    fields = [f"{name}={value}"[:MAX_CHARS] for name, value in sorted(turn.fields.items())]
    return [*fields, *word_grams(turn.completion_text[:MAX_CHARS])]


def _common(turns: Sequence[Turn]) -> dict[str, set[str]]:
    """Returns by agent the words that nearly all of its turns have; none of an agent with a single turn."""
    numbers = Counter(turn.agent for turn in turns)
    counts = {agent: Counter[str]() for agent in numbers}
    for turn in turns:
        counts[turn.agent].update({*_asked(turn), *_said(turn)})
    return {
        agent: {gram for gram, count in counts[agent].items() if count > COMMON_SHARE * number} if number > 1 else set()
        for agent, number in numbers.items()
    }

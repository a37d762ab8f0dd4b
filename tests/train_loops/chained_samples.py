"""Samples of episodes with several turns: some extend each other exactly, some do not; agents differ in temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from train_loops.rows.samples import Sample

VOCABULARY = 250
TEMPERATURES = {"a": 1.0, "b": 0.7}

CHAINS = [(0, 1, 2), (3, 5), (4, 6), (7, 8), (9,), (10,)]
"""What `chained_samples` holds."""


def sample(
    episode: str,
    turn_index: int,
    prompt: Sequence[int],
    completion: Sequence[int],
    *,
    agent: str = "a",
    **changes: Any,
) -> Sample:
    """One turn; its reward depends on its place only."""
    row = Sample(
        episode_id=episode,
        group_id="g",
        task_id="t",
        agent=agent,
        turn_index=turn_index,
        round_index=turn_index,
        episode_round=turn_index,
        token_ids=[*prompt, *completion],
        prompt_length=len(prompt),
        rollout_logprobs=[-5.0] * len(completion),
        reward=float(np.sin(7.0 * turn_index + sum(map(ord, episode)))),
        temperature=TEMPERATURES.get(agent, 1.0),
        max_tokens=16,
        status="ok",  # type: ignore[arg-type]
    )
    return replace(row, **changes)


def chained_samples() -> list[Sample]:
    """Eleven turns of four episodes, in the chains `CHAINS`."""
    random = np.random.default_rng(0)

    def words(num: int) -> list[int]:
        return random.integers(3, VOCABULARY, num).tolist()

    samples = []
    prompt = words(5)
    for turn_index, (completion, reply) in enumerate([(3, 2), (6, 0), (4, 0)]):  # one conversation of two agents
        samples.append(sample("talk", turn_index, prompt, words(completion), agent="aba"[turn_index]))
        prompt = [*samples[-1].token_ids, *words(reply)]
    for turn_index in range(4):  # two conversations of one episode, in turn
        before = samples[-2].token_ids if turn_index > 1 else []
        samples.append(sample("two", turn_index, [*before, *words(4)], words(5), agent="ab"[turn_index % 2]))
    samples.append(sample("branch", 0, words(17), words(2)))
    root = samples[-1].token_ids
    samples.append(sample("branch", 1, [*root, *words(3)], words(4), agent="b"))
    samples.append(sample("branch", 2, [*root, *words(1)], words(8)))  # a second one from the same turn
    samples.append(sample("rewritten", 0, [*root[1:], *words(3)], words(1)))
    return samples

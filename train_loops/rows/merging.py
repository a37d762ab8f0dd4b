"""merging: samples -> chains of turns that extend each other exactly, each of which is laid as one row.

    turn 0  prompt A  completion B
    turn 1  prompt A B C  completion D          ->  one row A B C D E F with the completions B, D and F
    turn 2  prompt A B C D E  completion F

Attention is causal, so a completion's logprobs, and its gradient, are the same in the chain's row as in its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from train_loops.rows.samples import Sample

Chain = tuple[int, ...]
"""Samples of one row, in time order. The last one's tokens are the row's; every other one's begin it."""


def chains_of(samples: Sequence[Sample]) -> list[Chain]:
    """Puts every sample into exactly one chain; chains are in the order of their first samples.

    A turn continues a chain of its episode if its prompt starts with exactly the token ids of the chain's last turn,
    prompt and completion; text that only reads the same does not count. Where several chains fit, the longest is taken,
    and where turns branch off the same turn, the first of them continues it. Agents and temperatures may differ. Turns
    that extend nothing are chains of one.

    Args:
        samples: of one model group.
    """
    chains: dict[str, list[list[int]]] = {}
    for i in sorted(range(len(samples)), key=lambda i: (samples[i].turn_index, i)):
        of_episode = chains.setdefault(samples[i].episode_id, [])
        extended = [chain for chain in of_episode if _extends(samples[i], samples[chain[-1]])]
        if extended:
            max(extended, key=lambda chain: len(samples[chain[-1]].token_ids)).append(i)
        else:
            of_episode.append([i])
    return sorted(tuple(chain) for of_episode in chains.values() for chain in of_episode)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSavings:
    """How many tokens merging saves."""

    tokens: int
    """Prompt and completion tokens of the turns."""
    unique_tokens: int
    """The tokens that are computed where chains are merged; a shared beginning is counted for the turn that came first."""

    @property
    def saved_share(self) -> float:
        """Returns the share of the tokens that are not computed again."""
        return 1 - self.unique_tokens / max(self.tokens, 1)


def row_savings(samples: Sequence[Sample], chains: Sequence[Chain]) -> dict[str, RowSavings]:
    """Returns per agent how many tokens merging `chains` saves."""
    tokens: dict[str, int] = {}
    unique: dict[str, int] = {}
    for chain in chains:
        num_shared = 0
        for sample in (samples[i] for i in chain):
            num_tokens = len(sample.token_ids)
            tokens[sample.agent] = tokens.get(sample.agent, 0) + num_tokens
            unique[sample.agent] = unique.get(sample.agent, 0) + num_tokens - num_shared
            num_shared = num_tokens
    return {agent: RowSavings(tokens=n, unique_tokens=unique[agent]) for agent, n in tokens.items()}


def unique_token_share(savings: Mapping[str, RowSavings]) -> float:
    """Returns unique tokens over tokens, of all agents together."""
    return sum(s.unique_tokens for s in savings.values()) / max(sum(s.tokens for s in savings.values()), 1)


def _extends(later: Sample, earlier: Sample) -> bool:
    length = len(earlier.token_ids)
    if length > later.prompt_length:
        return False
    # Comparing the last token first is cheap, and rules most turns out whose prompt was rewritten.
    return later.token_ids[length - 1] == earlier.token_ids[-1] and list(later.token_ids[:length]) == list(
        earlier.token_ids
    )

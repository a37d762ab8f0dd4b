"""episodes: traces of all model groups and their rewards -> the features of each turn for the whole-team learner.

Model groups may have different tokenizers, so texts are represented by hashed words and pairs of words, not by tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from stores.traces.conventions import word_grams
from stores.types import EpisodeRewards, Trace, Turn
from train_loops.rows.samples import is_trainable

NUM_BUCKETS = 1 << 12
MAX_FEATURES = 1024
"""Per turn; of a longer record only the last ones are used."""
TEXTS = ("episode_id", "group_id", "agent", "model_group")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamTurn:
    """One turn, as the whole-team learner sees it."""

    turn_index: int
    agent: str
    model_group: str
    round_index: int
    reward: float
    """Increments: what the turn added. Returns: the episode's, on its last turn only (see `team_episodes`)."""
    state: NDArray[np.int32]
    """Buckets of the features of the task, of all earlier completions and of the agent that acts now."""
    action: NDArray[np.int32]
    """Buckets of the features of the completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamEpisode:
    """One episode's turns in time order, at least one."""

    episode_id: str
    group_id: str
    turns: tuple[TeamTurn, ...]


def team_episodes(
    traces: Sequence[Trace],
    rewards: Mapping[str, EpisodeRewards],
    *,
    credit_kind: Literal["returns", "increments"],
    train_mixed_versions: bool,
) -> list[TeamEpisode]:
    """Returns the episodes that train, sorted by id; variants, turns without a reward and episodes without any are left out.

    One outcome must not be counted once per turn: where a rule gives `returns`, the mean of the turns' rewards is what the
    team earned, and it becomes the reward of the last turn.
    """
    episodes = []
    for trace in traces:
        reward_of = (
            {r.turn_index: r.reward for r in rewards[trace.episode_id].rewards} if trace.episode_id in rewards else {}
        )
        is_in = not trace.variant and is_trainable(trace, train_mixed_versions=train_mixed_versions)
        turns = [t for t in sorted(trace.turns, key=lambda t: t.turn_index) if t.turn_index in reward_of]
        if not is_in or not turns:
            continue
        turn_rewards = [reward_of[t.turn_index] for t in turns]
        if credit_kind == "returns":
            turn_rewards = [0.0] * (len(turns) - 1) + [sum(turn_rewards) / len(turn_rewards)]
        episodes.append(
            TeamEpisode(
                episode_id=trace.episode_id,
                group_id=trace.group_id,
                turns=tuple(_turn(trace, turn, reward) for turn, reward in zip(turns, turn_rewards, strict=True)),
            )
        )
    return sorted(episodes, key=lambda episode: episode.episode_id)


def hashed(tag: str, text: str) -> list[int]:
    """Returns the buckets of the words and pairs of neighbouring words of `text`; under another tag they are others.

    This is the hashing trick (arXiv 0902.2206).
    """
    return [crc32(f"{tag}\x1f{gram}".encode()) % NUM_BUCKETS for gram in word_grams(text)]


def _turn(trace: Trace, turn: Turn, reward: float) -> TeamTurn:
    before = [t for t in trace.turns if t.turn_index < turn.turn_index]
    state = hashed("task", trace.task.prompt)
    for earlier in sorted(before, key=lambda t: t.turn_index):
        state += hashed(f"by {earlier.agent}", earlier.completion_text)
    who = [*hashed("acts", turn.agent), *hashed("acts after", f"turn{min(len(before), 16)}")]
    return TeamTurn(
        turn_index=turn.turn_index,
        agent=turn.agent,
        model_group=turn.model_group,
        round_index=turn.round_index,
        reward=reward,
        # Of a long record the oldest features are dropped, never who acts: values would be those of any agent.
        state=np.array([*who, *state[-(MAX_FEATURES - len(who)) :]], dtype=np.int32),
        action=np.array(hashed(f"says {turn.agent}", turn.completion_text)[:MAX_FEATURES], dtype=np.int32),
    )


def write_replay(path: Path, episodes: Sequence[TeamEpisode]) -> None:
    """Writes one row per turn; the features of all turns lie end to end."""
    rows = [(episode, turn) for episode in episodes for turn in episode.turns]
    np.savez_compressed(
        path,
        allow_pickle=False,
        episode_id=np.array([episode.episode_id for episode, _ in rows]),
        group_id=np.array([episode.group_id for episode, _ in rows]),
        agent=np.array([turn.agent for _, turn in rows]),
        model_group=np.array([turn.model_group for _, turn in rows]),
        numbers=np.array([(turn.turn_index, turn.round_index) for _, turn in rows], dtype=np.int64),
        reward=np.array([turn.reward for _, turn in rows], dtype=np.float64),
        sizes=np.array([(len(turn.state), len(turn.action)) for _, turn in rows], dtype=np.int64),
        features=np.concatenate([np.concatenate([turn.state, turn.action]) for _, turn in rows]).astype(np.int32),
    )


def read_replay(path: Path) -> list[TeamEpisode]:
    """Reads what `write_replay` wrote, in its order."""
    with np.load(path, allow_pickle=False) as data:
        columns = {name: data[name] for name in data.files}
    parts = np.split(columns["features"], np.cumsum(columns["sizes"].reshape(-1))[:-1])
    turns_of: dict[tuple[str, str], list[TeamTurn]] = {}
    for i, (turn_index, round_index) in enumerate(columns["numbers"].tolist()):
        texts = {name: str(columns[name][i]) for name in TEXTS}
        turns_of.setdefault((texts["episode_id"], texts["group_id"]), []).append(
            TeamTurn(
                turn_index=turn_index,
                agent=texts["agent"],
                model_group=texts["model_group"],
                round_index=round_index,
                reward=float(columns["reward"][i]),
                state=parts[2 * i],
                action=parts[2 * i + 1],
            )
        )
    return [TeamEpisode(episode_id=e, group_id=g, turns=tuple(turns)) for (e, g), turns in turns_of.items()]

"""replay: team episodes <-> one compressed file, so that a mixer goes on learning from earlier iterations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from train_loops.team.episodes import TeamEpisode, TeamTurn

TEXTS = ("episode_id", "group_id", "agent", "model_group")


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

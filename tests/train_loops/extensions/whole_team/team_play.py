"""Made-up team episodes: tasks, agents and what each said, without models."""

from __future__ import annotations

import numpy as np

from train_loops.extensions.whole_team.episodes import TeamEpisode, TeamTurn, hashed


def turn(index: int, agent: str, *, state: str, says: str, reward: float = 0.0, round_index: int = 0) -> TeamTurn:
    return TeamTurn(
        turn_index=index,
        agent=agent,
        model_group=agent,
        round_index=round_index,
        reward=reward,
        state=np.array([*hashed("acts", agent), *hashed("task", state)], dtype=np.int32),
        action=np.array(hashed(f"says {agent}", says), dtype=np.int32),
    )


def free_rider_episodes(*, num_tasks: int, group_size: int, seed: int) -> list[TeamEpisode]:
    """A worker says right or wrong, and the team earns 1 or 0; a rider says heads or tails, which nobody needs."""
    random = np.random.default_rng(seed)
    episodes = []
    for task in range(num_tasks):
        for index in range(group_size):
            is_right, coin = random.random() < 0.5, random.random() < 0.5
            episodes.append(
                TeamEpisode(
                    episode_id=f"{seed}-{task}-{index}",
                    group_id=f"{seed}-{task}",
                    turns=(
                        turn(0, "worker", state=f"task {task}", says="right" if is_right else "wrong"),
                        turn(
                            1, "rider", state=f"task {task}", says="heads" if coin else "tails", reward=float(is_right)
                        ),
                    ),
                )
            )
    return episodes

"""The whole team's learner: who contributed is told apart, values are learnt, and its state goes on where it was."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from team_play import free_rider_episodes, turn

from train_loops.config import OptimizerConfig, TeamConfig, TrainConfig
from train_loops.extensions.whole_team.critic import central_advantages, learn_values, turn_advantages, turns_of
from train_loops.extensions.whole_team.episodes import TeamEpisode
from train_loops.extensions.whole_team.learner import WEIGHTS_FILE, TeamLearner
from train_loops.extensions.whole_team.models import CentralCritic
from train_loops.extensions.whole_team.value_norm import ValueNorm

pytestmark = pytest.mark.test


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for each other at every small operation are many times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LR = OptimizerConfig(lr=3e-3, max_grad_norm=10.0)


def config(mixer: str = "none", algorithm: str = "dr_mas", **changes: object) -> TrainConfig:
    if mixer == "qmix":
        changes["mixer_size"] = 8
    team = TeamConfig(mixer=mixer, optimizer=LR, num_epochs=20, embedding_size=16, hidden_size=32, **changes)
    return TrainConfig(algorithm=algorithm, team=team)


@pytest.mark.parametrize("mixer", ["vdn", "qmix"])
def test_the_credit_of_a_free_rider_is_near_nothing_and_the_workers_is_the_outcome(mixer: str) -> None:
    learner = TeamLearner(config(mixer), seed=0)
    for seed in range(4):
        episodes = free_rider_episodes(num_tasks=8, group_size=8, seed=seed)
        signal, metrics = learner.learn(episodes, seed=seed)
    outcome = {episode.episode_id: episode.turns[-1].reward for episode in episodes}
    worker = np.array([signal.credit[e, 0] for e in outcome])
    rider = np.array([signal.credit[e, 1] for e in outcome])
    won = np.array(list(outcome.values()))
    assert worker[won == 1].min() > worker[won == 0].max()
    assert rider.std() < worker.std() / 5
    assert metrics["train/td_loss"] < 0.1 and metrics["train/replayed_episodes"] == 256


def test_while_the_mixer_warms_up_turns_keep_their_own_rewards() -> None:
    learner = TeamLearner(config("vdn", warmup_iterations=1), seed=0)
    episodes = free_rider_episodes(num_tasks=2, group_size=4, seed=0)
    assert learner.learn(episodes, seed=0)[0].credit is None
    assert learner.learn(episodes, seed=1)[0].credit is not None


def test_the_central_critic_pays_the_turn_after_which_more_can_be_expected() -> None:
    """The rider's state tells what the worker said: once the critic knows it, the worker's turn is what moves the value."""

    def made_up(seed: int) -> list[TeamEpisode]:
        episodes = []
        for episode in free_rider_episodes(num_tasks=8, group_size=8, seed=seed):
            first, second = episode.turns
            says = "right" if second.reward else "wrong"
            second = turn(1, "rider", state=f"so far {says}", says="heads", reward=second.reward)
            episodes.append(
                TeamEpisode(episode_id=episode.episode_id, group_id=episode.group_id, turns=(first, second))
            )
        return episodes

    learner = TeamLearner(config(algorithm="mappo", gae_lambda=0.0, gamma=1.0), seed=0)
    for seed in range(8):
        episodes = made_up(seed)
        signal, metrics = learner.learn(episodes, seed=seed)
    won = np.array([episode.turns[-1].reward for episode in episodes])
    worker = np.array([signal.advantages[e.episode_id, 0] for e in episodes])
    assert worker[won == 1].min() > worker[won == 0].max()
    assert metrics["train/explained_variance"] > 0.4


def slow_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum_k (gamma lambda)^k delta_{t+k}, term by term."""
    values = [*values, 0.0]
    deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(len(rewards) - t)) for t in range(len(rewards))]


def test_advantages_chain_over_the_whole_teams_turns_as_in_a_slow_reference() -> None:
    torch.manual_seed(0)
    settings = TeamConfig(gamma=0.9, gae_lambda=0.8, embedding_size=4, hidden_size=4)
    critic, norm = CentralCritic(settings), ValueNorm().updated([1.0, 3.0])
    episodes = [
        TeamEpisode(
            episode_id=name,
            group_id="g",
            turns=tuple(turn(i, "ab"[i % 2], state=f"{name} {i}", says="x", reward=r) for i, r in enumerate(rewards)),
        )
        for name, rewards in (("e", [0.1, 0.0, 1.0]), ("f", [0.5]))
    ]
    advantages, returns, values = central_advantages(critic, norm, episodes, config=settings)
    want = [*slow_gae([0.1, 0.0, 1.0], values[:3].tolist(), 0.9, 0.8), *slow_gae([0.5], values[3:].tolist(), 0.9, 0.8)]
    np.testing.assert_allclose(advantages, want)
    np.testing.assert_allclose(returns, advantages + values)
    by_turn = turn_advantages(episodes, advantages, whitened="none")
    assert by_turn["e", 2] == pytest.approx(want[2]) and by_turn["f", 0] == pytest.approx(want[3])
    per_agent = turn_advantages(episodes, advantages, whitened="agent")
    assert per_agent["e", 0] + per_agent["e", 2] + per_agent["f", 0] == pytest.approx(0, abs=1e-9)
    assert per_agent["e", 1] == 0, "b acted once: nothing to compare with"


@pytest.mark.parametrize(
    "settings", [config("qmix", warmup_iterations=1), config(algorithm="happo")], ids=["qmix", "happo"]
)
def test_a_stored_learner_goes_on_as_if_nothing_had_happened(tmp_path: Path, settings: TrainConfig) -> None:
    first = TeamLearner(settings, seed=0)
    first.learn(free_rider_episodes(num_tasks=3, group_size=4, seed=0), seed=0)
    first.save(tmp_path)
    second = TeamLearner(settings, seed=9)
    assert second.load(tmp_path)
    later = free_rider_episodes(num_tasks=3, group_size=4, seed=1)
    a, b = (learner.learn(later, seed=5) for learner in (first, second))
    assert a == b
    assert not TeamLearner(config("vdn"), seed=0).load(tmp_path), "another kind begins afresh"


@pytest.mark.parametrize("kind", [{"mixer": "qmix"}, {"algorithm": "mappo"}], ids=["qmix", "mappo"])
def test_the_learning_rate_follows_its_schedule_also_after_a_restart(tmp_path: Path, kind: dict[str, str]) -> None:
    """Steps 0 to 9 have a falling rate, later ones have none: each job makes 5 steps."""
    optimizer = OptimizerConfig(lr=3e-3, schedule="linear", decay_steps=10)
    settings = config(**kind)
    team = settings.team.model_copy(update={"optimizer": optimizer, "num_epochs": 5, "num_minibatches": 1})
    settings = settings.model_copy(update={"team": team})
    episodes = free_rider_episodes(num_tasks=3, group_size=4, seed=0)
    weights = []
    for job in range(3):
        learner = TeamLearner(settings, seed=0)
        assert job == 0 or learner.load(tmp_path)
        learner.learn(episodes, seed=job)
        learner.save(tmp_path)
        weights.append({n: x for n, x in load_file(tmp_path / WEIGHTS_FILE).items() if n.startswith("model.")})
    has_moved = [any(not torch.equal(x, after[n]) for n, x in before.items()) for before, after in pairwise(weights)]
    assert has_moved == [True, False]


def test_value_norm_is_the_debiased_mean_and_deviation() -> None:
    norm = ValueNorm().updated([0.0, 2.0]).updated([4.0, 6.0])
    np.testing.assert_allclose(norm.normalized([3.0]), [0.0], atol=1e-4)
    np.testing.assert_allclose(norm.normalized([3.0 + np.sqrt(5.0)]), [1.0], rtol=1e-4)
    np.testing.assert_allclose(norm.denormalized(norm.normalized([-1.0, 7.5])), [-1.0, 7.5])
    assert ValueNorm().normalized([2.0]).tolist() == [2.0], "nothing seen: nothing changed"


def test_values_are_clipped_around_what_the_critic_said_not_around_a_new_norm_of_it() -> None:
    """A fresh critic says 0 of a normal state; returns are 1 and 0. Around 0 renormalised the higher ones would never pull."""
    config = TeamConfig(num_epochs=200, optimizer={"lr": 1e-2}, value_clip=0.2)
    episodes = free_rider_episodes(num_tasks=1, group_size=8, seed=3)
    critic, norm = CentralCritic(config), ValueNorm()
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.zero_()
    returns = np.array([float(i % 2) for i in range(len(turns_of(episodes)))])
    norm = norm.updated(returns)
    optimizer = torch.optim.Adam([critic.head[-1].bias], lr=1e-2)
    learn_values(critic, optimizer, norm, episodes, returns=returns, config=config, seed=0)
    with torch.no_grad():
        values = norm.denormalized(critic(turns_of(episodes)).double().numpy())
    assert values == pytest.approx(returns.mean(), abs=0.03)

"""VDN (arXiv 1706.05296) and QMIX (1803.11485): literal numbers, monotonicity, gradients against a slow float64 reference."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from team_play import turn
from torch import nn

from train_loops.config import TeamConfig, TrainConfig
from train_loops.extensions.whole_team.episodes import TeamEpisode
from train_loops.extensions.whole_team.learner import TeamLearner
from train_loops.extensions.whole_team.mixers import QMixer, qmix_total, vdn_total
from train_loops.extensions.whole_team.models import TeamQ, batch_of
from train_loops.extensions.whole_team.q import follow, q_credit, temporal_error

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that wait for each other at every small operation are many times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SMALL = TeamConfig(mixer="qmix", embedding_size=3, mixer_size=2, hidden_size=16)


def test_qmix_has_its_literal_value() -> None:
    total = qmix_total(
        torch.tensor([0.5, -0.2]),
        torch.tensor([0, 0]),
        w1=torch.tensor([[1.0, 0.5], [0.2, 2.0]]),
        b1=torch.tensor([[0.1, -0.3]]),
        wf=torch.tensor([[0.7, 1.5]]),
        v=torch.tensor([0.05]),
    )
    assert total.item() == pytest.approx(-0.101558, abs=1e-6)


def test_vdn_is_the_sum_over_any_number_of_turns() -> None:
    total = vdn_total(torch.tensor([0.5, -0.2, 1.0]), torch.tensor([0, 0, 2]), 3)
    torch.testing.assert_close(total, torch.tensor([0.3, 0.0, 1.0]))


@pytest.mark.parametrize("seed", range(20))
def test_the_teams_q_never_falls_where_a_turns_q_grows(seed: int) -> None:
    torch.manual_seed(seed)
    mixer = QMixer(5, mixer_size=4, hidden_size=8)
    q, step_of_turn = torch.randn(6, requires_grad=True), torch.tensor([0, 0, 0, 1, 1, 2])
    states = 3 * torch.randn(6, 5)
    mixer(q, step_of_turn, states, states[[0, 3, 5]]).sum().backward()
    assert (q.grad >= 0).all() and (q.grad > 0).any()


def test_without_a_turn_the_team_has_what_it_would_have_had_with_another_q_there() -> None:
    torch.manual_seed(0)
    mixer = QMixer(5, mixer_size=4, hidden_size=8)
    q, step_of_turn, states = torch.randn(5), torch.tensor([0, 0, 1, 1, 1]), torch.randn(5, 5)
    default = torch.randn(5)
    got = mixer.without(q, default, step_of_turn, states, states[[0, 2]])
    for i in range(5):
        changed = q.clone()
        changed[i] = default[i]
        want = mixer(changed, step_of_turn, states, states[[0, 2]])[step_of_turn[i]]
        torch.testing.assert_close(got[i], want)


def two_rounds(number: int) -> TeamEpisode:
    return TeamEpisode(
        episode_id=str(number),
        group_id="g",
        turns=(
            turn(0, "a", state="x y", says=f"one {number}", reward=0.1),
            turn(1, "b", state="x y", says="two three", reward=0.2),
            turn(2, "a", state="y z", says=f"four {number}", reward=1.0, round_index=1),
        ),
    )


def slow_perceptron(net: nn.Sequential, x: list[float]) -> list[float]:
    for layer in net:
        if isinstance(layer, nn.Linear):
            w, b = layer.weight, layer.bias
            x = [sum(w[o][i] * x[i] for i in range(len(x))) + b[o] for o in range(len(w))]
        else:
            x = [torch.relu(v) for v in x]
    return x


def slow_total(model: TeamQ, episode: TeamEpisode, round_index: int) -> torch.Tensor:
    """Q_tot of one round, number by number."""

    def mean_of(bag: nn.EmbeddingBag, ids: list[int]) -> list[torch.Tensor]:
        return [sum(bag.weight[i][k] for i in ids) / len(ids) for k in range(bag.weight.shape[1])]

    turns = [t for t in episode.turns if t.round_index == round_index]
    states = [mean_of(model.states.bag, t.state.tolist()) for t in turns]
    size = model.mixer.b1.weight.shape[0]
    b1 = slow_perceptron(nn.Sequential(model.mixer.b1), states[0])
    pre = list(b1)
    for t, state in zip(turns, states, strict=True):
        action = mean_of(model.actions.bag, t.action.tolist())
        [q] = slow_perceptron(model.head, [*state, *action, *(s * a for s, a in zip(state, action, strict=True))])
        w1 = slow_perceptron(model.mixer.w1, state)
        pre = [pre[e] + q * abs(w1[e]) for e in range(size)]
    hidden = [p if p > 0 else torch.exp(p) - 1 for p in pre]
    wf, [v] = slow_perceptron(model.mixer.wf, states[0]), slow_perceptron(model.mixer.v, states[0])
    return sum(h * abs(w) for h, w in zip(hidden, wf, strict=True)) + v


def test_loss_and_every_gradient_are_those_of_a_slow_reference() -> None:
    torch.manual_seed(1)
    model = TeamQ(SMALL).double()
    target = TeamQ(SMALL).double()
    episodes = [two_rounds(1), two_rounds(2)]
    error = temporal_error(model, target, batch_of(episodes), gamma=0.9)
    error.square().mean().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    errors = []
    for episode in episodes:
        with torch.no_grad():
            later = slow_total(target, episode, 1)
        errors.append(slow_total(model, episode, 0) - (0.3 + 0.9 * later))
        errors.append(slow_total(model, episode, 1) - 1.0)
    torch.testing.assert_close(error.detach(), torch.stack(errors).detach())
    (sum(e * e for e in errors) / 4).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
        torch.testing.assert_close(got[name], parameter.grad, msg=lambda m, name=name: f"{name}: {m}")
    assert all(p.grad is None for p in target.parameters())


def test_the_target_follows_slowly_mixer_and_critics_alike() -> None:
    model, target = TeamQ(SMALL), TeamQ(SMALL)
    before = copy.deepcopy(target.state_dict())
    follow(target, model, tau=0.25)
    for name, now in target.state_dict().items():
        torch.testing.assert_close(now, 0.75 * before[name] + 0.25 * model.state_dict()[name])
    assert any(name.startswith("mixer.") for name in before)


def replaced(episode: TeamEpisode, place: int, **changes: Any) -> TeamEpisode:
    turns = list(episode.turns)
    turns[place] = replace(turns[place], **changes)
    return replace(episode, turns=tuple(turns))


@pytest.mark.parametrize("mixer", ["vdn", "qmix"])
def test_a_turns_credit_is_q_tot_minus_its_mean_had_the_agent_done_in_its_place_what_it_did_elsewhere(
    mixer: str,
) -> None:
    torch.manual_seed(2)
    model = TeamQ(SMALL.model_copy(update={"mixer": mixer}))
    second = replaced(two_rounds(2), 2, state=turn(2, "a", state="so far it went badly", says="").state)
    episodes = [two_rounds(1), second]
    other = {("1", i): second.turns[i].action for i in range(3)} | {
        ("2", i): episodes[0].turns[i].action for i in range(3)
    }

    def total(episode: TeamEpisode, place: int) -> float:
        with torch.no_grad():
            q, totals = model(batch := batch_of([episode]))
            return float(q[place] if mixer == "vdn" else totals[batch.step_of_turn[place]])

    def only_q(episode: TeamEpisode, place: int, action: Any) -> float:
        with torch.no_grad():
            return float(model(batch_of([replaced(episode, place, action=action)]))[0][place])

    credit = q_credit(model, episodes)
    assert list(credit) == [("1", 0), ("1", 1), ("1", 2), ("2", 0), ("2", 1), ("2", 2)]
    for episode in episodes:
        for place, done in enumerate(episode.turns):
            qs = [only_q(episode, place, a) for a in (done.action, other[episode.episode_id, place])]
            mean = sum(qs) / 2
            if mixer == "vdn":
                want = qs[0] - mean
            else:
                batch = batch_of([episode])
                with torch.no_grad():
                    default = model(batch)[0].clone()
                    default[place] = mean
                    without = float(model.without(batch, default)[place])
                want = total(episode, place) - without
            assert credit[episode.episode_id, place] == pytest.approx(want, abs=1e-6)
    assert credit["1", 1] == credit["2", 1] == pytest.approx(0, abs=1e-6), "it said the same both times"


def test_an_agent_that_acts_first_at_the_end_is_not_in_the_first_step() -> None:
    """Rounds count each agent's own calls: two tellers' counts, then the auditor's first call, which earns the outcome."""
    turns = (
        turn(0, "teller", state="x", says="one"),
        turn(1, "teller", state="x y", says="two", round_index=1),
        turn(2, "clerk", state="x y z", says="fine"),
        turn(3, "auditor", state="x y z", says="keep", reward=1.0),
    )
    batch = batch_of([TeamEpisode(episode_id="1", group_id="g", turns=turns), two_rounds(2)])
    assert batch.step_of_turn.tolist() == [0, 1, 2, 2, 3, 3, 4]
    assert batch.next_step.tolist() == [1, 2, -1, 4, -1]
    assert batch.first_turn.tolist() == [0, 1, 2, 4, 6]
    assert batch.rewards.tolist() == pytest.approx([0.0, 0.0, 1.0, 0.3, 1.0])


@pytest.mark.test
def test_what_happened_before_a_turn_is_not_its_credit() -> None:
    """Two openings, one good and one bad, then the same remark, which changes nothing: VDN learns whose the outcome is."""
    episodes = []
    for i in range(8):
        word = "good" if i % 2 else "bad"
        turns = (
            turn(0, "opener", state="task", says=word, reward=0.0),
            turn(
                1, "rider", state=f"task then {word}", says=f"remark {i % 4 // 2}", reward=float(i % 2), round_index=1
            ),
        )
        episodes.append(TeamEpisode(episode_id=str(i), group_id="g", turns=turns))
    team = {"mixer": "vdn", "num_epochs": 300, "target_tau": 0.2, "optimizer": {"lr": 1e-2}, "gamma": 1.0}
    learner = TeamLearner(TrainConfig(team=team, advantage={"normalize_std": False}), seed=0)
    credit = learner.learn(episodes, seed=0)[0].credit
    assert credit is not None
    for i in range(8):
        assert credit[str(i), 0] == pytest.approx(0.5 if i % 2 else -0.5, abs=0.15)
        assert abs(credit[str(i), 1]) < 0.1

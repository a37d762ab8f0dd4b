"""learner: an iteration's episodes -> the team's signal, and the learner's state for the next iteration.

    mappo, happo:  central critic --> advantage per turn      then the critic learns
    vdn, qmix:     the Qs learn on all replayed episodes      then --> credit per turn

State is a folder: `team.safetensors` (networks, target copies, Adam's moments), `team.json`, `replay.npz`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

from train_loops.config import TrainConfig
from train_loops.extensions.whole_team.critic import central_advantages, learn_values, turn_advantages
from train_loops.extensions.whole_team.episodes import TeamEpisode, read_replay, write_replay
from train_loops.extensions.whole_team.models import CentralCritic, TeamQ
from train_loops.extensions.whole_team.q import learn_qs, q_credit
from train_loops.extensions.whole_team.value_norm import ValueNorm
from train_loops.signal.figures import explained_variance
from train_loops.signal.learning_rate import adamw
from train_loops.signal.team_signal import TeamSignal

WEIGHTS_FILE, STATE_FILE, REPLAY_FILE = "team.safetensors", "team.json", "replay.npz"


class TeamLearner:
    """The networks of one run's team, which are kept from iteration to iteration."""

    def __init__(self, config: TrainConfig, *, seed: int) -> None:
        """Builds fresh networks.

        Args:
            config: of any model group; they agree on what the team learns.
            seed: of the weights.
        """
        self._config, self._settings = config, config.team
        self.kind: Literal["critic", "mixer"] = "critic" if config.has_team_critic else "mixer"
        self.num_jobs = 0
        self._norm = ValueNorm()
        self._replay: list[TeamEpisode] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._model: CentralCritic | TeamQ = (
                CentralCritic(config.team) if self.kind == "critic" else TeamQ(config.team)
            )
        self._target = copy.deepcopy(self._model)
        self._optimizer = adamw(self._model.parameters(), config.team.optimizer)

    def learn(self, episodes: Sequence[TeamEpisode], *, seed: int) -> tuple[TeamSignal, dict[str, float]]:
        """Returns the signal of these episodes, at least one, and `train/<name>` of the learner."""
        self.num_jobs += 1
        if isinstance(self._model, CentralCritic):
            return self._learn_values(self._model, episodes, seed=seed)
        return self._learn_qs(self._model, episodes, seed=seed)

    def _learn_values(
        self, critic: CentralCritic, episodes: Sequence[TeamEpisode], *, seed: int
    ) -> tuple[TeamSignal, dict[str, float]]:
        # First the advantages, then the steps: values that have seen these returns would hide what was unexpected.
        advantages, returns, values = central_advantages(critic, self._norm, episodes, config=self._settings)
        self._norm = self._norm.updated(returns)
        loss = learn_values(
            critic,
            self._optimizer,
            self._norm,
            episodes,
            returns=returns,
            config=self._settings,
            seed=seed,
        )
        metrics = {
            "train/critic_loss": loss,
            "train/return_mean": float(returns.mean()),
            **explained_variance(returns, values),
        }
        whitened = self._config.advantage.whiten or self._config.estimator.whitens
        return TeamSignal(advantages=turn_advantages(episodes, advantages, whitened=whitened)), metrics

    def _learn_qs(
        self, model: TeamQ, episodes: Sequence[TeamEpisode], *, seed: int
    ) -> tuple[TeamSignal, dict[str, float]]:
        assert isinstance(self._target, TeamQ)
        self._replay = [*self._replay, *episodes][-self._settings.replay_episodes :]
        loss = learn_qs(model, self._target, self._optimizer, self._replay, config=self._settings, seed=seed)
        metrics = {"train/td_loss": loss, "train/replayed_episodes": float(len(self._replay))}
        if self.num_jobs <= self._settings.warmup_iterations:
            return TeamSignal(), metrics
        credit = q_credit(model, episodes)
        metrics["train/credit_std"] = float(np.std(list(credit.values())))
        return TeamSignal(credit=credit), metrics

    def save(self, folder: Path) -> None:
        """Writes the state into a folder that exists."""
        from safetensors.torch import save_file

        tensors = {f"{part}.{name}": x for part, module in self._parts() for name, x in module.state_dict().items()}
        names = [name for name, _ in self._model.named_parameters()]
        for index, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{names[index]}.{key}": torch.as_tensor(x) for key, x in state.items()}
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / WEIGHTS_FILE)
        about = {"kind": self.kind, "mixer": self._settings.mixer, "num_jobs": self.num_jobs}
        (folder / STATE_FILE).write_text(json.dumps(about | {"value_norm": asdict(self._norm)}))
        if self._replay:
            write_replay(folder / REPLAY_FILE, self._replay)

    def load(self, folder: Path) -> bool:
        """Resumes from what `save` wrote; returns False, and changes nothing, where it is of another kind or other sizes."""
        from safetensors.torch import load_file

        about = json.loads((folder / STATE_FILE).read_text())
        tensors = load_file(folder / WEIGHTS_FILE)
        own_shapes = {f"{part}.{n}": x.shape for part, module in self._parts() for n, x in module.state_dict().items()}
        stored_shapes = {name: x.shape for name, x in tensors.items() if not name.startswith("adam.")}
        if (about["kind"], about["mixer"]) != (self.kind, self._settings.mixer) or own_shapes != stored_shapes:
            return False
        for part, module in self._parts():
            module.load_state_dict(
                {n.removeprefix(f"{part}."): x for n, x in tensors.items() if n.startswith(f"{part}.")}
            )
        state: dict[int, dict[str, torch.Tensor]] = {}
        for index, (name, _) in enumerate(self._model.named_parameters()):
            keys = {n.rpartition(".")[2]: x for n, x in tensors.items() if n.startswith(f"adam.{name}.")}
            state |= {index: keys} if keys else {}
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": state})
        self.num_jobs, self._norm = about["num_jobs"], ValueNorm(**about["value_norm"])
        self._replay = read_replay(folder / REPLAY_FILE) if (folder / REPLAY_FILE).is_file() else []
        return True

    def _parts(self) -> list[tuple[str, nn.Module]]:
        return [("model", self._model), ("target", self._target)]

"""whole_team: rules about learners of the whole team, which run before the model groups are trained."""

from __future__ import annotations

from pipelines.config.run_sections import RunSections
from train_loops.config import TEAM, TEAM_CRITICS


def team_learns_as_one(config: RunSections) -> None:
    """The model groups agree in all that a learner of the whole team uses."""
    configs = {group: config.train_config(group) for group in config.model_groups}
    first = config.team_config
    if first is None:
        return
    if TEAM in configs:
        raise ValueError(f"model_groups.{TEAM}: this name is the whole-team learner's: take another")
    if first.estimator.updates_in_turn and len(configs) == 1:
        raise ValueError(
            f"train.algorithm: {first.algorithm} updates model groups one after another, and there is only one: with one group "
            "take mappo (the same central critic) or ippo"
        )
    for group, train in configs.items():
        if train.train_mixed_versions != first.train_mixed_versions:
            raise ValueError(
                f"model_groups.{group}.train.train_mixed_versions = {train.train_mixed_versions}: the whole team learns from "
                f"the same episodes, and another model group has {first.train_mixed_versions}: set it in `train`, not per "
                "model group"
            )
        if train.has_team_critic and train.advantage.whiten != first.advantage.whiten:
            raise ValueError(
                f"model_groups.{group}.train.advantage.whiten = {train.advantage.whiten!r}: the central critic's "
                "advantages are whitened once for all model groups: set it in `train`, not per model group"
            )
        if train.team != first.team or (
            train.algorithm != first.algorithm and (train.has_team_critic or first.has_team_critic)
        ):
            raise ValueError(
                f"model_groups.{group}.train: the whole team learns first, so all model groups have the same "
                f"train.team and, with {' or '.join(TEAM_CRITICS)}, the same train.algorithm: set both in "
                "`train`, not per model group"
            )


def other_groups_can_be_promoted(config: RunSections) -> None:
    """A group that keeps its parent after a failure has other groups, which are trained in stages of their own."""
    if config.promote.on_failed_group == "fail":
        return
    if len(config.model_groups) == 1:
        raise ValueError(
            "promote.on_failed_group: keep_parent promotes the other model groups where one failed to train, and there is "
            "only one: give fail"
        )
    if config.team_config is not None:
        raise ValueError(
            f"promote.on_failed_group: keep_parent, but with train.algorithm: {config.team_config.algorithm} all model groups are "
            "trained in one stage, each on what the team learnt before: give fail"
        )

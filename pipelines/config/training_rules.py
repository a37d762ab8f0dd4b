"""training_rules: rules about algorithms, the episodes that they compare or learn from, and learners of the whole team."""

from __future__ import annotations

from pipelines.config.run_sections import RunSections
from train_loops.config import TEAM, TEAM_CRITICS
from train_loops.estimators import ESTIMATORS


def variants_match_algorithms(config: RunSections) -> None:
    """collect plays the variants that the algorithms need, and no others."""
    kind = config.collect.variants.kind if config.collect.variants is not None else ""
    needed = {group: config.train_config(group).estimator.variants for group in config.model_groups}
    for group, needs in needed.items():
        if needs and needs != kind:
            raise ValueError(
                f"model group {group!r}: algorithm {config.train_config(group).algorithm!r} holds turns against "
                f"{needs} episodes, which collect does not play: set collect.variants: {{kind: {needs}}}, or take rloo, "
                "which needs none"
            )
    if kind == "leave_one_out" and config.credit.settings.get("share") == "split":
        raise ValueError(
            "credit.settings.share: split pays a turn a part of the outcome, and leave_one_out holds it against the whole outcome of "
            "a replay: take share: full, or another algorithm"
        )
    if kind and kind not in needed.values():
        name = next(name for name, it in ESTIMATORS.items() if it.variants == kind)
        raise ValueError(
            f"collect.variants.kind: {kind}: no algorithm of this run uses such episodes: drop it, or set "
            f"train.algorithm: {name}"
        )


def groups_can_be_compared(config: RunSections) -> None:
    """An algorithm that compares the episodes of a task has more than one of them."""
    if config.collect.episodes_per_task > 1:
        return
    for group in config.model_groups:
        train = config.train_config(group)
        needs_siblings = train.estimator.needs_siblings
        has_others = train.advantage.singleton != "zero" or train.advantage.group_by == "batch_agent"
        if needs_siblings or (train.estimator.compares and not has_others):
            raise ValueError(
                f"model group {group!r}: algorithm {train.algorithm!r} compares the episodes of a task, and "
                "collect.episodes_per_task is 1: there is nothing to compare; give at least 2, or take ppo"
                f"{'' if needs_siblings else ', or train.advantage.group_by: batch_agent'}"
            )


def costs_reach_the_turns_that_caused_them(config: RunSections) -> None:
    """What is charged with cost is compared with what is charged, too, turn by turn."""
    if config.cost is None:
        return
    for group in config.model_groups:
        train = config.train_config(group)
        if train.estimator.compares == "episodes":
            raise ValueError(
                f"cost: model group {group!r}: {train.algorithm} compares episodes by the mean over their turns, in which more turns make each "
                "cheaper: take an algorithm that compares turns, dr_mas with train.advantage.normalize_std: false for example"
            )
    variants = config.collect.variants
    # With `counterfactual` a turn is compared with a turn, which is charged, too.
    if variants is not None and variants.kind != "counterfactual":
        raise ValueError(
            f"cost: collect.variants of kind {variants.kind} plays episodes whose outcomes are baselines, which no cost is taken from: take "
            "kind counterfactual, or drop one of the two"
        )
    if config.collect.dynamic_sampling is not None:
        raise ValueError(
            "cost: collect.dynamic_sampling leaves out tasks whose episodes all have one outcome, where only cost could teach: drop one "
            "of the two"
        )


def penalties_reach_advantages(config: RunSections) -> None:
    """Penalties for long completions are not set where advantages are made of what no penalty is taken from."""
    for group in config.model_groups:
        train = config.train_config(group)
        if train.has_team_critic:
            why = "has advantages of the team's critic, which knows no penalties: drop it, or take another algorithm, e.g. ippo"
        elif train.estimator.variants:
            why = (
                "holds turns against what variants of the episode earned, which no penalty is taken from: drop it, or take another "
                "algorithm, e.g. rloo"
            )
        else:
            continue
        own = {agent: train.agents[agent].overlong for agent in config.agents_of(group) if agent in train.agents}
        penalties = {"train.overlong": train.overlong} | {f"train.agents.{a}.overlong": p for a, p in own.items()}
        for place, penalty in penalties.items():
            if penalty is not None:
                raise ValueError(
                    f"{place} = {penalty.model_dump()}: algorithm {train.algorithm!r} of model group {group!r} {why}"
                )


def served_episodes_can_be_trained_on(config: RunSections) -> None:
    """Captured answers are trained on by model groups by themselves, with recomputed logprobs."""
    if config.collect.from_service is None:
        return
    if config.team_config is not None:
        raise ValueError(
            "collect.from_service: a learner of the whole team sees whole episodes of what it samples; episodes from "
            "service are for model groups by themselves (rloo, grpo, reinforce_pp, gae): drop one of the two"
        )
    for group in config.model_groups:
        if config.train_config(group).mismatch.old_logprobs != "recompute":
            raise ValueError(
                f"collect.from_service: other versions sampled what was served, so model group {group!r} needs "
                "train.mismatch.old_logprobs: recompute"
            )


# Learners of the whole team, which run before the model groups are trained.


def team_learns_as_one(config: RunSections) -> None:
    """The model groups agree in all that a learner of the whole team uses."""
    configs = {group: config.train_config(group) for group in config.model_groups}
    first = config.team_config
    if first is None:
        return
    if TEAM in configs or TEAM in config.bases:
        place = f"model_groups.{TEAM}" if TEAM in configs else f"model_groups.{config.bases[TEAM][0]}.base = {TEAM!r}"
        raise ValueError(f"{place}: this name is the whole-team learner's: take another")
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

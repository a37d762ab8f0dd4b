"""agents: rules about agents, the model groups that they belong to and how they are sampled."""

from __future__ import annotations

from pipelines.config.messages import near
from pipelines.config.run_sections import RunSections


def agents_have_one_group(config: RunSections) -> None:
    """No agent is mapped to two model groups."""
    owner: dict[str, str] = {}
    for group, settings in config.model_groups.items():
        for agent in settings.agents:
            if agent in owner:
                raise ValueError(f"agent {agent!r} is mapped to two model groups, {owner[agent]!r} and {group!r}")
            owner[agent] = group


def swapped_groups_have_one_agent(config: RunSections) -> None:
    """The groups of `swap` exist, differ, and have one agent each."""
    if config.swap is None:
        return
    groups = config.swap.groups
    if len(groups) != len(set(groups)):
        raise ValueError(f"swap.groups: {groups[0]!r} cannot exchange agents with itself: name two model groups")
    for group in groups:
        if group not in config.model_groups:
            raise ValueError(f"swap.groups: {group!r} is no model group{near(group, config.model_groups)}")
        if len(agents := config.model_groups[group].agents) != 1:
            raise ValueError(
                f"swap.groups: model group {group!r} has the agents {', '.join(agents)}: two roles change places, so "
                "each of the two groups has exactly one; give the agents model groups of their own"
            )


def priced_groups_exist(config: RunSections) -> None:
    """`cost.prices` names model groups."""
    for group in config.cost.prices if config.cost else ():
        if group not in config.model_groups:
            raise ValueError(f"cost.prices: {group!r} is no model group{near(group, config.model_groups)}")


def trained_agents_exist(config: RunSections) -> None:
    """`train.agents` names agents of the run, and every model group has an agent that is trained."""
    for agent in config.train.agents:
        if agent not in config.group_of:
            raise ValueError(f"train.agents: {agent!r} is mapped to no model group{near(agent, config.group_of)}")
    for group, settings in config.model_groups.items():
        place, agents = f"model_groups.{group}.train.agents", config.agents_of(group)
        signals = config.train_config(group).agents
        for agent in settings.train.get("agents", {}):
            if agent not in agents:
                raise ValueError(f"{place}: {agent!r} is no agent of this model group{near(agent, agents)}")
        if all(agent in signals and signals[agent].weight == 0 for agent in agents):
            raise ValueError(
                f"{place}: every agent of model group {group!r} has weight 0 ({', '.join(agents)}), so that nothing "
                "of it would be trained: give one of them a weight above 0, or drop theirs (1)"
            )


def sampling_is_unfiltered(config: RunSections) -> None:
    """Training turns are sampled from the policy's own distribution, which top_p, top_k and min_p would cut."""
    for name, agent in config.agents.items():
        for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            value = getattr(agent, key)
            if value is not None and value != off:
                raise ValueError(
                    f"agents.{name}.{key} = {value}: training turns are sampled unfiltered, because a filtered "
                    f"distribution is not the policy's; drop it or set it to {off:g}"
                )

"""rules: what joins sections of a run config. Each rule raises ValueError with the key, the value and the fix."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from pipelines.config import training_rules as training
from pipelines.config.messages import near
from pipelines.config.run_sections import RunSections
from pipelines.figures.limits import FigureLimits
from pipelines.figures.registry import FIGURES, METRICS, own_name
from stores.settings import Settings
from stores.types import FILTERS

DOTTED_PATH = re.compile(r"[\w.]+:\w+")
GROUP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
RELATIVE_DATABASE = re.compile(r"sqlite[^:]*:///(?!/)")


# Agents, the model groups that they belong to and how they are sampled.


def agents_have_one_group(config: RunSections) -> None:
    """No agent is mapped to two model groups, whose names can be those of folders and apps."""
    owner: dict[str, str] = {}
    for group, settings in config.model_groups.items():
        if GROUP_NAME.fullmatch(group) is None:
            raise ValueError(
                f"model_groups: {group!r} is to name a folder and an app: give letters, digits, '_' and '-', a letter or digit first"
            )
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
    """Training turns are sampled from the policy's own distribution, which filters would cut."""
    for name, agent in config.agents.items():
        for key, off in FILTERS.items():
            value = getattr(agent, key)
            if value is not None and value != off:
                raise ValueError(
                    f"agents.{name}.{key} = {value}: training turns are sampled unfiltered, because a filtered "
                    f"distribution is not the policy's; drop it or set it to {off:g}"
                )


# What each model group starts from, its overrides, and bases that several groups share.


def every_group_has_a_model(config: RunSections) -> None:
    """Every model group has a model, or the warm start makes one; never both, since only one can be version 0."""
    made = config.warmstart is not None and config.warmstart.tiny_model is not None
    for group, settings in config.model_groups.items():
        if settings.model and made:
            raise ValueError(
                f"model_groups.{group}.model = {settings.model!r} would not be used, because warmstart.tiny_model makes the models "
                "of all groups: drop `model`, or set warmstart.tiny_model: null"
            )
        if not settings.model and not made:
            raise ValueError(
                f"model_groups.{group}.model is missing: name a Hugging Face folder, "
                "or give a `warmstart` section with a `tiny_model`"
            )


def overrides_parse(config: RunSections) -> None:
    """The overrides of every model group make valid sections."""
    for group in config.model_groups:
        config.train_config(group)
        config.serve_config(group)
        config.tiny_model(group)


def adapters_have_one_base(config: RunSections) -> None:
    """Adapters name a base, only adapters do, and those of one base agree about the model and its app."""
    for group, settings in config.model_groups.items():
        has_lora = config.train_config(group).lora is not None
        if has_lora and not settings.base:
            raise ValueError(
                f"model_groups.{group}: train.lora trains an adapter, but of which base? name one: base: shared"
            )
        if settings.base and not has_lora:
            raise ValueError(
                f"model_groups.{group}.base = {settings.base!r}: a base stays frozen, so train.lora is needed: "
                "give train: {lora: {rank: 8}}, or drop the base to train all weights"
            )
        if settings.base in config.model_groups:
            raise ValueError(
                f"model_groups.{group}.base = {settings.base!r} is a model group: a base needs a name of its own"
            )
    for base, members in config.bases.items():
        for what in ("model", "tiny_model", "serve"):
            values = {group: getattr(config.model_groups[group], what) for group in members}
            if any(value != values[members[0]] for value in values.values()):
                raise ValueError(
                    f"model_groups with base {base!r} share one model on one app, but differ in `{what}`: {values}"
                )


def timeouts_nest(config: RunSections) -> None:
    """Each timeout is below the one that encloses it."""
    call, episode = config.collect.call, config.collect.episode
    chain = [
        ("collect.call.call_timeout_s", call.call_timeout_s),
        ("collect.episode.turn_timeout_s", episode.turn_timeout_s),
        ("collect.episode.episode_timeout_s", episode.episode_timeout_s),
        ("collect.stage_timeout_s", config.collect.stage_timeout_s),
    ]
    evaluate = ("evaluate.stage_timeout_s", config.evaluate.stage_timeout_s)
    sync = ("sync.stage_timeout_s", config.sync.stage_timeout_s)
    pairs = [*pairwise(chain), (chain[2], evaluate)]
    if config.collect.budget.seconds is not None:
        pairs.append((("collect.budget.seconds", config.collect.budget.seconds), chain[3]))
    for stage in (chain[3], sync, evaluate):
        pairs.append((("sync.timeout_s", config.sync.timeout_s), stage))
        starts = {config.serve_config(group).start_timeout_s for group in config.model_groups}
        pairs += [(("serve.start_timeout_s", start), stage) for start in starts]
    if config.promote.deploy != "never":
        promote = ("promote.stage_timeout_s", config.promote.stage_timeout_s)
        pairs += [(("serve.start_timeout_s", start), promote) for start in starts]
    trains = [config.train_config(group) for group in config.model_groups]
    for train in trains:
        stage = ("train.stage_timeout_s", train.stage_timeout_s)
        pairs.append((("train.job_timeout_s", train.job_timeout_s), stage))
    if config.schedule is not None:
        stages = [chain[3], sync, evaluate, *(("train.stage_timeout_s", t.stage_timeout_s) for t in trains)]
        stages += [(f"{name}.stage_timeout_s", getattr(config, name).stage_timeout_s) for name in ("score", "promote")]
        if config.warmstart is not None:
            stages.append(("warmstart.stage_timeout_s", config.warmstart.stage_timeout_s))
        pairs += [(stage, ("schedule.stage_timeout_s", config.schedule.stage_timeout_s)) for stage in stages]
    for (inner, a), (outer, b) in pairs:
        if a >= b:
            raise ValueError(f"deadlines must nest: {inner} = {a:g} s is not below {outer} = {b:g} s")


# When and where the stages of a run run.


def new_tasks_can_be_seen(config: RunSections) -> None:
    """What triggers an iteration can be checked: on a schedule, in a file."""
    schedule = config.schedule
    if schedule is None or not (schedule.on_new_tasks or schedule.min_fresh_traces):
        return
    if not (schedule.cron or schedule.on_assets):
        key = "on_new_tasks" if schedule.on_new_tasks else "min_fresh_traces"
        raise ValueError(f"schedule.{key} needs schedule.cron, which says how often to look (or on_assets)")
    if schedule.on_new_tasks and not config.tasks.train.path:
        raise ValueError(
            "schedule.on_new_tasks needs tasks.train.path: what a generator gives never changes; drop it or name a file"
        )


def shared_gpus_have_room_for_both(config: RunSections) -> None:
    """Where engines and trainers share a GPU, Ray can place each of them on it."""
    if config.pool == "separate":
        return
    for group in config.model_groups:
        serve, train = config.serve_config(group), config.train_config(group)
        place = f"pool: shared, model group {group!r}"
        if bool(serve.gpus) != bool(train.gpus_per_worker):
            raise ValueError(
                f"{place}: serve.gpus = {serve.gpus:g} and train.gpus_per_worker = {train.gpus_per_worker:g} share no GPU: give "
                "both a share of one, e.g. 0.5 each, or drop pool"
            )
        if serve.gpus + train.gpus_per_worker > 1:
            raise ValueError(
                f"{place}: serve.gpus = {serve.gpus:g} and train.gpus_per_worker = {train.gpus_per_worker:g} do not fit on one GPU: give "
                "shares that add up to 1, e.g. 0.5 each"
            )
        if serve.gpus and serve.tensor_parallel_size > 1:
            raise ValueError(
                f"{place}: serve.tensor_parallel_size = {serve.tensor_parallel_size}: Ray gives an engine several GPUs only as a whole: set it "
                "to 1, or give engines and trainers GPUs of their own (pool: separate)"
            )
        # So a GPU has room for one engine, and beside it for one worker: two workers of NCCL cannot be on the same.
        is_one_each = serve.gpus > 0.5 and 2 * train.gpus_per_worker > 1 - serve.gpus
        if serve.gpus and max(serve.num_replicas, train.num_workers) > 1 and not is_one_each:
            raise ValueError(
                f"{place}: with serve.gpus = {serve.gpus:g} and train.gpus_per_worker = {train.gpus_per_worker:g} Ray may put two of "
                f"serve.num_replicas = {serve.num_replicas} engines, or of train.num_workers = {train.num_workers}, on one GPU: give an engine "
                "more than half of it and a worker more than half of the rest, e.g. 0.6 and 0.4"
            )


def shared_gpus_have_room_for_all(config: RunSections) -> None:
    """Where engines and trainers share GPUs, those of the engines have room for all workers."""
    if config.pool == "separate":
        return
    groups = [group for group in config.model_groups if config.serve_config(group).gpus]
    # Adapters of one base have its engines in common.
    engines = {config.weights_name(group): config.serve_config(group) for group in groups}.values()
    trains = [config.train_config(group) for group in groups]
    num_engines = sum(serve.num_replicas for serve in engines)
    shares = sum(serve.num_replicas * serve.gpus for serve in engines)
    shares += sum(train.num_workers * train.gpus_per_worker for train in trains)
    if shares > num_engines + 1e-9:
        raise ValueError(
            f"pool: shared: engines and train.num_workers of all model groups reserve {shares:g} GPUs, but workers take those of engines, and "
            f"serve.num_replicas add up to {num_engines}: give fewer workers, or smaller shares"
        )


def uploaded_runs_are_stored_elsewhere(config: RunSections) -> None:
    """A run whose working directory is a copy stores its results outside of it."""
    if not config.cluster.working_dir:
        return
    for name, place in config.storage:
        is_folder = name not in ("journal", "mlflow") and "://" not in place
        if place and ((is_folder and not Path(place).is_absolute()) or RELATIVE_DATABASE.match(place)):
            raise ValueError(
                f"storage.{name} = {place!r} is relative, and cluster.working_dir is a copy that ends with the job: "
                f"give storage.{name} as an absolute path or URI that every machine of the cluster sees"
            )


def overlapping_stages_do_not_exclude_each_other(config: RunSections) -> None:
    """Nothing else in the config says that sampling and training take turns, or that an iteration waits for the one before."""
    max_lag = config.loop.max_lag
    if not max_lag:
        return
    place = f"loop.max_lag = {max_lag}"
    if config.pool == "shared":
        raise ValueError(
            f"{place}: with pool: shared the engines sleep while the trainers have the GPU, so that nothing can overlap: give each GPUs of "
            "their own (pool: separate), or drop loop.max_lag"
        )
    for group in config.model_groups:
        if config.train_config(group).mismatch.old_logprobs == "rollout_if_close":
            raise ValueError(
                f"{place}: model group {group!r}: train.mismatch.old_logprobs = 'rollout_if_close' takes the engine's logprobs for those of the "
                "parent, which did not sample: set recompute"
            )
    if config.promote.deploy == "canary":
        raise ValueError(
            f"{place}: promote.deploy = 'canary' holds the gate of an iteration for as long as production traffic takes, and the next "
            "evaluation with it: set direct or never"
        )
    schedule = config.schedule
    if schedule is not None and schedule.cron == "@continuous":
        raise ValueError(
            f"{place}: schedule.cron = '@continuous' allows one DAG run at a time, and overlap needs {1 + max_lag}: set '* * * * *'"
        )


# Figures.


def own_figures_have_names(config: RunSections) -> None:
    """Each path of `evaluate.figures` has a name that no other figure has."""
    known = {*FIGURES, *METRICS}
    for number, path in enumerate(config.evaluate.figures):
        if DOTTED_PATH.fullmatch(path) is None:
            raise ValueError(f"evaluate.figures.{number}: {path!r} is not of the form 'package.module:name'")
        if own_name(path) in known:
            raise ValueError(
                f"evaluate.figures.{number}: there is a figure or metric {own_name(path)!r} already: rename yours"
            )
        known.add(own_name(path))


def limits_are_of_figures(config: RunSections) -> None:
    """Each key of a map of limits, also in a section of an extension, is a figure of Troupe's, or where it takes them of `evaluate.figures`."""
    own = [own_name(path) for path in config.evaluate.figures]
    hint = " A figure of your own needs its path in evaluate.figures"
    named = {f"{section}.{key}": limits for section, of in config if isinstance(of, Settings) for key, limits in of}
    for section, limits in named.items():
        if not isinstance(limits, FigureLimits):
            continue
        known = [*limits.DEFAULTS, *(own if limits.TAKES_OWN else ())]
        for name in limits.model_extra or ():
            if name not in known:
                raise ValueError(f"unknown key '{section}.{name}'{near(name, known)}{hint if limits.TAKES_OWN else ''}")


RULES = (
    agents_have_one_group,
    swapped_groups_have_one_agent,
    priced_groups_exist,
    trained_agents_exist,
    every_group_has_a_model,
    overrides_parse,
    adapters_have_one_base,
    training.variants_match_algorithms,
    training.groups_can_be_compared,
    training.costs_reach_the_turns_that_caused_them,
    training.penalties_reach_advantages,
    training.team_learns_as_one,
    training.served_episodes_can_be_trained_on,
    training.other_groups_can_be_promoted,
    sampling_is_unfiltered,
    own_figures_have_names,
    limits_are_of_figures,
    timeouts_nest,
    new_tasks_can_be_seen,
    shared_gpus_have_room_for_both,
    shared_gpus_have_room_for_all,
    uploaded_runs_are_stored_elsewhere,
    overlapping_stages_do_not_exclude_each_other,
)
"""In order: a later rule may rely on the earlier ones."""

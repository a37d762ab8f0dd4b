"""validate: a run config -> ValueError with key and fix for what cannot work, before anything starts.

The fields by themselves are checked when they are parsed; here the config is compared with the workflow, the credit rule,
the tasks and the models. Imports no torch, ray or vllm, but vllm where `serve.tool_parser` or `reasoning_parser` names one of its parsers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.config.messages import near
from pipelines.config.run_config import RunConfig
from pipelines.credit.rule import CreditKind, load_credit, preflight
from pipelines.figures.registry import with_own
from pipelines.runners.model_folder import check_model_folder
from pipelines.runners.task_checks import TaskForms, unread_notes
from pipelines.tasks.likeness import practised_notes
from pipelines.tasks.sources import Check, check_disjoint, load_tasks
from pipelines.tasks.splits import SECTIONS, check_independent
from serve_apps.authoring.agent import ToolFault
from serve_apps.authoring.choices import Choice
from serve_apps.authoring.parsers import Parsers
from serve_apps.authoring.workflow import Workflow, load_carried, load_workflow
from serve_apps.config import CPU_HEAD_SIZES
from serve_apps.engines.port import KINDS, engine_class
from serve_apps.own_loop import result_of
from serve_apps.workflows.alone import task_input
from stores.by_name import check_extension, open_by_name
from stores.extensions import ask
from stores.team_code import collect_code
from stores.types import FILTERS, Task, families
from stores.weights.model_folder import why_windowed


def check(config: RunConfig) -> list[str]:
    """Checks a run config; returns notes on this machine. ValueError for the first thing that cannot work."""
    workflow = load_workflow(config.workflow.path, config.workflow.settings)
    _check_agents(config, workflow)
    _check_control(config, workflow)
    credit = load_credit(config.credit, agents=config.group_of)
    _check_baselines(config, credit.kind)
    if hasattr(credit, "infer"):
        _check_inferred(config)
    with_own(config.evaluate.figures, guards=config.promote.guards.model_extra or ())
    if config.warmstart is not None and config.warmstart.traces is not None:
        check_extension("pipelines.extensions.other_runs", place="warmstart.traces")
    if config.warmstart is not None and config.warmstart.demonstrator:
        open_by_name(config.warmstart.demonstrator, place="warmstart.demonstrator")
    forms = TaskForms(workflow, credit)
    sections = check_tasks(config, check=forms.check)
    _check_environments(config, workflow)
    notes = [
        *forms.notes(),
        *practised_notes(sections),
        *unread_notes(config),
        *_check_models(config, workflow),
        *workflow.preflight(),
        *preflight(credit),
        *check_tools(workflow),
    ]
    notes += _notes_on_code(config)
    return notes + ask("notes", config)


def _notes_on_code(config: RunConfig) -> list[str]:
    """Says which of the user's own modules travel with the team, and why it could not be served by them."""
    try:
        code = collect_code(config.names_of_code)
    except ValueError as error:
        return [f"it can be trained, but a gateway must find its modules by itself: {error}"]
    try:
        load_carried(code, config.workflow.path, config.workflow.settings)
    except (ValueError, OSError) as error:
        return [
            f"it can be trained but not served: only modules travel with a team, and {', '.join(code)} do not load by themselves "
            f"({error}): keep texts in a module, install what is a package, or name other files by absolute paths"
        ]
    return [f"its code, which travels with the team: {', '.join(code)}"] if code else []


def _check_agents(config: RunConfig, workflow: Workflow) -> None:
    declared, mapped = set(workflow.agents), set(config.group_of)
    for agent in sorted(mapped - declared):
        raise ValueError(
            f"model_groups.{config.group_of[agent]}.agents: {agent!r} is no agent of the workflow{near(agent, declared)}"
        )
    for agent in sorted(declared - mapped):
        raise ValueError(f"model_groups: agent {agent!r} of the workflow is mapped to no model group: add it to one")
    for agent in sorted(set(config.agents) - declared):
        raise ValueError(f"agents: {agent!r} is no agent of the workflow{near(agent, declared)}")
    for name, role in workflow.agents.items():
        sampling = role.with_sampling(role.sampling, **config.agent_changes(name))
        if not sampling.is_unfiltered:
            raise ValueError(
                f"agents.{name}: it would be sampled with {sampling}, but training turns need a temperature above 0 and "
                f"nothing filtered ({', '.join(f'{name} {off:g}' for name, off in FILTERS.items())}): change the workflow's Agent, or set it in this section"
            )


def _check_control(config: RunConfig, workflow: Workflow) -> None:
    control = config.evaluate.control
    if control is None:
        return
    if config.tasks.test is None:
        raise ValueError("evaluate.control: the control plays the test tasks, and tasks.test is missing: add it")
    agent = workflow.agents.get(control.agent)
    if agent is None:
        raise ValueError(
            f"evaluate.control.agent: {control.agent!r} is no agent of the workflow{near(control.agent, workflow.agents)}"
        )
    if workflow.tools:
        raise ValueError(
            f"evaluate.control: the control calls no tools, and the workflow has {', '.join(sorted(workflow.tools))}: nothing fair "
            "can be compared; remove the control"
        )
    try:
        task_input(control.agent, agent)
    except ValueError as fault:
        raise ValueError(f"evaluate.control.agent: {fault}") from None
    fields = agent.contract.field_names
    if control.answer not in fields:
        raise ValueError(
            f"evaluate.control.answer: {control.answer!r} is no field of the contract of {control.agent!r}{near(control.answer, fields)}"
        )


def _check_environments(config: RunConfig, workflow: Workflow) -> None:
    limit_s = config.collect.episode.episode_timeout_s
    for name, environment in workflow.environments.items():
        if name in workflow.tools:
            raise ValueError(f"environment {name}: the workflow has a tool of this name, too: rename one of them")
        if environment.reset_timeout_s >= limit_s:
            raise ValueError(
                f"environment {name}: reset_timeout_s = {environment.reset_timeout_s:g} must be below "
                f"collect.episode.episode_timeout_s = {limit_s:g}: lower the one or raise the other"
            )


def check_tools(workflow: Workflow) -> list[str]:
    """Asks the services behind tools whether they answer; returns what they are."""
    notes: list[str] = []
    for name, tool in workflow.tools.items():
        if tool.probe is not None:
            try:
                notes.append(f"tool {name}: {result_of(tool.probe())}")
            except ToolFault as fault:
                raise ValueError(f"tool {name}: {fault}") from None
    return notes


def _check_baselines(config: RunConfig, kind: CreditKind) -> None:
    if config.cost is not None and kind == "increments":
        raise ValueError(
            f"cost: credit rule {config.credit.path!r} gives increments, and an increment cannot pay for what other agents do after it: "
            "take a rule of kind `returns`, or drop `cost`"
        )
    for group in config.model_groups:
        train = config.train_config(group)
        for package in train.extensions:
            check_extension(package, place=f"model group {group!r}: train.algorithm and train.team")
        if kind == "increments" and not train.estimator.takes_increments:
            raise ValueError(
                f"model group {group!r}: {train.algorithm} compares a turn with the outcome without its agent, but credit rule "
                f"{config.credit.path!r} gives increments, which are parts of the outcome: take a rule of kind `returns`, or "
                "algorithm counterfactual"
            )


def _check_inferred(config: RunConfig) -> None:
    """Refuses what would take the mean over the turns of an episode again."""
    if config.team_config is not None:
        raise ValueError(
            f"credit: {config.credit.path!r} tells the turns apart, and a learner of the whole team (mappo, happo, mixers) takes the "
            "episode's outcome and does so itself: take dr_mas, for example, or drop the rule"
        )
    for group in config.model_groups:
        train = config.train_config(group)
        if train.estimator.compares == "episodes" or train.estimator.variants:
            raise ValueError(
                f"model group {group!r}: {train.algorithm} compares whole episodes, but credit rule {config.credit.path!r} tells their turns "
                "apart: take an algorithm that compares turns, reinforce_pp_baseline or dr_mas for example"
            )


def check_tasks(config: RunConfig, *, check: Check | None = None) -> dict[str, list[Task]]:
    """Returns the tasks by section. Raises ValueError where sets overlap, are too small, or one that is needed is missing.

    `check` looks at every task by itself, as the workflow does that plays it.
    """
    sections: dict[str, list[Task]] = {}
    for section in SECTIONS:
        source = getattr(config.tasks, section)
        if source is not None:
            sections[section] = load_tasks(source, section=section, seed=config.seed, check=check)
    check_disjoint(sections)
    if config.collect.num_tasks_begun > len(sections["train"]):
        factor = " x collect.oversample" if config.collect.oversample > 1 else ""
        raise ValueError(
            f"collect.tasks_per_iteration{factor} = {config.collect.num_tasks_begun} but tasks.train holds "
            f"{len(sections['train'])}: lower it or add tasks"
        )
    if "gate" not in sections:
        raise ValueError("tasks.gate is missing: evaluate needs tasks that training never sees")
    if config.evaluate.test == "mcnemar":
        check_independent([task.task_id for task in sections["gate"]], families(sections["gate"]))
    return sections


def _check_models(config: RunConfig, workflow: Workflow) -> list[str]:
    """Checks what each model group starts from; returns notes on what could not be looked at here."""
    notes: list[str] = []
    for group, settings in config.model_groups.items():
        tiny, serve = config.tiny_model(group), config.serve_config(group)
        max_model_len = serve.max_model_len
        if serve.engine_kind not in KINDS:  # a machine that only validates may not have what those need
            engine_class(serve.engine_kind)
        if tiny is not None:
            shape = {
                **tiny.model_dump(),
                "num_attention_heads": tiny.num_heads,
                "num_key_value_heads": tiny.num_kv_heads,
            }
            _check_rank(config, group, shape)
            _check_heads(config, group, shape, "warmstart.tiny_model.head_dim")
            if max_model_len > tiny.max_position:
                raise ValueError(
                    f"serve.max_model_len = {max_model_len} but warmstart.tiny_model.max_position = {tiny.max_position}: lower "
                    "the first or raise the second"
                )
        if not settings.model or "://" in settings.model:
            continue
        key = f"model_groups.{group}.model"
        try:
            checked = check_model_folder(Path(settings.model))
        except (ValueError, OSError) as error:
            raise ValueError(f"{key}: {error}") from None
        shape = checked.shape
        notes += [f"{key}: {note}" for note in checked.notes]
        _check_parsers(config, group)
        _check_choices(config, group, workflow)
        _check_template_kwargs(config, group)
        notes += _check_packing(config, group, shape)
        _check_rank(config, group, shape)
        _check_heads(config, group, shape, f"{key}: head_dim of config.json")
        limit = shape.get("max_position_embeddings")
        if limit is not None and max_model_len > limit:
            raise ValueError(
                f"serve.max_model_len = {max_model_len} but the model of {group!r} takes {limit} tokens: lower it"
            )
    return notes


def _check_parsers(config: RunConfig, group: str) -> None:
    """ValueError where a parser is named that vLLM does not have, or that does not fit the model."""
    parsers = config.serve_config(group).parsers
    if parsers == Parsers():
        return
    from serve_apps.chat.tokenizer import load_tokenizer
    from serve_apps.openai_api.answer_reader import answer_format

    try:
        answer_format(load_tokenizer(config.model_groups[group].model), parsers)
    except ValueError as fault:
        raise ValueError(f"model_groups.{group}: {fault}") from None


def _check_template_kwargs(config: RunConfig, group: str) -> None:
    """ValueError where the model's chat template does not read a variable that it is given."""
    of_agent = config.template_kwargs(dict.fromkeys(config.model_groups[group].agents, group))
    if not of_agent:
        return
    from serve_apps.chat.tokenizer import load_tokenizer
    from serve_apps.episode.team import check_template_kwargs

    tokenizer = load_tokenizer(config.model_groups[group].model)
    for agent, kwargs in of_agent.items():
        check_template_kwargs(kwargs, tokenizer, agent=agent)


def _check_choices(config: RunConfig, group: str, workflow: Workflow) -> None:
    """ValueError where an agent chooses among options whose labels are no single tokens of the model."""
    choices = {
        name: contract
        for name in config.model_groups[group].agents
        if isinstance(contract := workflow.agents[name].contract, Choice)
    }
    if not choices:
        return
    from serve_apps.chat.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.model_groups[group].model)
    for name, choice in choices.items():
        try:
            choice.tokens(choice.options, tokenizer)
        except ValueError as fault:
            raise ValueError(f"model_groups.{group}: agent {name!r}: {fault}") from None


def _check_packing(config: RunConfig, group: str, shape: dict[str, Any]) -> list[str]:
    """Returns a line where rows are padded because of the model; ValueError where they should be packed, or shared, all the same."""
    train, reason = config.train_config(group), why_windowed(shape)
    pack, size, heads = train.rows.pack, train.deepspeed.sequence_parallel, shape.get("num_attention_heads") or 0
    if size > 1 and (reason or heads % size):
        raise ValueError(
            f"model_groups.{group}: train.deepspeed.sequence_parallel = {size}, but {reason or f'the model has {heads} attention heads'}: "
            "workers cannot share its sequences"
        )
    if not reason or pack is False:
        return []
    if pack is True:
        raise ValueError(
            f"model_groups.{group}: train.rows.pack = true, but {reason}, which would reach across packed rows: set it to auto "
            "or false"
        )
    return [f"model_groups.{group}: rows are padded, not packed (train.rows.pack): {reason}"]


def _check_heads(config: RunConfig, group: str, shape: dict[str, Any], place: str) -> None:
    """ValueError, naming the place of the size, where engines on a CPU would die at the first request: attention there does not take such heads."""
    hidden, heads = shape.get("hidden_size"), shape.get("num_attention_heads")
    size = shape.get("head_dim") or (hidden // heads if hidden and heads else None)
    serve = config.serve_config(group)
    if serve.engine_kind == "vllm" and serve.gpus == 0 and size is not None and size not in CPU_HEAD_SIZES:
        raise ValueError(
            f"{place}: attention heads of model group {group!r} have {size} numbers; on a CPU vLLM takes "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}: serve it on a GPU (serve.gpus: 1), by serve.engine_kind: transformers, or take another size"
        )


def _check_rank(config: RunConfig, group: str, shape: dict[str, Any]) -> None:
    """ValueError where a rank is above the smaller dimension of a layer; `shape` has the names of a Hugging Face config.

    Layers and sizes that such a config does not name are looked at when the adapter is made.
    """
    lora = config.train_config(group).lora
    if lora is None or not {"hidden_size", "intermediate_size", "num_attention_heads"} <= shape.keys():
        return
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    head_dim = shape.get("head_dim") or hidden // heads
    keys = min(hidden, head_dim * (shape.get("num_key_value_heads") or heads))
    narrow = {"q_proj": min(hidden, head_dim * heads), "o_proj": min(hidden, head_dim * heads)}
    narrow |= {"k_proj": keys, "v_proj": keys}
    narrow |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), min(hidden, shape["intermediate_size"]))
    limits = {target: narrow[target] for target in lora.target_modules if target in narrow}
    if limits and lora.rank > min(limits.values()):
        target = min(limits, key=lambda name: limits[name])
        raise ValueError(
            f"model_groups.{group}.train.lora.rank = {lora.rank} is above the smaller dimension of {target} "
            f"({limits[target]}): take at most {limits[target]}"
        )

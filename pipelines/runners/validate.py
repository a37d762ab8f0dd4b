"""validate: a run config -> ValueError with key and fix for what cannot work, before anything starts.

The fields by themselves are checked when they are parsed; here the config is compared with the workflow, the credit rule,
the tasks and the models. Imports no torch, ray or vllm.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipelines.config.messages import near
from pipelines.config.run_config import RunConfig
from pipelines.credit.rule import CreditKind, load_credit
from pipelines.runners.model_plan import plan_lines
from pipelines.tasks.sources import Check, check_disjoint, load_tasks
from pipelines.tasks.splits import SECTIONS
from serve_apps.chat_files import check_chat_files
from serve_apps.workflow import Workflow, load_object, load_workflow
from stores.model_folder import (
    Tensors,
    check_model_files,
    knows_all_tensors,
    read_tensors,
    vocabulary_rows,
    why_windowed,
)
from stores.types import Task


def check(config: RunConfig) -> list[str]:
    """Checks a run config; returns notes on this machine. ValueError for the first thing that cannot work."""
    workflow = load_workflow(config.workflow.path, config.workflow.settings)
    _check_agents(config, workflow)
    _check_baselines(config, load_credit(config.credit).kind)
    if config.warmstart is not None and config.warmstart.demonstrator:
        load_object(config.warmstart.demonstrator, place="warmstart.demonstrator")
    check_tasks(config, check=workflow.check_task)
    return [*_check_models(config), *workflow.preflight()]


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
                "nothing filtered (top_p 1, top_k 0, min_p 0): change the workflow's Agent, or set it in this section"
            )


def _check_baselines(config: RunConfig, kind: CreditKind) -> None:
    for group in config.model_groups:
        if kind == "increments" and config.train_config(group).algorithm == "leave_one_out":
            raise ValueError(
                f"model group {group!r}: leave_one_out compares a turn with the outcome without its agent, but credit rule "
                f"{config.credit.path!r} gives increments, which are parts of the outcome: take a rule of kind `returns`, or "
                "algorithm counterfactual"
            )


def check_tasks(config: RunConfig, *, check: Check | None = None) -> None:
    """Raises ValueError where sets of tasks overlap, are too small, or one that is needed is missing.

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


def _check_models(config: RunConfig) -> list[str]:
    """Checks what each model group starts from; returns notes on what could not be looked at here."""
    can_read_tokenizers = all(find_spec(name) is not None for name in ("tokenizers", "jinja2"))
    notes: list[str] = []
    models: dict[str, tuple[dict[str, Any], Tensors]] = {}
    for group, settings in config.model_groups.items():
        tiny, max_model_len = config.tiny_model(group), config.serve_config(group).max_model_len
        if tiny is not None and not settings.model:
            shape = {
                **tiny.model_dump(),
                "num_attention_heads": tiny.num_heads,
                "num_key_value_heads": tiny.num_kv_heads,
            }
            _check_rank(config, group, shape)
        if tiny is not None and not settings.model and max_model_len > tiny.max_position:
            raise ValueError(
                f"serve.max_model_len = {max_model_len} but warmstart.tiny_model.max_position = {tiny.max_position}: lower the "
                "first or raise the second"
            )
        if not settings.model or "://" in settings.model:
            continue
        folder = Path(settings.model)
        key = f"model_groups.{group}.model"
        if not folder.is_dir():
            raise ValueError(f"{key}: folder {settings.model} does not exist")
        for name, what in (("config.json", "model config"), ("tokenizer.json", "tokenizer")):
            if not (folder / name).is_file():
                raise ValueError(f"{key}: folder {settings.model} has no {what} ({name}): save it beside the weights")
        try:
            shape = check_model_files(folder)
            if not knows_all_tensors(shape):
                notes.append(
                    f"{key}: which tensors a model of type {shape['model_type']} needs is not known here: only sizes and the number of "
                    "layers were compared with config.json"
                )
            text = shape.get("text_config")
            shape |= text if isinstance(text, dict) else {}
            models[group] = shape, read_tensors(folder)
            vocabulary = vocabulary_rows(folder)
            if vocabulary is not None and vocabulary.num_padded:
                notes.append(
                    f"{key}: {vocabulary.num_padded} of {vocabulary.num_rows} rows of the vocabulary stand for no token: they are "
                    "masked when turns are sampled and trained on"
                )
            if can_read_tokenizers:
                check_chat_files(folder, vocab_size=shape.get("vocab_size"))
            else:
                notes.append(
                    f"{key}: tokenizer and chat template were not looked at: tokenizers or jinja2 is not installed"
                )
        except (ValueError, OSError) as error:
            raise ValueError(f"{key}: {error}") from None
        notes += _check_packing(config, group, shape)
        _check_rank(config, group, shape)
        limit = shape.get("max_position_embeddings")
        if limit is not None and max_model_len > limit:
            raise ValueError(
                f"serve.max_model_len = {max_model_len} but the model of {group!r} takes {limit} tokens: lower it"
            )
    return [*notes, *plan_lines(config, models)]


def _check_packing(config: RunConfig, group: str, shape: dict[str, Any]) -> list[str]:
    """Returns a line where rows are padded because of the model; ValueError where they should be packed all the same."""
    pack, reason = config.train_config(group).rows.pack, why_windowed(shape)
    if not reason or pack is False:
        return []
    if pack is True:
        raise ValueError(
            f"model_groups.{group}: train.rows.pack = true, but {reason}, which would reach across packed rows: set it to auto "
            "or false"
        )
    return [f"model_groups.{group}: rows are padded, not packed (train.rows.pack): {reason}"]


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

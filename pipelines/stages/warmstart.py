"""warmstart: demonstrations or chosen traces -> version 0 of every model group.

Reads: the train tasks and a demonstrator, or stored traces. Writes: model versions. Without a `warmstart` section the
models that the config names become version 0 as they are.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipelines.run.kept_weights import weight_names
from pipelines.run.run import Run
from serve_apps.chat.tokenizer import READY, PromptSettings
from serve_apps.episode.team import ActingTeam, TeamSpec
from serve_apps.openai_api.tool_calls import OPEN
from stores.by_name import open_by_name
from stores.files import is_uri, local_path, open_filesystem
from stores.journal.stage_results import WarmStarted
from stores.types import Trace, team_key
from stores.weights.store import refuse_other_run

if TYPE_CHECKING:
    from serve_apps.episode.demonstrate import ToolAnswers
    from train_loops.config import WarmstartConfig

StepProgress = Callable[[int, int, float], None]
NUM_PROBES = 4
"""Demonstrations whose logprobs prove, after a weight sync, which version is served."""


def warmstart(run: Run, *, progress: StepProgress | None = None) -> WarmStarted:
    """Makes version 0 of every model group."""
    # On a shared machine threads that spin at a barrier made this 7 times slower than threads that sleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from transformers.utils import logging

    from train_loops.engine.adapters import adopt_adapter
    from train_loops.engine.warmstart import adopt

    logging.disable_progress_bar()

    _check_owner(run)
    settings = run.config.warmstart
    with tempfile.TemporaryDirectory() as scratch:
        starts, metrics = _starts(run, settings, Path(scratch), progress)
        whole = {
            name: run.weights.ref(name, 0)
            or adopt(
                start.folder,
                store=run.weights,
                model_group=name,
                run_id=run.run_id,
                sequences=start.probes,
                note="warm start"
                if settings
                else f"adopted from {run.config.model_groups[_members(run)[name][0]].model}",
            )
            for name, start in starts.items()
        }
        models = {}
        for number, group in enumerate(run.config.model_groups):
            lora = run.config.train_config(group).lora
            if lora is None:
                models[group] = whole[group]
                continue
            models[group] = run.weights.ref(group, 0) or adopt_adapter(
                whole[run.config.weights_name(group)],
                store=run.weights,
                model_group=group,
                run_id=run.run_id,
                config=lora,
                seed=run.config.seed + number,
                out=Path(scratch) / f"adapter-{group}",
            )
    return WarmStarted(models=models, metrics=metrics)


def _check_owner(run: Run) -> None:
    """ValueError where the store has another run's versions of a name, also of the team's learner: they would be taken for this run's."""
    for name in dict.fromkeys([*weight_names(run), *map(run.config.weights_name, run.config.model_groups)]):
        for version in run.weights.versions(name)[:1]:
            refuse_other_run(run.model_ref(name, version), run.run_id)


@dataclass(frozen=True, slots=True)
class _Start:
    """A model folder that becomes version 0 of a model group, or of the base that several share."""

    folder: Path
    probes: Sequence[Sequence[int]] | None = None
    """Token sequences whose logprobs identify it; None: any."""


def _starts(
    run: Run, settings: WarmstartConfig | None, scratch: Path, progress: StepProgress | None
) -> tuple[dict[str, _Start], dict[str, float]]:
    """The start of every model group that has weights of its own and of every base, with metrics."""
    from train_loops.engine.warmstart import warmstart as learn

    if settings is not None and settings.tiny_model is not None:
        return _tiny(run, settings, scratch, progress)
    groups = _members(run)
    bases = {group: _local(g.model, scratch) for group, g in run.config.model_groups.items()}
    if settings is None:
        return {name: _Start(bases[members[0]]) for name, members in groups.items()}, {}
    starts: dict[str, _Start] = {}
    metrics: dict[str, float] = {}
    chosen: list[Trace] = []
    if settings.traces is not None:
        choose = open_by_name("pipelines.extensions.other_runs.chosen_traces:chosen", place="warmstart.traces")
        team = _team(run, bases, None)
        chosen = choose(run, settings.traces, team, count=settings.num_demonstrations, folders=bases)
    for weights, members in groups.items():
        base = bases[members[0]]
        pairs = _pairs(chosen or _demonstrations(run, settings, dict.fromkeys(bases, base)), members)
        learned = learn(
            pairs, config=settings, seed=run.config.seed, out=scratch / weights, model_folder=base, progress=progress
        )
        starts[weights] = _Start(scratch / weights, _probes(pairs))
        metrics |= {f"{weights}/{name}": value for name, value in learned.items()}
    return starts, metrics


def _members(run: Run) -> dict[str, list[str]]:
    """Whole weights -> the model groups whose policies are made of them: several where they are adapters of one base."""
    members: dict[str, list[str]] = {}
    for group in run.config.model_groups:
        members.setdefault(run.config.weights_name(group), []).append(group)
    return members


def _tiny(
    run: Run, settings: WarmstartConfig, scratch: Path, progress: StepProgress | None
) -> tuple[dict[str, _Start], dict[str, float]]:
    """One model for all groups of the same shape, tokenizer and weights made from the demonstrations alone.

    A base that groups share learns from their agents only.
    """
    from train_loops.engine.tiny_model import build_model, build_tokenizer, save_folder
    from train_loops.engine.warmstart import warmstart as learn

    spy = _TextSpy()
    answers: ToolAnswers = {}
    _demonstrations(run, settings, {}, spy, answers)
    groups: dict[Any, list[str]] = {}
    for group, about in run.config.model_groups.items():
        groups.setdefault((run.config.tiny_model(group), about.base), []).append(group)
    tokenizers: dict[Any, Any] = {}
    blanks: dict[str, Path] = {}
    for (shape, _), members in groups.items():
        tokenizers[shape] = build_tokenizer(spy.texts, vocab_size=shape.vocab_size)
        model = build_model(shape, tokenizers[shape], seed=run.config.seed)
        blanks |= dict.fromkeys(members, save_folder(model, tokenizers[shape], scratch / f"blank-{members[0]}"))
    traces = _demonstrations(run, settings, blanks, answers=answers)
    starts: dict[str, _Start] = {}
    metrics: dict[str, float] = {}
    for (shape, base), members in groups.items():
        pairs = _pairs(traces, members)
        own = settings.model_copy(update={"tiny_model": shape})
        out, seed = scratch / f"tiny-{members[0]}", run.config.seed
        learned = learn(pairs, config=own, seed=seed, out=out, tokenizer=tokenizers[shape], progress=progress)
        starts |= dict.fromkeys([base] if base else members, _Start(out, _probes(pairs)))
        prefix = "" if len(groups) == 1 else f"{'+'.join(members)}/"
        metrics |= {f"{prefix}{name}": value for name, value in learned.items()}
    return starts, metrics


def _demonstrations(
    run: Run,
    settings: WarmstartConfig,
    folders: Mapping[str, Path],
    spy: _TextSpy | None = None,
    answers: ToolAnswers | None = None,
) -> list[Trace]:
    """Traces from the demonstrator, tokenized by the models in `folders`; with `spy` only their texts are collected."""
    from serve_apps.episode.demonstrate import demonstrate

    count = settings.num_demonstrations
    if spy is not None:
        count = min(count, settings.tokenizer_demonstrations or count)
    return demonstrate(
        run.tasks("train"),
        team=_team(run, folders, spy),
        demonstrator=open_by_name(settings.demonstrator, place="warmstart.demonstrator"),
        count=count,
        run_id=run.run_id,
        seed=run.config.seed,
        answers=answers,
        limits=run.config.collect.episode,
    )


def _team(run: Run, folders: Mapping[str, Path], spy: _TextSpy | None) -> ActingTeam:
    versions = dict.fromkeys(run.config.model_groups, 0)
    team = TeamSpec(
        workflow=run.config.workflow.path,
        settings=dict(run.config.workflow.settings),
        group_of=run.config.group_of,
        tokenizers={group: str(folder) for group, folder in folders.items()},
        max_model_len={group: run.config.serve_config(group).max_model_len for group in versions},
        sampling={name: run.sampling(name, agent) for name, agent in run.workflow.agents.items()},
        policy_versions=versions,
        team_key=team_key(
            workflow=run.config.workflow.path, policy_versions=versions, prompts_sha256=run.workflow.prompts_sha256
        ),
        limits=run.config.collect.episode,
        chat_template_kwargs=run.config.template_kwargs(run.config.group_of),
    ).build()
    if spy is not None:
        team = replace(team, tokenizers=dict.fromkeys(versions, cast(Any, spy)))
    return team


class _TextSpy:
    """Takes the place of a tokenizer that does not exist yet and keeps the texts that it is given."""

    knows_tools = True  # the tiny models' chat template shows them
    chat_template = OPEN  # and has calls in the format of Hermes
    end_ids: frozenset[int] = frozenset()
    turn_ids: frozenset[int] = frozenset()
    folder = ""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, settings: PromptSettings = READY) -> list[int]:
        self.texts += [m["content"] or "" for m in messages] + [f"{m['role']}\n" for m in messages]
        return [0]

    def most_characters(self, num_tokens: int) -> None:
        return None

    def known_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def mark_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        settings: PromptSettings = READY,
    ) -> str:
        self.encode_chat(messages)
        self.texts += [json.dumps(tool["function"]) for tool in tools or ()]
        return f"chat {len(self.texts)}"

    def plain(self, marked: str) -> str:
        return marked

    def encode_marked(self, marked: str) -> list[int]:
        return [0]

    def mark_completion(self, token_ids: Sequence[int]) -> str:
        return self.decode(token_ids)

    def encode_completion(self, text: str) -> list[int]:
        return self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Returns one number for a text, as for the label of an option, by which it is found again."""
        self.texts.append(text)
        return [len(self.texts) - 1]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.texts[token_ids[0]]


def _pairs(traces: Sequence[Trace], model_groups: Collection[str]) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Prompt and completion ids of every turn of these model groups."""
    return [
        (turn.prompt_token_ids, turn.completion_token_ids)
        for trace in traces
        for turn in trace.turns
        if turn.model_group in model_groups
    ]


def _probes(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[int]]:
    return [[*prompt, *completion] for prompt, completion in pairs[:NUM_PROBES]]


def _local(model: str, scratch: Path) -> Path:
    """A local folder for a path or URI; ValueError where there is nothing."""
    if not is_uri(model):
        if not local_path(model).is_dir():
            raise ValueError(f"model folder {model} does not exist: give a folder in Hugging Face layout")
        return local_path(model)
    from pyarrow import fs

    out = scratch / f"download-{sha256(model.encode()).hexdigest()[:12]}"
    if not out.is_dir():  # another model group has the same one
        out.mkdir()
        filesystem, path = open_filesystem(model)
        try:
            fs.copy_files(path, str(out), source_filesystem=filesystem)
        except FileNotFoundError:
            raise ValueError(f"model folder {model} does not exist: give a folder in Hugging Face layout") from None
    return out

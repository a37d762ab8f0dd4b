"""warmstart: demonstrations or chosen traces -> version 0 of every model group.

Reads: the train tasks and a demonstrator, or stored traces. Writes: model versions. Without a `warmstart` section the
models that the config names become version 0 as they are.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipelines.chosen_traces import choose
from pipelines.run import Cast, Run, plain
from serve_apps.runner import ActingTeam
from serve_apps.workflow import load_object
from stores.files import is_uri, local_path, open_filesystem
from stores.types import Trace, team_key

if TYPE_CHECKING:
    from train_loops.config import WarmstartConfig

StepProgress = Callable[[int, int, float], None]
NUM_PROBES = 4
"""Demonstrations whose tokens a version is recognised by after a weight sync."""


def warmstart(run: Run, *, progress: StepProgress | None = None) -> dict[str, Any]:
    """Makes version 0 of every model group; returns {"models": {group: ref}, "metrics"}."""
    # On a shared machine threads that spin at a barrier made this 7 times slower than threads that sleep.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from transformers.utils import logging

    from train_loops.warmstart import adopt

    logging.disable_progress_bar()

    settings = run.config.warmstart
    with tempfile.TemporaryDirectory() as scratch:
        folders, metrics, probes = _folders(run, settings, Path(scratch), progress)
        models = {
            group: run.weights.ref(group, 0)
            or adopt(
                folder,
                store=run.weights,
                model_group=group,
                run_id=run.run_id,
                sequences=probes,
                note="warm start" if settings else f"adopted from {run.config.model_groups[group].model}",
            )
            for group, folder in folders.items()
        }
    return {"models": {group: plain(ref) for group, ref in models.items()}, "metrics": metrics}


def _folders(
    run: Run, settings: WarmstartConfig | None, scratch: Path, progress: StepProgress | None
) -> tuple[dict[str, Path], dict[str, float], Sequence[Sequence[int]] | None]:
    """Model folder of every group, metrics, and token sequences for the probe."""
    if settings is None:
        return {group: _local(g.model, scratch) for group, g in run.config.model_groups.items()}, {}, None
    if settings.tiny_model is not None:
        return _tiny(run, settings, scratch, progress)
    folders: dict[str, Path] = {}
    metrics: dict[str, float] = {}
    probes = None
    bases = {group: _local(g.model, scratch) for group, g in run.config.model_groups.items()}
    chosen: list[Trace] = []
    if settings.traces is not None:
        chosen = choose(run, settings.traces, count=settings.num_demonstrations, folders=bases)
    for group, base in bases.items():
        pairs = _pairs(chosen or _demonstrations(run, settings, dict.fromkeys(bases, base)), group)
        folders[group], found = _learn(run, settings, pairs, scratch / group, base, None, progress)
        metrics |= {f"{group}/{name}": value for name, value in found.items()}
        probes = [[*p, *c] for p, c in pairs[:NUM_PROBES]]
    return folders, metrics, probes


def _tiny(
    run: Run, settings: WarmstartConfig, scratch: Path, progress: StepProgress | None
) -> tuple[dict[str, Path], dict[str, float], Sequence[Sequence[int]]]:
    """One model for all groups, tokenizer and weights made from the demonstrations alone."""
    from train_loops.tiny_model import build_model, build_tokenizer, save_folder

    assert settings.tiny_model is not None, "only called for tiny models"
    spy = _TextSpy()
    _demonstrations(run, settings, {}, spy)
    tokenizer = build_tokenizer(spy.texts, vocab_size=settings.tiny_model.vocab_size)
    blank = save_folder(build_model(settings.tiny_model, tokenizer, seed=run.config.seed), tokenizer, scratch / "blank")
    traces = _demonstrations(run, settings, {group: blank for group in run.config.model_groups})
    pairs = _pairs(traces)
    folder, metrics = _learn(run, settings, pairs, scratch / "tiny", None, tokenizer, progress)
    return dict.fromkeys(run.config.model_groups, folder), metrics, [[*p, *c] for p, c in pairs[:NUM_PROBES]]


def _learn(
    run: Run,
    settings: WarmstartConfig,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    out: Path,
    base: Path | None,
    tokenizer: Any,
    progress: StepProgress | None,
) -> tuple[Path, dict[str, float]]:
    from train_loops.warmstart import warmstart as learn

    metrics = learn(
        pairs,
        config=settings,
        seed=run.config.seed,
        out=out,
        model_folder=base,
        tokenizer=tokenizer,
        progress=progress,
    )
    return out, metrics


def _demonstrations(
    run: Run, settings: WarmstartConfig, folders: Mapping[str, Path], spy: _TextSpy | None = None
) -> list[Trace]:
    """Traces from the demonstrator, tokenized by `folders`, or only listened to by `spy`."""
    from serve_apps.demonstrate import demonstrate

    return demonstrate(
        run.tasks("train"),
        team=_team(run, folders, spy),
        demonstrator=load_object(settings.demonstrator, place="warmstart.demonstrator"),
        count=settings.num_demonstrations,
        run_id=run.run_id,
        seed=run.config.seed,
    )


def _team(run: Run, folders: Mapping[str, Path], spy: _TextSpy | None) -> ActingTeam:
    versions = dict.fromkeys(run.config.model_groups, 0)
    team = Cast(
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
    ).build()
    if spy is not None:
        team = replace(team, tokenizers=dict.fromkeys(versions, cast(Any, spy)))
    return team


class _TextSpy:
    """Stands in for a tokenizer that does not exist yet: keeps the texts it is shown."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        self.texts += [m["content"] for m in messages] + [f"{m['role']}\n" for m in messages]
        return [0]

    def encode_completion(self, text: str) -> list[int]:
        self.texts.append(text)
        return [len(self.texts) - 1]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.texts[token_ids[0]]


def _pairs(traces: Sequence[Trace], model_group: str = "") -> list[tuple[Sequence[int], Sequence[int]]]:
    """Prompt and completion ids of every turn, of one model group or of all."""
    return [
        (turn.prompt_token_ids, turn.completion_token_ids)
        for trace in traces
        for turn in trace.turns
        if not model_group or turn.model_group == model_group
    ]


def _local(model: str, scratch: Path) -> Path:
    """A local folder for a path or URI; ValueError where there is nothing."""
    if not is_uri(model):
        if not local_path(model).is_dir():
            raise ValueError(f"model folder {model} does not exist: give a folder in Hugging Face layout")
        return local_path(model)
    from pyarrow import fs

    out = scratch / f"download-{sha256(model.encode()).hexdigest()[:12]}"
    out.mkdir(exist_ok=True)
    filesystem, path = open_filesystem(model)
    fs.copy_files(path, str(out), source_filesystem=filesystem)
    return out

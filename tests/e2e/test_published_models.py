"""Folders as they are published, in bfloat16, through collect, train and sync on real engines, at every pair of dtypes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from serve_apps.chat.tokenizer import load_tokenizer
from stores.weights.manifest import stored_dtype
from tests.e2e.local_runs import finish, report_of
from tests.published_shapes import write_shape
from tests.small_tokenizers import NO_THOUGHT, SWITCH

pytestmark = pytest.mark.nightly

BF16_TRAINER = {"train": {"deepspeed": {"bf16": True}}}
BF16_ENGINE = {"serve": {"dtype": "bfloat16"}}
TEAMS: dict[str, dict[str, tuple[str, dict[str, Any], str]]] = {
    # agent: family, settings of its model group, dtype of its next version
    "whole": {
        "one": ("gemma3", {}, "float32"),
        "two": ("qwen2.5", BF16_TRAINER | BF16_ENGINE, "bfloat16"),
        "three": ("smollm2", BF16_ENGINE, "float32"),
    },
    "adapters": {
        "one": ("llama3", {"base": "shared", "train": {"lora": {"rank": 8}}}, "float32"),
        "two": ("qwen3", {"chat_template_kwargs": {"enable_thinking": False}}, "float32"),
        "three": ("qwen3", BF16_TRAINER, "bfloat16"),
    },
}


def write_config(root: Path, team: str) -> Path:
    tasks = [{"id": f"t{i}", "question": f"number {i}", "answer": str(i)} for i in range(40)]
    for name, part in {"train": tasks[:30], "gate": tasks[30:]}.items():
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    groups = {
        agent: {"agents": [agent], "model": str(write_shape(family, root / agent)), **settings}
        for agent, (family, settings, _) in TEAMS[team].items()
    }
    for agent, (family, *_) in TEAMS[team].items():
        if family == "qwen3":  # the shape's template has no switch of thinking of its own
            with (root / agent / "chat_template.jinja").open("a") as template:
                template.write(SWITCH)
    config = {
        "run": f"published-{team}",
        "iterations": 1,
        "workflow": {"path": "tests.e2e.shapes_team:Talk"},
        "credit": {"path": "tests.e2e.shapes_team:EvenTokens"},
        "model_groups": groups,
        "tasks": {name: {"path": str(root / f"{name}.jsonl")} for name in ("train", "gate")},
        "serve": {"max_model_len": 256, "kv_cache_gib": 0.25},
        "collect": {"tasks_per_iteration": 16, "episodes_per_task": 4},
        "train": {"algorithm": "dr_mas", "optimizer": {"lr": 2e-2}, "num_minibatches": 2, "keep_warm": False},
        "evaluate": {"every": 5},
        "storage": {"root": str(root)},
    }
    file = root / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.parametrize("team", TEAMS)
def test_published_folders_train_and_their_versions_are_proven(team: str, tmp_path: Path) -> None:
    config, log = write_config(tmp_path, team), tmp_path / "log.txt"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelines.cli", "train", str(config)],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(os.environ),
        )
    finish(process, log)
    run = Run(load_config(config))
    assert report_of(run)["versions"] == dict.fromkeys(TEAMS[team], 1)
    proofs = {proof["model_group"]: proof for proof in run.iteration(1).synced.proofs}
    print({group: (p["verdict"], p["max_difference_new"], p["max_difference_old"]) for group, p in proofs.items()})
    assert {group: proof["verdict"] for group, proof in proofs.items()} == dict.fromkeys(TEAMS[team], "proven")
    for group, (_, settings, dtype) in TEAMS[team].items():
        ref = run.weights.ref(group, 1)
        assert ref is not None and stored_dtype(run.weights.manifest(ref).tensors) == dtype
        gap = run.iteration(1).trained[group].metrics["train/logprob_gap_mean"]
        assert gap < (1e-3 if "serve" not in settings and "deepspeed" not in str(settings) else 0.05)
    ends = {
        (turn.agent, load_tokenizer(str(tmp_path / turn.agent)).decode(turn.prompt_token_ids).endswith(NO_THOUGHT))
        for trace in run.traces.read_traces(run.iteration(1).collected.traces)
        for turn in trace.turns
    }
    assert ends == {(agent, "chat_template_kwargs" in settings) for agent, (_, settings, _) in TEAMS[team].items()}
    if team == "whole":
        assert "model_groups.one: rows are padded, not packed" in log.read_text()

"""bad_teams: a team -> one with the same agents and worse weights, and who asks it all the time."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipelines.run.run import Run
from stores.registry.team import Team
from stores.weights.manifest import Probe
from stores.weights.store import WeightStore

DEGRADED = 90
"""Version of its models, and of the team where it is put into service."""


def degraded(team: Team, folder: Path) -> Team:
    """The team with as much noise on its weights as there is signal: it talks nonsense until it is cut short."""
    models = {}
    for group, ref in team.models.items():
        at = folder / group
        shutil.copytree(ref.uri.removeprefix("file://"), at)
        tensors = load_file(at / "model.safetensors")
        generator = torch.Generator().manual_seed(0)
        noisy = {name: t + t.std() * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
        save_file(noisy, at / "model.safetensors", metadata={"format": "pt"})
        tokens = [list(range(3, 35))]
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32)(torch.tensor(tokens)).logits[0]
        logprobs = [float(logits.log_softmax(-1)[i, t]) for i, t in enumerate(tokens[0][1:])]
        probe = Probe(sequences=(tuple(tokens[0]),), logprobs=(tuple(logprobs),))
        models[group] = WeightStore(str(folder / "weights")).commit(
            at, model_group=group, version=DEGRADED, parent=None, run_id="degraded", iteration=1, probe=probe
        )
    return dataclasses.replace(team, models=models)


@contextmanager
def asked_all_the_time(run: Run) -> Iterator[list[str]]:
    """Two callers who run the whole workflow again and again; which team answered, and nothing but answers."""
    stop, answered = threading.Event(), []
    url = f"http://127.0.0.1:{run.config.gateway.port}/v1/workflows/{run.team_name}/runs"

    def call() -> None:
        with httpx.Client(timeout=60) as http:
            while not stop.is_set():
                try:
                    answer = http.post(url, json={"prompt": "2+3*4"})
                except httpx.HTTPError as error:
                    answered.append(repr(error))
                    continue
                answered.append(answer.headers["x-troupe-team"] if answer.status_code == 200 else answer.text)

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        yield answered
    finally:
        stop.set()
        for caller in callers:
            caller.join()

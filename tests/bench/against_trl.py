"""trl: samples per second end to end at the 100M shape, beside TRL's GRPOTrainer on the same work.

    Troupe: collect -> score -> train -> sync, stage by stage, everything stored     both: same model folder, prompts,
    TRL:    generate -> reward -> optimizer steps, one process, nothing stored       completions, groups, tokens, cores

TRL lives in an environment of its own (`.cache/trl`, lock `infra/locks/trl.txt`), made on first use.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from pipelines.begin import make_version_zero
from pipelines.cluster import connect, disconnect
from pipelines.serving import start
from pipelines.stages import run_stage
from pipelines.train import trainer_of
from tests.bench.figures import Figure, ratio
from tests.bench.peer import MARK
from tests.bench.setting import ROOT, build_100m, open_run
from tests.bench.single_agent import PROMPT

ENVIRONMENT = ROOT / ".cache" / "trl"
LOCK = ROOT / "infra" / "locks" / "trl.txt"
NUM_TASKS, GROUP_SIZE, MAX_TOKENS, NUM_MINIBATCHES = 12, 8, 32, 4
WARM_UP_ITERATIONS, TIMED_ITERATIONS = 1, 2
LR, THREADS = 1e-6, 2
STAGES = ("collect", "score", "train", "sync")


def measure(folder: Path) -> list[Figure]:
    """First TRL, then Troupe: never both busy."""
    python = environment()
    model = build_100m(folder / "model-100m")
    trl_s = _trl(folder, python, model)
    ours_s, stages_s = _troupe(folder, model)
    num = NUM_TASKS * GROUP_SIZE * TIMED_ITERATIONS
    parts = ", ".join(f"{stage} {seconds / TIMED_ITERATIONS:.1f}" for stage, seconds in stages_s.items())
    work = f"{NUM_TASKS} tasks x {GROUP_SIZE}, {MAX_TOKENS} tokens, {NUM_MINIBATCHES} steps, {TIMED_ITERATIONS} times"
    return [
        Figure(name="Troupe, 100M", value=num / ours_s, unit="samples/s", note=f"seconds per iteration: {parts}"),
        Figure(name="TRL GRPOTrainer, 100M", value=num / trl_s, unit="samples/s", note=work),
        ratio("Troupe / TRL", num / ours_s, num / trl_s, least=1.0, note="sampling, scoring, training, weight sync"),
    ]


def environment() -> Path:
    """The interpreter of TRL's environment; made, or made again where the lock has changed."""
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "lock.sha256"
    digest = sha256(LOCK.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
        return python
    print("trl: making its environment in .cache/trl", flush=True)
    uv = _find_uv()
    subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(ENVIRONMENT)], check=True)
    install = (
        'flags=(); eval "$("$1" infra/pip_settings.py)"; '
        'uv() { "$2" pip install --quiet --no-deps --python "$3" -r "$4" "${flags[@]}" "${@:5}"; }; '
        # Where the settings do not lead to the CPU build of torch, PyTorch's own index is asked.
        'uv "$@" || uv "$@" --index https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match'
    )
    arguments = [sys.executable, uv, str(python), str(LOCK)]
    subprocess.run(["bash", "-euc", install, "install", *arguments], cwd=ROOT, check=True)
    stamp.write_text(digest)
    return python


def _find_uv() -> str:
    """uv as the set-up left it, or the one on the PATH; RuntimeError with the fix where there is none."""
    for place in (ROOT / ".tools" / "bin" / "uv", Path(sys.executable).parent / "uv"):
        if place.is_file():
            return str(place)
    found = shutil.which("uv")
    if found is None:
        raise RuntimeError("uv was not found in .tools/bin or on the PATH: run `make test` once, or pip install uv")
    return found


def _prompts(run: Any) -> list[str]:
    return [PROMPT.format(question=task.prompt) for task in run.tasks("train")]


def _open(folder: Path, model: Path) -> Any:
    return open_run(
        "bench-trl",
        folder,
        {
            "workflow.path": "tests.bench.single_agent:SingleAgent",
            "credit": {"path": "tests.bench.credit:LetterShare"},
            "model_groups": {"solo": {"agents": ["solver"], "model": str(model)}},
            "agents": {"solver": {"max_tokens": MAX_TOKENS}},
            "warmstart": None,
            "serve.threads": THREADS,
            "collect": {"tasks_per_iteration": NUM_TASKS, "episodes_per_task": GROUP_SIZE},
            "train": {
                "algorithm": "grpo",
                "optimizer": {"lr": LR, "max_grad_norm": 1.0},
                "num_minibatches": NUM_MINIBATCHES,
                "threads": THREADS,
            },
        },
    )


def _trl(folder: Path, python: Path, model: Path) -> float:
    """Seconds of the timed iterations."""
    settings = folder / "trl.json"
    settings.write_text(
        json.dumps(
            {
                "model": str(model),
                "prompts": _prompts(_open(folder / "prompts", model)),
                "num_completions": NUM_TASKS * GROUP_SIZE,
                "group_size": GROUP_SIZE,
                "max_tokens": MAX_TOKENS,
                "num_minibatches": NUM_MINIBATCHES,
                "num_iterations": WARM_UP_ITERATIONS + TIMED_ITERATIONS,
                "lr": LR,
                "threads": THREADS,
            }
        )
    )
    # -P: the folder of the script must not shadow modules; the environment is TRL's alone.
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [str(python), "-P", str(Path(__file__).with_name("trl_grpo.py")), str(settings)],
        env=env | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    [line] = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    seconds = json.loads(line.removeprefix(MARK))["seconds"]
    print(f"trl: TRL {seconds} s per iteration", flush=True)
    return sum(seconds[WARM_UP_ITERATIONS:])


def _troupe(folder: Path, model: Path) -> tuple[float, dict[str, float]]:
    """Seconds of the timed iterations, in all and by stage."""
    run = _open(folder / "troupe", model)
    make_version_zero(run)
    connect()
    start(run, run.trained(0))
    trainer = trainer_of(run, "solo")
    trainer.wait_ready(run.config.train_config("solo").start_timeout_s)
    total, by_stage = 0.0, dict.fromkeys(STAGES, 0.0)
    for iteration in range(1, 1 + WARM_UP_ITERATIONS + TIMED_ITERATIONS):
        seconds = {}
        for stage in STAGES:
            began = time.perf_counter()
            result = run_stage(run, stage, iteration, model_group="solo" if stage == "train" else "")
            seconds[stage] = time.perf_counter() - began
            if stage == "train":
                assert not result["reason"], result["reason"]
                print(f"trl: Troupe's train metrics {result['metrics']}", flush=True)
        print(f"trl: Troupe iteration {iteration} {seconds}", flush=True)
        if iteration > WARM_UP_ITERATIONS:
            total += sum(seconds.values())
            by_stage = {stage: by_stage[stage] + s for stage, s in seconds.items()}
    trainer.stop()
    disconnect()
    return total, by_stage

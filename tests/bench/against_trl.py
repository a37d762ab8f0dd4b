"""trl: samples per second end to end at the 100M shape, beside TRL's GRPOTrainer on the same work.

    Troupe: collect -> score -> train -> sync, stage by stage, everything stored     both: same model folder, prompts,
    TRL:    generate -> reward -> optimizer steps, one process, nothing stored       completions, groups, tokens, cores

They take turns, iteration by iteration: on a machine whose speed drifts within minutes, one after the other compares the
minutes. TRL lives in an environment of its own (`.cache/trl`, lock `infra/locks/trl.txt`), made on first use.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

from pipelines.cluster.connect import connect, disconnect
from pipelines.run.run import Run
from pipelines.run.serving import start
from pipelines.runners.begin import make_version_zero
from pipelines.stages.steps import run_stage
from pipelines.stages.train import trainer_of
from tests.bench.figures import Figure, ratio
from tests.bench.peer import Peer
from tests.bench.setting import ROOT, build_100m, open_run
from tests.bench.single_agent import PROMPT

ENVIRONMENT = ROOT / ".cache" / "trl"
LOCK = ROOT / "infra" / "locks" / "trl.txt"
NUM_TASKS, GROUP_SIZE, MAX_TOKENS, NUM_MINIBATCHES = 12, 8, 32, 4
WARM_UP_ITERATIONS, TIMED_ITERATIONS = 1, 3
LR, THREADS = 1e-6, 2
STAGES = ("collect", "score", "train", "sync")


def measure(folder: Path) -> list[Figure]:
    """One iteration of TRL, one of Troupe, and so on: never both busy."""
    python = environment()
    model = build_100m(folder / "model-100m")
    run = _open(folder / "troupe", model)
    make_version_zero(run)
    connect()
    start(run, run.trained(0))
    trainer = trainer_of(run, "solo")
    trainer.wait_ready(run.config.train_config("solo").start_timeout_s)
    theirs, ours = [], []
    # -I: the environment is TRL's alone.
    command = [
        str(python),
        "-I",
        str(Path(__file__).with_name("trl_grpo.py")),
        str(_settings_of_trl(folder, run, model)),
    ]
    environ = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(THREADS)}
    with Peer(command, env=environ) as trl:
        for iteration in range(1, 1 + WARM_UP_ITERATIONS + TIMED_ITERATIONS):
            theirs.append(trl.ask({})["seconds"])
            ours.append(_iteration(run, iteration))
            print(f"trl: iteration {iteration}, TRL {theirs[-1]:.1f} s, Troupe {ours[-1]}", flush=True)
    trainer.stop()
    disconnect()
    return _figures(theirs[WARM_UP_ITERATIONS:], ours[WARM_UP_ITERATIONS:])


def _figures(theirs: list[float], ours: list[dict[str, float]]) -> list[Figure]:
    num = NUM_TASKS * GROUP_SIZE * TIMED_ITERATIONS
    ours_rate, trl_rate = num / sum(sum(seconds.values()) for seconds in ours), num / sum(theirs)
    parts = ", ".join(f"{stage} {sum(s[stage] for s in ours) / len(ours):.1f}" for stage in STAGES)
    each = ", ".join(f"{trl_s / sum(s.values()):.2f}" for trl_s, s in zip(theirs, ours, strict=True))
    work = f"{NUM_TASKS} tasks x {GROUP_SIZE}, {MAX_TOKENS} tokens, {NUM_MINIBATCHES} steps, {TIMED_ITERATIONS} times"
    note = f"sampling, scoring, training, weight sync; turn by turn {each}"
    return [
        Figure("Troupe, 100M", ours_rate, "samples/s", note=f"seconds per iteration: {parts}"),
        Figure("TRL GRPOTrainer, 100M", trl_rate, "samples/s", note=work),
        ratio("Troupe / TRL", ours_rate, trl_rate, least=1.5, note=note),
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
        'uv() { "$2" pip install --quiet --no-deps --require-hashes --python "$3" -r "$4" "${flags[@]}" "${@:5}"; }; '
        # Where the settings do not lead to the CPU build of torch, PyTorch's page of it is asked.
        'uv "$@" || uv "$@" --find-links https://download.pytorch.org/whl/cpu/torch/'
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


def _open(folder: Path, model: Path) -> Run:
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


def _settings_of_trl(folder: Path, run: Run, model: Path) -> Path:
    """The same work, written down for `trl_grpo`."""
    settings = folder / "trl.json"
    settings.write_text(
        json.dumps(
            {
                "model": str(model),
                "prompts": [PROMPT.format(question=task.prompt) for task in run.tasks("train")],
                "num_completions": NUM_TASKS * GROUP_SIZE,
                "group_size": GROUP_SIZE,
                "max_tokens": MAX_TOKENS,
                "num_minibatches": NUM_MINIBATCHES,
                "max_iterations": WARM_UP_ITERATIONS + TIMED_ITERATIONS + 1,  # it is ended while it waits
                "lr": LR,
                "threads": THREADS,
            }
        )
    )
    return settings


def _iteration(run: Run, iteration: int) -> dict[str, float]:
    """Seconds of every stage."""
    seconds = {}
    for stage in STAGES:
        began = time.perf_counter()
        run_stage(run, stage, iteration, model_group="solo" if stage == "train" else "")
        seconds[stage] = time.perf_counter() - began
        if stage == "train":
            result = run.iteration(iteration).trained["solo"]
            assert not result.reason, result.reason
            print(f"trl: Troupe's train metrics {result.metrics}", flush=True)
    return seconds

"""played_run: a run's stores as its stages leave them, without an engine or a trainer. Fixtures of the folders that import them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stage_records import collected, evaluated, finish, scored, synced, trained

from pipelines.config.run_config import load_config
from pipelines.report.record import write_reports
from pipelines.run.champions import set_champion
from pipelines.run.run import Run
from pipelines.stages.promote import register_team
from stores.files import write_file
from stores.journal.stage_results import WarmStarted
from stores.types import EpisodeRewards, ModelVersionRef, Purpose, Trace, TracesRef
from stores.weights.manifest import Probe

SMALL = Path(__file__).parent / "e2e" / "small.yaml"
PROBE = Probe(sequences=((1, 2, 3),), logprobs=((-0.1, -0.2),))
GROUP = "team"

Play = Callable[[Run, int], None]


@pytest.fixture(scope="session")
def play(make_trace: Callable[..., Trace], make_rewards: Callable[..., EpisodeRewards], tiny_model: Path) -> Play:
    """`play(run, k)`: what iteration k leaves behind, as the stages would; k = 0 is the warm start."""

    def weights(run: Run, k: int) -> ModelVersionRef:
        checkpoint = f"{run.folder}/checkpoints/{run.run_id}-{GROUP}/{GROUP}-v{k}-{k:08x}"
        write_file(f"{checkpoint}/policy.json", b"{}" * 50)
        return run.weights.commit(
            tiny_model,
            model_group=GROUP,
            version=k,
            parent=k - 1 if k else None,
            run_id=run.run_id,
            iteration=k,
            probe=PROBE,
            checkpoint=checkpoint,
        )

    def collect(run: Run, k: int) -> dict[str, Any]:
        where = {"run_id": run.run_id, "iteration": k, "purpose": Purpose.TRAIN, "team_key": f"team-{k}"}
        for start in range(0, 8, 2):
            run.traces.write_episodes([make_trace(i, **where) for i in range(start, start + 2)])
        pinned = run.traces.pin_episodes(**where)
        return collected(traces=pinned, policy_versions={GROUP: k - 1}).to_json()

    def score(run: Run, k: int, traces: TracesRef) -> dict[str, Any]:
        run.traces.write_rewards([make_rewards(t) for t in run.traces.read_traces(traces)])
        ref = run.traces.pin_rewards(
            run_id=run.run_id, iteration=k, purpose=Purpose.TRAIN, credit_version="c1", traces=traces
        )
        return scored(rewards=ref).to_json()

    def play(run: Run, k: int) -> None:
        if k == 0:
            run.journal.once(
                run.key(0, "warmstart"),
                lambda lease: WarmStarted(models={GROUP: weights(run, 0)}, metrics={}).to_json(),
            )
            return
        run.journal.once(run.key(k, "collect"), lambda lease: collect(run, k))
        run.journal.once(run.key(k, "score"), lambda lease: score(run, k, run.iteration(k).collected.traces))
        run.journal.once(run.key(k, "train", GROUP), lambda lease: trained(model=weights(run, k)).to_json())
        verdict = "promote" if k in (3, 4) else "reject"

        def promote(lease: Any) -> dict[str, Any]:
            version = register_team(run, run.trained(k), iteration=k, evaluation={"accuracy": k / 10})
            if verdict == "promote":
                set_champion(run, run.trained(k), version, reason="")
            return {"verdict": verdict, "condition": "", "team_version": version}

        run.journal.once(run.key(k, "promote"), promote)

    return play


@pytest.fixture(scope="session")
def played_run(play: Play, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of six iterations of which the oldest can be removed, in a folder of its own with its MLflow. Only read it."""
    changes: dict[str, Any] = {
        "storage.root": str(tmp_path_factory.mktemp("played") / "runs"),
        "iterations": 6,
        "maintain": {"keep_iterations": 2, "keep_champions": 1, "leftover_hours": 1e-9, "weights_limit_gb": 0},
    }
    run = Run(load_config(SMALL, changes))
    run.open()
    for k in range(7):
        play(run, k)
        if k:
            finish(run, k, synced(policy_versions={GROUP: k}))
            finish(run, k, evaluated())
    write_reports(run)
    return run

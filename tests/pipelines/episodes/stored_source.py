"""stored_source: a run with the traces of one iteration, from which others learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stage_records import collected as collected_result
from stage_records import finish

from pipelines.config.run_config import load_config
from pipelines.credit.rule import Credit, turn_reward
from pipelines.run.run import Run
from pipelines.stages.warmstart import warmstart
from stores.types import Purpose, Trace
from tests.train_loops.synthetic_traces import GROUP, WANTED, sample_traces

CONFIG = Path(__file__).parents[3] / "infra" / "workflows" / "solver_verifier.yaml"
NUM_TASKS, GROUP_SIZE = 4, 4


class Wanted:
    """A turn earns the share of its tokens that are wanted, or of those that are not."""

    kind = "returns"

    def __init__(self, sign: float = 1.0) -> None:
        self.sign = sign

    def assign_credit(self, trace: Trace) -> Credit:
        shares = [sum(i < WANTED for i in turn.completion_token_ids) / 6 for turn in trace.turns]
        rewards = [turn_reward(trace, i, {"wanted": self.sign * share}) for i, share in enumerate(shares)]
        return Credit(outcome=sum(shares) / 2, rewards=tuple(rewards))


def open_run(name: str, root: Path, model: Path, **changes: Any) -> Run:
    """A run of solver and verifier on one model group that starts from `model`."""
    both = {GROUP: {"agents": ["solver", "verifier"], "model": str(model)}}
    given = {"run": name, "model_groups": both, "warmstart": None, "storage.root": str(root), "iterations": 2}
    given |= {"credit": {"path": "stored_source:Wanted"}, "train": {"optimizer": {"lr": 1e-3}}}
    return Run(load_config(CONFIG, given | changes))


class Stored:
    """Run `other`, whose collect of iteration 1 is done."""

    def __init__(self, root: Path, model: Path, *, change: Callable[[Trace], Trace] = lambda trace: trace) -> None:
        self.root, self.model = root, model
        self.run = open_run("other", root, model)
        self.run.open()
        self.run.journal.once(self.run.key(0, "warmstart"), lambda _: warmstart(self.run).to_json())
        self.traces = [
            change(trace)
            for trace in sample_traces(model, run_id="other", num_tasks=NUM_TASKS, group_size=GROUP_SIZE)[0]
        ]
        self.run.traces.write_episodes(self.traces)
        pinned = self.run.traces.pin_episodes(run_id="other", iteration=1, purpose=Purpose.TRAIN, team_key="v0")
        finish(self.run, 1, collected_result(traces=pinned, policy_versions={GROUP: 0}))

    def learner(self, name: str = "again", *, model: Path | None = None, **changes: Any) -> Run:
        """Another run beside it, at version 0."""
        run = open_run(name, self.root, model or self.model, **changes)
        run.open()
        run.journal.once(run.key(0, "warmstart"), lambda _: warmstart(run).to_json())
        return run

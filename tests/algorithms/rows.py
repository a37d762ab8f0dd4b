"""rows: the comparisons that `make algorithms` makes, and what each of their rows changes of the common run config."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.config.run_config import RunConfig, load_config
from stores.types import Task

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / "infra" / "workflows"
SEEDS = (0, 1, 2)
Changes = Mapping[str, Any]
"""Dotted key of the run config -> value."""

TOWER = {"optimizer": {"lr": 3.0e-3, "max_grad_norm": 10.0}, "num_epochs": 20, "embedding_size": 32}
"""The whole team's learner sees a few hundred episodes in all: its defaults are for longer runs."""
FAST = {"target_tau": 0.3}
"""What is won at an episode's end has to reach its first turn within an iteration or two."""
CRITIC: Changes = {"train.critic": {"optimizer": {"lr": 1.0e-3}}}
FOUR: Changes = {"collect.episodes_per_task": 4}
"""Half of the episode budget; the other half is played as variants of these episodes."""


def _of(algorithm: str, *changes: Changes, **more: Any) -> Changes:
    merged: dict[str, Any] = {"train.algorithm": algorithm}
    for one in changes:
        merged |= one
    return merged | {key.replace("__", "."): value for key, value in more.items()}


MAIN: Mapping[str, Changes] = {
    "ppo": _of("ppo", CRITIC),
    "ippo": _of("ippo", CRITIC),
    "mappo": _of("mappo", train__team=TOWER),
    "happo": _of("happo", train__team=TOWER),
    "vdn": _of(
        "dr_mas",
        train__team=TOWER | FAST | {"replay_episodes": 512, "mixer": "vdn"},
        train__advantage={"normalize_std": False},
    ),
    "qmix": _of(
        "dr_mas",
        train__team=TOWER | FAST | {"replay_episodes": 512, "mixer": "qmix"},
        train__advantage={"normalize_std": False},
    ),
    "grpo": _of("grpo"),
    "dr_grpo": _of(
        "grpo",
        train__advantage={"normalize_std": False},
        train__loss={"aggregation": "seq_mean_token_sum_norm"},
    ),
    "dr_mas": _of("dr_mas"),
    "at_grpo": _of("at_grpo"),
    "rloo": _of("rloo"),
    "reinforce_pp": _of("reinforce_pp"),
    "reinforce_pp_baseline": _of("reinforce_pp_baseline"),
    "remax": _of("remax", collect__episodes_per_task=7, collect__variants={"kind": "greedy"}),
    "opo": _of("opo"),
    "gpg": _of("gpg"),
    "pass_at_k": _of("pass_at_k"),
    "gigpo": _of("gigpo"),
    "dapo": _of(
        "grpo",
        train__loss={"clip_high": 0.28, "aggregation": "token_mean"},
        train__overlong={"buffer_tokens": 8, "penalty": 0.5},
        collect__dynamic_sampling={"max_refills": 2},
    ),
    "gspo": _of(
        "dr_mas",
        train__loss={
            "policy": "gspo",
            "clip_low": 0.03,
            "clip_high": 0.04,
            "aggregation": "seq_mean_token_mean",
        },
    ),
    "cispo": _of("dr_mas", train__loss={"policy": "cispo", "clip_high": 0.28}),
    "counterfactual": _of("counterfactual", FOUR, collect__variants={"kind": "counterfactual", "per_task": 4}),
    "leave_one_out": _of("leave_one_out", FOUR, collect__variants={"kind": "leave_one_out", "per_task": 4}),
}
"""The whole family on one task, with one budget of episodes."""

INFERRED: Changes = {
    "credit.path": "pipelines.extensions.inferred_credit.inferred:InferredReward",
    "credit.settings": {
        "inner": {
            "path": "tests.algorithms.counting_house.credit:CountingHouseCredit",
            "settings": {"pay": "outcome"},
        }
    },
}
"""Which turns lead to the outcome is learned from what is stored."""

CREDIT: Mapping[str, Changes] = {
    "broadcast_grpo": _of("grpo"),
    "dr_mas": _of("dr_mas"),
    "at_grpo": _of("at_grpo"),
    "mappo": _of("mappo", train__team=TOWER),
    "vdn": _of(
        "dr_mas",
        train__team=TOWER | FAST | {"num_epochs": 80, "mixer": "vdn"},
        train__advantage={"group_by": "batch_agent"},
    ),
    "qmix": _of(
        "dr_mas",
        train__team=TOWER | FAST | {"num_epochs": 80, "mixer": "qmix"},
        train__advantage={"group_by": "batch_agent"},
    ),
    "counterfactual": MAIN["counterfactual"],
    "leave_one_out": MAIN["leave_one_out"],
    "own_scores": _of("at_grpo", credit__settings={"pay": "own"}),
    "inferred_scores": _of("reinforce_pp_baseline", INFERRED, train__advantage={"group_by": "task_agent_round"}),
    "progress_grpo": _of("grpo", credit__settings={"pay": "progress"}),
    "progress_dr_mas": _of("dr_mas", credit__settings={"pay": "progress"}),
}
"""Who earned it: the outcome for all against what tells the agents apart."""

ANCHORS: Mapping[str, Changes] = {
    "grpo": _of("grpo"),
    "gigpo_state": _of("gigpo", train__advantage={"anchor": "state"}),
    "gigpo_prompt": _of("gigpo", train__advantage={"anchor": "prompt"}),
}
"""A world: are turns compared with those in the same state, with those under the same prompt, or whole episodes?"""

CHOICES_MATH: Mapping[str, Changes] = {
    "fixed_order": {
        "workflow": {"path": "serve_apps.workflows.math_chain:MathChain"},
        "model_groups.team.agents": ["solver", "verifier", "refiner", "finalizer"],
        "cost": None,
    },
    "outcome": {},
    "difference": _of("counterfactual", FOUR, collect__variants={"kind": "counterfactual", "per_task": 4}),
    "state_value": _of("ppo", CRITIC),
}
"""An orchestrator under a limit on tokens against the fixed order; its choices are credited by the outcome, by replays, by a critic."""

CHOICES_SEARCH: Mapping[str, Changes] = {
    "fixed_order": {
        "workflow.path": "pipelines.examples.made_up_facts.fixed_search:FixedSearch",
        "workflow.settings": {
            "num_searches": 3,
            "retriever": {"documents": "pipelines.examples.made_up_facts.tasks:documents"},
            "top_k": 1,
        },
        "model_groups.team.agents": ["searcher", "answerer"],
        "cost": None,
    },
    "outcome": {},
}
"""An orchestrator that may answer after one search against three searches for every question."""

OVERLAP: Mapping[str, Changes] = {
    "lag_0": {"iterations": 12},
    "lag_1": {"iterations": 12, "loop.max_lag": 1},
}
"""Iterations one after the other against iterations that are sampled while the one before trains."""


MATH, CODE, SEARCH = (
    ("solver", "verifier", "refiner", "finalizer"),
    ("planner", "coder", "reflector"),
    ("planner", "answerer", "searcher", "summarizer", "updater"),
)


def _papers(agents: Sequence[str], **more: Changes) -> Mapping[str, Changes]:
    """The ablations of the papers on one team: what an agent is compared with, and which agents share weights."""
    own = {agent: {"agents": [agent]} for agent in agents}
    return {
        "dr_mas": _of("dr_mas"),
        "pooled": _of("dr_mas", train__advantage={"group_by": "task"}),
        "grpo": _of("grpo"),
        "shared": _of("dr_mas", model_groups={"team": {"agents": list(agents)}}),
        "separate": _of("dr_mas", model_groups=own),
        "adapters": _of(
            "dr_mas",
            model_groups={name: {**group, "base": "base"} for name, group in own.items()},
            train__lora={"rank": 16, "alpha": 32.0},
        ),
        **more,
    }


def _rounds(*numbers: int) -> Mapping[str, Changes]:
    return {f"rounds_{number}": {"workflow.settings.max_rounds": number} for number in numbers}


def _by_carry(task: Task) -> str:
    """Whether the last digits of a sum `a+b*c` add up to ten or more."""
    a, b, c = map(int, re.findall(r"\d+", task.prompt))
    return "with carry" if a % 10 + b * c % 10 >= 10 else "without carry"


def _by_source(task: Task) -> str:
    return task.source


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rows over one common run config."""

    name: str
    config: Path
    rows: Mapping[str, Changes]
    measure_every: int
    """Iterations between two measurements on the test tasks; the last is always measured."""
    highlight: str
    """The row that the others are compared with."""
    difficulty: Callable[[Task], str] | None = None
    """A task -> a name for tasks that are about as hard; None: what episodes spend is not reported."""
    is_of_one_model: bool = False
    """Whether one model, warm-started for all agents, is version 0 of every model group in every row; else each row begins with the
    config's own model groups."""

    def row_config(self, row: str, *, seed: int, root: Path) -> RunConfig:
        """The run config of one row and seed; trainers and engines lie under `root`, the stores in the row's own folder.

        One run name for all rows: apps and trainers are found by it and stay up. ValueError where a setting is refused.
        """
        folder = root / "rows" / f"{row}-{seed}"
        places = {
            "storage.root": str(root),
            "storage.journal": f"sqlite:///{folder / 'journal.db'}",
            "storage.traces": str(folder / "traces"),
            "storage.weights": str(folder / "weights"),
        }
        changes = {**places, "seed": seed, **(self.rows[row] if row else {})}
        if not self.is_of_one_model:
            return load_config(self.config, changes)
        groups = load_config(self.config).model_groups
        if not row:
            agents = [agent for group in groups.values() for agent in group.agents]
            return load_config(self.config, changes | {"model_groups": {"team": {"agents": agents}}})
        own = changes.pop("model_groups", {name: {"agents": list(group.agents)} for name, group in groups.items()})
        model = str(model_of(root, seed))
        adopted = {name: {**group, "model": model} for name, group in own.items()}
        return load_config(self.config, changes | {"model_groups": adopted, "warmstart": None})


def model_of(root: Path, seed: int) -> Path:
    """Where the model lies with which all rows of a seed begin, in a comparison of one model."""
    return root / "rows" / f"-{seed}" / "model"


def _of_one_model(name: str, workflow: str, rows: Mapping[str, Changes], *, highlight: str = "dr_mas") -> Comparison:
    config = WORKFLOWS / f"{workflow}.yaml"
    return Comparison(name=name, config=config, rows=rows, measure_every=6, highlight=highlight, is_of_one_model=True)


COMPARISONS = {
    "family": Comparison(
        name="family",
        config=ROOT / "infra" / "runs" / "algorithms.yaml",
        rows=MAIN,
        measure_every=6,
        highlight="grpo",
    ),
    "credit": Comparison(
        name="credit",
        config=ROOT / "tests" / "algorithms" / "counting_house" / "run.yaml",
        rows=CREDIT,
        measure_every=2,
        highlight="broadcast_grpo",
    ),
    "anchors": Comparison(
        name="anchors",
        config=ROOT / "infra" / "workflows" / "household.yaml",
        rows=ANCHORS,
        measure_every=3,
        highlight="grpo",
    ),
    "choices_math": Comparison(
        name="choices_math",
        config=ROOT / "infra" / "extensions" / "orchestration" / "choices_math.yaml",
        rows=CHOICES_MATH,
        measure_every=6,
        highlight="fixed_order",
        difficulty=_by_carry,
    ),
    "choices_search": Comparison(
        name="choices_search",
        config=ROOT / "infra" / "extensions" / "orchestration" / "choices_search.yaml",
        rows=CHOICES_SEARCH,
        measure_every=6,
        highlight="fixed_order",
        difficulty=_by_source,
    ),
    "overlap": Comparison(
        name="overlap",
        config=ROOT / "infra" / "runs" / "demo.yaml",
        rows=OVERLAP,
        measure_every=6,
        highlight="lag_0",
    ),
    "papers_math": _of_one_model("papers_math", "math_chain", _papers(MATH)),
    "papers_code": _of_one_model("papers_code", "reflective_code_partial", _papers(CODE, **_rounds(1, 2))),
    "papers_search": _of_one_model("papers_search", "iterative_search", _papers(SEARCH, **_rounds(1, 2))),
    "papers_verifier": _of_one_model("papers_verifier", "solver_verifier", _rounds(1, 2, 3), highlight="rounds_1"),
}

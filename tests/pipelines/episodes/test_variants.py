"""Variants and dynamic sampling: what is played beside the episodes that train, what is refused, what teaches nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from records import MakeTrace

from pipelines.config.run_config import load_config
from pipelines.episodes.dynamic_sampling import groups_without_signal
from pipelines.episodes.variants import choose_variants
from pipelines.runners.validate import check
from serve_apps.episode_spec import EpisodeSpec
from stores.traces.conventions import VariantName
from stores.types import EpisodeRewards, EpisodeStatus, Purpose, Trace, TurnReward

pytestmark = pytest.mark.fast

DEMO = Path(__file__).parents[3] / "infra" / "runs" / "demo.yaml"


@pytest.fixture
def episode(make_trace: MakeTrace) -> Callable[..., Trace]:
    """`episode(number)`: a turn of a writer, then one of a checker."""

    def make(number: int, *, task: str = "t", status: EpisodeStatus = EpisodeStatus.OK) -> Trace:
        base = make_trace(number)
        turns = tuple(replace(base.turns[0], turn_index=i, agent=a) for i, a in enumerate(("writer", "checker")))
        named = replace(base.task, task_id=task)
        changes = {"episode_id": f"{task}{number}", "episode_index": number, "group_id": task, "status": status}
        return replace(base, task=named, turns=turns, tool_calls=(), **changes)

    return make


def test_every_task_has_its_share_of_variants_and_the_same_ones_each_time(episode: Callable[..., Trace]) -> None:
    traces = [episode(i, task=task) for task in "ab" for i in range(4)]
    chosen = choose_variants(traces, kind="counterfactual", per_task=4, siblings=1, seed="0/1")
    assert chosen == choose_variants(list(reversed(traces)), kind="counterfactual", per_task=4, siblings=1, seed="0/1")
    assert chosen != choose_variants(traces, kind="counterfactual", per_task=4, siblings=1, seed="0/2")
    assert [trace.task.task_id for trace, _ in chosen] == ["a"] * 4 + ["b"] * 4
    for task in "ab":
        agents = [script.agent for trace, script in chosen if trace.task.task_id == task]
        assert sorted(agents[:2]) == ["checker", "writer"], "every agent once before any twice"
        keys = [(trace.episode_id, script.variant) for trace, script in chosen]
        assert len(keys) == len(set(keys))


def test_a_task_has_one_greedy_episode_and_failed_episodes_are_not_replayed(episode: Callable[..., Trace]) -> None:
    traces = [episode(i) for i in range(3)]
    assert [s.variant for _, s in choose_variants(traces, kind="greedy", per_task=1, siblings=1, seed="s")] == [
        "greedy"
    ]
    failed = [episode(i, status=EpisodeStatus.TIMEOUT) for i in range(3)]
    assert choose_variants(failed, kind="leave_one_out", per_task=2, siblings=1, seed="s") == []
    left_out = choose_variants([*failed[:2], traces[2]], kind="leave_one_out", per_task=9, siblings=1, seed="s")
    assert sorted(s.variant for _, s in left_out) == ["without-checker", "without-writer"]


def test_siblings_replay_the_same_change_under_ids_and_seeds_of_their_own(episode: Callable[..., Trace]) -> None:
    traces = [episode(i) for i in range(2)]
    for kind in ("counterfactual", "leave_one_out"):
        chosen = choose_variants(traces, kind=kind, per_task=2, siblings=3, seed="s")
        alone = choose_variants(traces, kind=kind, per_task=2, siblings=1, seed="s")
        assert [(t.episode_id, replace(s, sibling=0)) for t, s in chosen] == [
            (t.episode_id, s) for t, s in alone for _ in range(3)
        ]
        specs = [
            EpisodeSpec(
                run_id="r",
                iteration=1,
                purpose=Purpose.TRAIN,
                team_key="k",
                task=trace.task,
                episode_index=trace.episode_index,
                run_seed=0,
                script=script,
            )
            for trace, script in chosen
        ]
        assert len({spec.episode_id for spec in specs}) == len({spec.seed for spec in specs}) == 6
        assert len({spec.group_id for spec in specs}) == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (VariantName(kind="greedy"), "greedy"),
        (VariantName(kind="counterfactual", changed="12"), "counterfactual-12"),
        (VariantName(kind="counterfactual", changed="12", sibling=3), "counterfactual-12#3"),
        (VariantName(kind="without", changed="code-writer"), "without-code-writer"),
        (VariantName(kind="without", changed="code-writer", sibling=10), "without-code-writer#10"),
    ],
)
def test_a_variants_name_is_read_as_it_was_written(name: VariantName, text: str) -> None:
    assert str(name) == text and VariantName.parse(text) == name


def paid(trace: Trace, *rewards: float) -> EpisodeRewards:
    return EpisodeRewards(
        episode_id=trace.episode_id,
        run_id="r",
        iteration=1,
        purpose=Purpose.TRAIN,
        credit_version="c",
        outcome=rewards[-1],
        rewards=tuple(
            TurnReward(turn_index=t.turn_index, agent=t.agent, model_group=t.model_group, reward=r, breakdown={})
            for t, r in zip(trace.turns, rewards, strict=True)
        ),
    )


@pytest.mark.parametrize(
    ("first", "second", "teaches"),
    [
        (0.3, 0.1 + 0.2, False),
        (3e9, 3e9 + 1e-7, False),
        (-0.3, -(0.1 + 0.2), False),
        (0.0, -0.0, False),
        (0.3, 0.300001, True),
    ],
)
def test_rounding_is_no_signal(episode: Callable[..., Trace], first: float, second: float, teaches: bool) -> None:
    traces = [episode(i, task="a") for i in range(2)]
    rewards = [paid(t, 1, reward) for t, reward in zip(traces, (first, second), strict=True)]
    assert groups_without_signal(traces, rewards) == (set() if teaches else {"a"})


def test_a_group_teaches_nothing_where_no_agent_earned_differently(episode: Callable[..., Trace]) -> None:
    traces = [episode(i, task=task) for task in "abc" for i in range(2)]
    rewards = [paid(t, *of) for t, of in zip(traces, [(1, 0), (1, 0), (1, 0), (0, 0), (1, 0), (1, 0.5)], strict=True)]
    assert groups_without_signal(traces, rewards) == {"a"}
    assert groups_without_signal(traces, rewards[:2]) == {"a", "b", "c"}, "episodes that are not paid do not count"
    odd = replace(traces[0], variant="greedy", episode_id="v")
    assert groups_without_signal([*traces[:2], odd], [*rewards[:2], replace(paid(odd, 9, 9), episode_id="v")]) == {"a"}


def config_with(tmp_path: Path, **changes: Any) -> Path:
    data = yaml.safe_load(DEMO.read_text())
    for key, value in changes.items():
        data[key] = {**data.get(key, {}), **value} if isinstance(value, dict) else value
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


GREEDY = {"variants": {"kind": "greedy"}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"train": {"algorithm": "remax"}},
            r"holds turns against greedy episodes.*collect\.variants: \{kind: greedy\}.*rloo",
        ),
        ({"collect": GREEDY}, r"collect\.variants\.kind: greedy: no algorithm.*drop it.*remax"),
        ({"train": {"algorithm": "counterfactual"}, "collect": GREEDY}, r"against counterfactual episodes"),
        ({"collect": {"variants": {"kind": "greedy", "per_task": 2}}}, r"per_task = 2: greedy episodes.*give 1"),
        ({"collect": {"variants": {"kind": "greedy", "siblings": 2}}}, r"siblings = 2: greedy episodes.*give 1"),
        (
            {"collect": {"dynamic_sampling": {}, "episodes_per_task": 1}},
            r"dynamic_sampling needs episodes to compare.*at least 2",
        ),
        ({"collect": {"dynamic_sampling": {}, "oversample": 2}}, r"oversample = 2 both decide.*one of them"),
        (
            {"collect": {"episodes_per_task": 1}, "train": {"algorithm": "grpo"}},
            r"'grpo' compares the episodes of a task.*give at least 2, or take ppo",
        ),
        (
            {
                "collect": {"episodes_per_task": 1},
                "train": {"algorithm": "gigpo", "advantage": {"group_by": "batch_agent"}},
            },
            r"'gigpo' compares the episodes of a task.*give at least 2, or take ppo$",
        ),
        (
            {
                "collect": {"episodes_per_task": 1},
                "train": {"algorithm": "pass_at_k", "advantage": {"singleton": "raw"}},
            },
            r"'pass_at_k' compares the episodes of a task.*give at least 2, or take ppo$",
        ),
        (
            {"train": {"algorithm": "remax", "overlong": {"buffer_tokens": 4}}, "collect": GREEDY},
            r"train\.overlong = .*'remax' of model group '\w+' holds turns against what variants of the episode earned, which no penalty is taken from",
        ),
        (
            {
                "train": {"algorithm": "leave_one_out"},
                "collect": {"variants": {"kind": "leave_one_out"}},
                "credit": {"path": "pipelines.credit.outcome:OutcomeShare", "settings": {"share": "split"}},
            },
            r"share: split pays a turn a part of the outcome, and leave_one_out holds it against the whole.*take share: full",
        ),
        (
            {"train": {"algorithm": "dr_mas", "critic": {"hidden_size": 8}}},
            r"train\.critic is set but algorithm 'dr_mas' has no critic.*use ppo or ippo",
        ),
        (
            {"train": {"algorithm": "ppo", "team": {"mixer": "qmix"}}},
            r"mixer: qmix gives turns their credit.*algorithm: dr_mas",
        ),
        (
            {"train": {"algorithm": "remax", "team": {"mixer": "vdn"}}, "collect": GREEDY},
            r"mixer: vdn gives turns their credit, and algorithm 'remax'.*take algorithm: dr_mas",
        ),
        (
            {"train": {"team": {"num_epochs": 2}}},
            r"train\.team\.num_epochs is set, which only mappo, happo, vdn, qmix read: .*'dr_mas'.*mixer 'none'.*drop the setting",
        ),
        (
            {"train": {"algorithm": "mappo", "team": {"order": "fixed"}}},
            r"train\.team\.order is set, which only happo reads",
        ),
        (
            {"train": {"team": {"mixer": "vdn", "gae_lambda": 0.9}}},
            r"train\.team\.gae_lambda is set, which only mappo, happo read",
        ),
        (
            {"train": {"algorithm": "mappo"}, "model_groups": "mixed versions"},
            r"model_groups\.b\.train\.train_mixed_versions = True.*same episodes.*set it in `train`",
        ),
        (
            {"train": {"algorithm": "mappo"}, "model_groups": "whiten"},
            r"model_groups\.b\.train\.advantage\.whiten = 'all'.*whitened once.*set it in `train`",
        ),
        (
            {"train": {"algorithm": "mappo", "loss": {"kl_in_reward_coef": 0.1}}},
            r"kl_in_reward_coef: algorithm 'mappo'.*kl_in_loss_coef",
        ),
        (
            {"train": {"algorithm": "grpo", "loss": {"kl_in_reward_coef": 0.1}}},
            r"kl_in_reward_coef = 0\.1: algorithm 'grpo' divides.*normalize_std: false",
        ),
        (
            {"train": {"algorithm": "mappo", "overlong": {"buffer_tokens": 8}}},
            r"train\.overlong = .*8.*algorithm 'mappo'.*drop it, or take another algorithm",
        ),
        (
            {"train": {"algorithm": "happo", "agents": {"solver": {"overlong": {"buffer_tokens": 8}}}}},
            r"train\.agents\.solver\.overlong = .*8.*algorithm 'happo'.*drop it, or take another algorithm",
        ),
        (
            {"train": {"algorithm": "ppo", "critic": {"kind": "frozen"}, "loss": {"adaptive_kl": {}}}},
            r"adaptive_kl needs loss\.kl_in_reward_coef above 0",
        ),
        (
            {"train": {"algorithm": "ppo", "advantage": {"group_by": "task"}}},
            r"group_by = task: algorithm 'ppo' compares no groups: drop it",
        ),
        ({"train": {"deepspeed": {"offload_parameters": True}}}, r"offload_parameters needs deepspeed\.zero_stage: 3"),
        (
            {"train": {"algorithm": "happo"}, "model_groups": None},
            r"happo updates model groups one after another, and there is only one.*take mappo",
        ),
        (
            {"train": {"algorithm": "happo"}, "model_groups": "mixed"},
            r"model_groups\.b\.train: the whole team learns first.*set both in `train`",
        ),
        ({"train": {"algorithm": "mappo"}, "model_groups": "reserved"}, r"model_groups\.team: this name is"),
        (
            {"train": {"algorithm": "mappo", "lora": {"rank": 2}}, "model_groups": "reserved base"},
            r"model_groups\.a\.base = 'team': this name is the whole-team learner's",
        ),
    ],
)
def test_a_combination_that_makes_no_sense_is_refused_with_the_nearest_that_works(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    agents = ["solver", "verifier", "refiner", "finalizer"]
    groups: dict[Any, Any] = {
        None: {"a": {"agents": agents}},
        "mixed": {"a": {"agents": agents[:2]}, "b": {"agents": agents[2:], "train": {"algorithm": "grpo"}}},
        "reserved": {"team": {"agents": agents}},
        "reserved base": {"a": {"agents": agents[:2], "base": "team"}, "b": {"agents": agents[2:], "base": "team"}},
        "mixed versions": {
            "a": {"agents": agents[:2]},
            "b": {"agents": agents[2:], "train": {"train_mixed_versions": True}},
        },
        "whiten": {"a": {"agents": agents[:2]}, "b": {"agents": agents[2:], "train": {"advantage": {"whiten": "all"}}}},
    }
    if "model_groups" in changes:
        changes = changes | {"model_groups": groups[changes["model_groups"]]}
    path = config_with(tmp_path, **{k: v for k, v in changes.items() if k != "model_groups"})
    if "model_groups" in changes:
        data = yaml.safe_load(path.read_text()) | {"model_groups": changes["model_groups"]}
        path.write_text(yaml.safe_dump(data))
    with pytest.raises(ValueError, match=f"(?s){said}"):
        load_config(path)


def test_what_works_is_taken(tmp_path: Path) -> None:
    path = config_with(tmp_path, train={"algorithm": "remax"}, collect={"episodes_per_task": 7, **GREEDY})
    assert load_config(path).collect.variants.kind == "greedy"
    path = config_with(tmp_path, train={"algorithm": "happo"})
    assert load_config(path).train_tasks == ("team",)
    path = config_with(tmp_path, train={"team": {"mixer": "vdn"}, "advantage": {"normalize_std": False}})
    assert load_config(path).team_config.team.mixer == "vdn"
    path = config_with(
        tmp_path,
        train={"agents": {"verifier": {"overlong": {"buffer_tokens": 8}}}},
        collect={"episodes_per_task": 7, **GREEDY},
    )
    with_a_baseline = {"agents": ["solver"], "train": {"algorithm": "remax"}}
    groups = {"a": with_a_baseline, "b": {"agents": ["verifier", "refiner", "finalizer"]}}
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"model_groups": groups}))
    assert load_config(path).train_config("b").agents["verifier"].overlong.buffer_tokens == 8, (
        "of no group with variants"
    )


def test_an_outcome_is_no_baseline_for_parts_of_it(tmp_path: Path) -> None:
    rule = {"path": "pipelines.credit.math_progress:MathProgress"}
    changes = {
        "train": {"algorithm": "leave_one_out"},
        "collect": {"variants": {"kind": "leave_one_out", "per_task": 2}},
    }
    path = config_with(tmp_path, credit=rule, **changes)
    with pytest.raises(
        ValueError, match=r"leave_one_out compares a turn with the outcome.*gives increments.*counterfactual"
    ):
        check(load_config(path))

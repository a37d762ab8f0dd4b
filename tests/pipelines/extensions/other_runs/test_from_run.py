"""Training on the stored traces of another run: what is copied, what is refused, and that nothing is sampled."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from stage_records import collected as collected_result
from stage_records import decided, finish
from stored_source import GROUP_SIZE, NUM_TASKS, Stored, open_run

from pipelines.extensions.other_runs.from_run import adopt_traces, parse_source, pin_source, train_on_traces
from pipelines.report.progress import Screen
from pipelines.run.run import Run
from pipelines.stages.steps import begin, run_stage
from pipelines.stages.table import STAGES
from pipelines.stages.train import train_config
from stores.journal.stage_results import Collected, TracesSource
from stores.types import Task, Trace
from tests.train_loops.synthetic_traces import GROUP, WANTED
from train_loops.config import TEAM
from train_loops.worker.learner import read_rows
from train_loops.worker.trainer_handle import TrainJobError

pytestmark = pytest.mark.test


@pytest.fixture
def other(tmp_path: Path, tiny_model: Path) -> Stored:
    return Stored(tmp_path / "runs", tiny_model)


def test_the_traces_are_copied_pinned_and_paid_by_the_new_rule(other: Stored) -> None:
    run = other.learner(**{"credit": {"path": "stored_source:Wanted", "settings": {"sign": -1.0}}})
    source = parse_source(run, "other@1", "")
    assert pin_source(run, source) == 1
    for stage in ("collect", "score"):
        run_stage(run, stage, 1)
    collected, scored = run.iteration(1).collected, run.iteration(1).scored
    shutil.rmtree(other.run.folder)  # the copies need it no more

    assert collected.policy_versions == collected.sampled_by == {GROUP: 0}
    assert collected.source == TracesSource(run="other", iteration=1, store=str(other.root))
    assert (collected.num_new, collected.groups["done"]) == (NUM_TASKS * GROUP_SIZE, NUM_TASKS)
    pinned, rewards = collected.traces, scored.rewards
    assert {t.episode_id for t in run.traces.read_traces(pinned)} == {t.episode_id for t in other.traces}
    rows, _ = read_rows(
        run.traces, pinned, rewards, model_group=GROUP, config=run.config.train_config(GROUP), credit_kind="returns"
    )
    assert len(rows) == 2 * NUM_TASKS * GROUP_SIZE
    shares = {-sum(i < WANTED for i in row.token_ids[row.prompt_length :]) / 6: row.reward for row in rows}
    assert all(wanted == pytest.approx(reward) for wanted, reward in shares.items())


def test_the_same_command_finds_the_iteration_that_it_began_and_another_is_refused(other: Stored) -> None:
    run = other.learner()
    source = parse_source(run, "other@1", str(other.root))
    assert (run.source(1), pin_source(run, source), pin_source(run, source)) == (None, 1, 1)
    assert run.source(1) == source
    with pytest.raises(
        ValueError, match=r"iteration 1 of run 'again' trains on the traces of other@1, finish it first"
    ):
        pin_source(run, replace(source, iteration=2))
    first = run_stage(run, "collect", 1)
    assert isinstance(first, Collected)
    assert run_stage(run, "collect", 1) == first
    killed_before_it_was_recorded = adopt_traces(run, begin(run, STAGES["collect"], 1), source)
    assert (first.num_new, killed_before_it_was_recorded.num_new) == (16, 0)
    assert killed_before_it_was_recorded.traces.tag == first.traces.tag
    for done in (1, 2):
        finish(run, done, decided())
    with pytest.raises(ValueError, match=r"all 2 iterations of run 'again' are done: raise `iterations`"):
        pin_source(run, replace(source, iteration=2))


def test_an_iteration_that_samples_is_not_given_foreign_traces(other: Stored) -> None:
    run = other.learner()
    finish(run, 1, collected_result(policy_versions={GROUP: 0}))
    with pytest.raises(ValueError, match=r"iteration 1 of run 'again' has sampled episodes of its own"):
        pin_source(run, parse_source(run, "other@1", ""))


def test_tasks_that_the_run_holds_out_are_left_out_with_their_groups(tmp_path: Path, tiny_model: Path) -> None:
    def named(trace: Trace) -> Trace:
        task = trace.task.task_id
        return replace(trace, task=Task(task_id=task, prompt=f"prompt {task}", answers=("1",)))

    other = Stored(tmp_path / "runs", tiny_model, change=named)
    gate = tmp_path / "gate.jsonl"
    gate.write_text(json.dumps({"question": "prompt t1", "answer": "1"}))
    run = other.learner(**{"tasks.gate": {"path": str(gate)}})
    source = parse_source(run, "other@1", "")
    collected = adopt_traces(run, begin(run, STAGES["collect"], 1), source)
    kept = {trace.task.task_id for trace in run.traces.read_traces(collected.traces)}
    assert (kept, collected.traces.num_episodes) == ({"t0", "t2", "t3"}, 12)

    gate.write_text("\n".join(json.dumps({"question": f"prompt t{i}", "answer": "1"}) for i in range(4)))
    with pytest.raises(ValueError, match=r"no trace is left: 16 of 16 are of tasks in tasks\.gate, tasks\.test"):
        adopt_traces(run, begin(run, STAGES["collect"], 1), source)


def test_a_shared_trace_store_keeps_one_copy_and_pins_only_what_is_trained_on(tmp_path: Path, tiny_model: Path) -> None:
    other = Stored(tmp_path / "runs", tiny_model)
    run = other.learner(**{"storage.traces": other.run.traces_uri})
    collected = adopt_traces(run, begin(run, STAGES["collect"], 1), parse_source(run, "other@1", ""))
    assert (collected.num_new, collected.traces.num_episodes) == (0, 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("other", "is not of the form RUN@ITERATION, e.g. demo@3"),
        ("other@0", "is not of the form RUN@ITERATION"),
        ("@1", "is not of the form RUN@ITERATION"),
        ("othr@1", "no run 'othr' below .*; there are: again, other"),
        ("other@2", "collect of iteration 2 is not done there; it is of iterations 1"),
    ],
)
def test_traces_that_are_not_there_are_named(other: Stored, text: str, message: str) -> None:
    run = other.learner()
    with pytest.raises(ValueError, match=message):
        pin_source(run, parse_source(run, text, ""))
    assert run.source(1) is None


def test_agents_of_other_model_groups_are_refused(other: Stored) -> None:
    apart = {
        "solver": {"agents": ["solver"], "model": str(other.model)},
        GROUP: {"agents": ["verifier"], "model": str(other.model)},
    }
    run = other.learner("apart", model_groups=apart)
    with pytest.raises(ValueError, match=r"agent 'solver' belongs to model group 'shared' there and to 'solver' here"):
        pin_source(run, parse_source(run, "other@1", ""))
    strange = other.learner(
        "strange", model_groups={GROUP: {"agents": ["slover", "verifier"], "model": str(other.model)}}
    )
    with pytest.raises(ValueError, match=r"agent 'solver' played there, .*: did you mean 'slover'"):
        pin_source(strange, parse_source(strange, "other@1", ""))


def test_token_ids_of_another_tokenizer_are_refused(other: Stored, tmp_path: Path) -> None:
    mine = shutil.copytree(other.model, tmp_path / "mine")
    tokenizer = json.loads((mine / "tokenizer.json").read_text())
    tokenizer["added_tokens"][-1]["content"] = "<other>"
    (mine / "tokenizer.json").write_text(json.dumps(tokenizer))
    run = other.learner("mine", model=mine)
    with pytest.raises(
        ValueError, match=r"ids of the tokenizer in .*/other/weights/shared/v0, model group 'shared' has"
    ):
        pin_source(run, parse_source(run, "other@1", ""))


def test_an_algorithm_that_needs_variants_is_refused_where_the_source_has_none(other: Stored) -> None:
    changes = {"train": {"algorithm": "remax", "optimizer": {"lr": 1e-3}}, "collect.variants": {"kind": "greedy"}}
    run = other.learner(**changes)
    with pytest.raises(
        ValueError, match=r"'remax' compares turns with greedy episodes, .*\(variants: none\): take rloo"
    ):
        pin_source(run, parse_source(run, "other@1", ""))


def test_the_divisor_of_dr_grpo_is_the_largest_limit_of_the_groups_agents_unless_it_is_given(other: Stored) -> None:
    agents = {"solver": {"max_tokens": 17}, "verifier": {"max_tokens": 40}}
    train = {"loss": {"aggregation": "seq_mean_token_sum_norm"}}
    run = other.learner(agents=agents, train=train)
    assert run.config.train_config(GROUP).loss.norm_tokens is None
    assert train_config(run, GROUP).loss.norm_tokens == 40
    train = {"loss": {"aggregation": "seq_mean_token_sum_norm", "norm_tokens": 9}}
    assert train_config(other.learner("given", agents=agents, train=train), GROUP).loss.norm_tokens == 9
    assert train_config(other.learner("other_loss", agents=agents), GROUP).loss.norm_tokens is None


def test_accepting_a_smaller_sample_is_no_other_run(other: Stored) -> None:
    run = other.learner()
    accepting = open_run("again", other.root, other.model, **{"train.mismatch": {"min_ess": 0.1}})
    assert accepting.config.sha256 == run.config.sha256
    accepting.begin()


def further_from_it(trace: Trace) -> Trace:
    """As a version would have sampled it that is far from version 0: its own logprobs are all over the place."""
    turns = [
        replace(turn, rollout_logprobs=[-9.0 * (i % 2) - 0.1 for i, _ in enumerate(turn.rollout_logprobs)])
        for turn in trace.turns
    ]
    return replace(trace, turns=tuple(turns))


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.mark.nightly
def test_another_algorithm_makes_a_version_of_the_same_traces_once(
    other: Stored, ray_local: None, screen: Screen
) -> None:
    changes = {"train": {"algorithm": "grpo", "optimizer": {"lr": 1e-3}, "keep_warm": False}}
    config = open_run("again", other.root, other.model, **changes).config
    iteration, trained = train_on_traces(config, "other@1", screen=screen)
    ref = trained[GROUP]
    assert (iteration, ref.model.version, ref.reason) == (1, 1, "")
    assert ref.metrics["train/rows"] == 32
    assert ref.metrics["train/ess"] == pytest.approx(1.0, abs=1e-6)
    run = Run(config)
    assert run.weights.manifest(run.trained(1)[GROUP]).note.startswith("grpo on 32 rows")
    assert train_on_traces(config, "other@1", screen=screen) == (iteration, trained)
    assert [row.stage for row in run.journal.stages("again", 1)] == ["collect", "score", "train"]


@pytest.mark.nightly
def test_a_whole_team_learns_from_the_same_traces(other: Stored, ray_local: None, screen: Screen) -> None:
    train = {"algorithm": "mappo", "optimizer": {"lr": 1e-3}, "keep_warm": False, "team": {"num_epochs": 2}}
    config = open_run("again", other.root, other.model, train=train).config
    iteration, trained = train_on_traces(config, "other@1", screen=screen)
    assert (iteration, trained[GROUP].model.version) == (1, 1)
    assert trained[GROUP].metrics["train/rows"] == 32
    assert trained[GROUP].metrics["train/ess"] == pytest.approx(1.0, abs=1e-6)
    run = Run(config)
    assert run.weights.manifest(run.trained(1)[GROUP]).note.startswith("mappo on 32 rows")
    assert run.weights.versions(TEAM) == [1], "its critic is a version of its own"
    assert train_on_traces(config, "other@1", screen=screen) == (iteration, trained)


@pytest.mark.nightly
def test_traces_of_versions_too_far_away_fail_the_stage_until_that_is_accepted(
    tmp_path: Path, tiny_model: Path, ray_local: None, screen: Screen
) -> None:
    other = Stored(tmp_path / "runs", tiny_model, change=further_from_it)
    train = {"optimizer": {"lr": 1e-3}, "keep_warm": False}
    config = open_run("again", other.root, tiny_model, train=train).config
    with pytest.raises(
        TrainJobError, match=r"effective sample size 0\.\d+, .* below train\.mismatch\.min_ess=0\.5"
    ) as failed:
        train_on_traces(config, "other@1", screen=screen)
    assert failed.value.kind == "MismatchError"
    accepted = float(str(failed.value).rpartition("min_ess=")[2])
    assert 0 < accepted < 0.5
    accepting = open_run("again", other.root, tiny_model, train=train | {"mismatch": {"min_ess": accepted}}).config
    _, trained = train_on_traces(accepting, "other@1", screen=screen)
    assert trained[GROUP].model.version == 1

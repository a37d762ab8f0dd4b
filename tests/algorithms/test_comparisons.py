"""Comparisons: every row parses and could start, figures are those of literal results, a picture comes out."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.config.sections import PromoteConfig
from pipelines.runners.validate import check
from stores.types import Trace
from tests.algorithms.__main__ import main
from tests.algorithms.plot import draw
from tests.algorithms.rows import COMPARISONS, SEEDS, model_of
from tests.algorithms.spending import draw_costs, spending, spending_table
from tests.algorithms.table import against, figures, markdown
from tests.algorithms.training import read_result, result_file
from tests.records import build_trace
from train_loops.estimators import ESTIMATORS

pytestmark = pytest.mark.fast

ROWS = [(name, row) for name, comparison in COMPARISONS.items() for row in comparison.rows]


def result(before: list[float], after: list[float], seconds: float = 4.0) -> dict[str, object]:
    """Of a seed with one outcome per task."""
    outcomes = [{f"t{i}": [value] for i, value in enumerate(side)} for side in (before, after)]
    means = [sum(side) / len(side) for side in (before, after)]
    return {
        "before": means[0],
        "after": means[1],
        "outcomes_before": outcomes[0],
        "outcomes_after": outcomes[1],
        "curve": [[0, means[0]], [8, means[1]]],
        "seconds": [seconds, seconds + 2],
    }


@pytest.mark.parametrize(("comparison", "row"), ROWS)
def test_every_row_parses_and_could_start(comparison: str, row: str, tmp_path: Path, tiny_model: Path) -> None:
    if COMPARISONS[comparison].is_of_one_model:
        shutil.copytree(tiny_model, model_of(tmp_path, 1))
    check(COMPARISONS[comparison].row_config(row, seed=1, root=tmp_path))


def test_rows_of_one_model_differ_in_who_shares_it_and_begin_from_the_same(tmp_path: Path) -> None:
    comparison = COMPARISONS["papers_math"]
    configs = {row: comparison.row_config(row, seed=1, root=tmp_path) for row in comparison.rows}
    assert {row: len(config.model_groups) for row, config in configs.items()} == {
        "dr_mas": 2, "pooled": 2, "grpo": 2, "shared": 1, "separate": 4, "adapters": 4,
    }  # fmt: skip
    models = {group.model for config in configs.values() for group in config.model_groups.values()}
    assert models == {str(model_of(tmp_path, 1))} and not any(config.warmstart for config in configs.values())
    start = comparison.row_config("", seed=1, root=tmp_path)
    assert list(start.model_groups) == ["team"] and start.warmstart is not None


def test_a_row_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["algorithms", "--comparison", "credit", "--rows", "vdn", "broadcast", "--show"])
    with pytest.raises(SystemExit):
        main()
    assert "--rows broadcast: no such row in credit; there are at_grpo, broadcast_grpo" in capsys.readouterr().err


def test_every_algorithm_has_a_row_in_the_family() -> None:
    used = {changes["train.algorithm"] for changes in COMPARISONS["family"].rows.values()}
    assert used == set(ESTIMATORS)


def test_the_rows_of_a_comparison_share_run_trainer_place_and_test_tasks_but_no_store(tmp_path: Path) -> None:
    comparison = COMPARISONS["credit"]
    one, other = (comparison.row_config(row, seed=s, root=tmp_path) for row, s in (("dr_mas", 0), ("at_grpo", 2)))
    assert one.run == other.run and one.storage.root == other.storage.root
    assert one.storage.journal != other.storage.journal and one.storage.weights != other.storage.weights
    assert one.tasks.test == other.tasks.test and one.seed != other.seed
    assert SEEDS == (0, 1, 2)


def test_a_result_counts_only_for_the_settings_that_made_it(tmp_path: Path) -> None:
    comparison = COMPARISONS["credit"]
    assert read_result(comparison, "dr_mas", 0, root=tmp_path) is None
    config = comparison.row_config("dr_mas", seed=0, root=tmp_path)
    kept = result_file(tmp_path, "dr_mas", 0)
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps({"sha256": f"{config.sha256[:16]}/{config.iterations}"}))
    assert read_result(comparison, "dr_mas", 0, root=tmp_path) is not None
    kept.write_text(json.dumps({"sha256": "another/8"}))
    assert read_result(comparison, "dr_mas", 0, root=tmp_path) is None


def test_figures_are_means_over_seeds_with_an_interval_over_seeds_and_tasks() -> None:
    better = [result([0.0] * 8 + [1.0] * 2, [1.0] * 10), result([0.0] * 10, [1.0] * 8 + [0.0] * 2)]
    noise = [result([0.0, 1.0] * 5, [1.0, 0.0] * 5), result([0.0, 1.0] * 5, [0.0, 1.0] * 5)]
    found = figures({"better": better, "noise": noise, "not_yet": []}, num_samples=2000)
    assert list(found) == ["better", "noise"]
    about = found["better"]
    assert (about["before"], about["after"], about["change"]) == (0.1, 0.9, pytest.approx(0.8))
    assert about["seconds_per_iteration"] == 5.0
    assert about["is_improved"] and 0.4 < about["ci95"][0] < 0.8 < about["ci95"][1] <= 1.0
    assert found["noise"]["change"] == 0.0 and not found["noise"]["is_improved"]


def test_rows_are_compared_with_the_reference_on_the_same_tasks_and_seeds() -> None:
    results = {
        "reference": [result([0.0] * 4, [0.0, 0.0, 1.0, 1.0])],
        "other": [result([0.0] * 4, [1.0, 1.0, 1.0, 1.0])],
    }
    gains = against(results, "reference", num_samples=500)
    assert list(gains) == ["other"]
    assert gains["other"].mean == 0.5
    text = markdown(figures(results, num_samples=500), gains, "reference")
    assert text.splitlines()[2].startswith("| `other` | 1 | 0.000 | 1.000 | +1.000 [")
    assert "| +0.500 [" in text.splitlines()[2]


def test_curves_become_a_picture(tmp_path: Path) -> None:
    found = figures(
        {"grpo": [result([0.0, 0.0], [0.0, 1.0])], "dr_mas": [result([0.0, 0.0], [1.0, 1.0])]}, num_samples=200
    )
    draw(found, reference="grpo", title="Who earned it?", out=tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def spent(tokens: int, agents: list[str], prompt: str) -> Trace:
    """An episode with a turn of so many tokens by each agent."""
    base = build_trace(0)
    turns = tuple(
        replace(base.turns[0], agent=agent, completion_token_ids=(1,) * tokens, rollout_logprobs=(-1.0,) * tokens)
        for agent in agents
    )
    return replace(base, turns=turns, task=replace(base.task, task_id=prompt, prompt=prompt))


EASY, HARD = spent(10, ["orchestrator", "solver"], "11+2*3"), spent(10, ["orchestrator", "solver", "solver"], "19+2*6")


def test_what_episodes_spend_is_told_by_class_of_tasks_and_choices_are_no_rounds() -> None:
    difficulty = COMPARISONS["choices_math"].difficulty
    assert difficulty is not None
    found = spending([EASY, HARD], {EASY.task.task_id: [1.0], HARD.task.task_id: [0.0]}, difficulty)
    assert list(found) == ["all", "with carry", "without carry"]
    assert found["all"] == {"episodes": 2, "accuracy": 0.5, "tokens": 25.0, "rounds": 1.5, "calls": {"solver": 1.0}}
    assert (found["with carry"]["rounds"], found["with carry"]["accuracy"]) == (2.0, 0.0), "9 + 2 is more than 9"
    assert (found["without carry"]["rounds"], found["without carry"]["accuracy"]) == (1.0, 1.0)


def test_the_gate_says_what_a_cheaper_row_is_worth(tmp_path: Path) -> None:
    def row(after: list[float], tokens: float) -> dict[str, object]:
        whole = {"episodes": 10, "accuracy": 0.5, "tokens": tokens, "rounds": 2.0, "calls": {"solver": 1.0}}
        costs = [{"mean": tokens, "multiplier": 0.1 * i, "next_multiplier": 0.1} for i in range(4)]
        return {**result([0.0] * len(after), after), "spending": {"all": whole, "easy": whole}, "costs": costs}

    results = {
        "fixed": [{**row([1.0, 0.0] * 100, 100.0), "costs": []}],
        "same": [row([1.0, 0.0] * 100, 60.0)],
        "worse": [row([0.0, 0.0] * 100, 20.0)],
    }
    gains = against(results, "fixed", num_samples=500)
    lines = spending_table(results, gains, PromoteConfig(non_inferiority=0.03), "fixed").splitlines()
    assert lines[2] == "| `fixed` | 1 | 0.500 | 100.0 | 0% | 2.00 |  |  |"
    assert lines[3].startswith("| `same` | 1 | 0.500 | 60.0 | 40% | 2.00 | promote: ") and lines[3].endswith(
        " 0.10, 0.20, 0.30 |"
    )
    assert "| 80% | 2.00 | reject: " in lines[4]
    assert lines[8] == "| `fixed` | 2.00, 0.500, solver 100% |"
    draw_costs(results, limit=50.0, title="tokens", out=tmp_path / "costs.png")
    assert (tmp_path / "costs.png").read_bytes()[:4] == b"\x89PNG"

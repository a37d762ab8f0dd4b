"""Figures of iterations are computed once and kept; what is read of earlier iterations does not grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stage_records import collected, decided, evaluated, finish, scored, synced, trained

from pipelines.config.run_config import load_config
from pipelines.report import summaries
from pipelines.report.record import write_reports
from pipelines.report.summaries import RECORD, Summaries, iteration_summary
from pipelines.run.run import Run
from stores.journal.run_values import RunValue

pytestmark = pytest.mark.test

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"
GROUP = "team"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    opened = Run(load_config(SMALL, {"storage.root": str(tmp_path), "iterations": 500}))
    opened.begin()
    return opened


def play(run: Run, k: int, *, is_recorded: bool = True, entropy: float = 0.5) -> None:
    """Records an iteration's stages as done."""
    finish(run, k, collected())
    finish(run, k, scored(outcome=0.4))
    for group in run.config.model_groups:
        metrics = {"train/entropy": entropy, "train/logprob_gap_mean": 1e-6, "train/logprob_gap_max": k * 1e-6}
        finish(run, k, trained(group, k, metrics=metrics), group)
    finish(run, k, synced())
    finish(run, k, evaluated())
    finish(run, k, decided())
    if is_recorded:
        record(run, k)


def record(run: Run, k: int) -> None:
    def work(lease: Any) -> dict[str, Any]:
        iteration_summary(run, k)
        Summaries(run).so_far()
        return {}

    run.journal.once(run.key(k, RECORD), work)


def forget(run: Run) -> None:
    """Leaves nothing that was kept."""
    from stores.journal.schema import VALUES

    with run.journal._connect() as connection:
        connection.execute(VALUES.delete())


def computed_by(work: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Iterations whose figures were computed from the results of their stages."""
    numbers: list[int] = []
    compute = summaries.figures_of_iteration

    def counted(run: Run, number: int) -> Any:
        numbers.append(number)
        return compute(run, number)

    monkeypatch.setattr(summaries, "figures_of_iteration", counted)
    work()
    monkeypatch.undo()
    return numbers


def test_the_figures_of_an_iteration_are_computed_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in range(1, 6):
        assert computed_by(lambda k=k: play(run, k), monkeypatch) == [k]
    so_far = Summaries(run).so_far()
    assert so_far.num_iterations == 5 and so_far.gap_max == pytest.approx(5e-6)
    assert computed_by(lambda: Summaries(run).rows(range(1, 6)), monkeypatch) == []


def test_a_kept_summary_is_what_was_computed(run: Run) -> None:
    for k in range(1, 9):
        play(run, k, entropy=0.8 / k**4)
    kept = [iteration_summary(run, k) for k in range(1, 9)]
    so_far = Summaries(run).so_far()
    assert kept[-1] is not None and kept[-1]["warnings"], "the entropy is gone"
    forget(run)
    assert [iteration_summary(run, k) for k in range(1, 9)] == kept
    assert Summaries(run).so_far() == so_far


def test_what_is_not_recorded_yet_is_shown_and_not_kept(run: Run) -> None:
    play(run, 1)
    play(run, 2, is_recorded=False)
    assert Summaries(run).so_far().num_iterations == 2
    kept = run.journal.value(run.run_id, RunValue.SO_FAR)
    assert kept is not None and kept["last"] == 1
    assert run.journal.value(run.run_id, RunValue.SUMMARY.of(2)) is None, "its wall time may still be missing"
    record(run, 2)
    kept = run.journal.value(run.run_id, RunValue.SO_FAR)
    assert kept is not None and kept["last"] == 2


def test_an_iteration_that_is_finished_after_a_later_one_is_added_up_in_order(run: Run) -> None:
    play(run, 1)
    play(run, 3)
    assert Summaries(run).so_far().missing == [2]
    play(run, 2)
    so_far = Summaries(run).so_far()
    assert so_far.missing == [] and so_far.num_iterations == 3 and so_far.drawn.numbers == [1, 2, 3]


def test_an_unfinished_iteration_has_no_summary(run: Run) -> None:
    assert iteration_summary(run, 1) is None
    assert Summaries(run).rows([1, 2]) == [] and Summaries(run).so_far().num_iterations == 0


@pytest.mark.nightly
def test_what_one_record_reads_is_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in range(1, 160):
        play(run, k)
    read: list[int] = []
    values = run.journal.values

    def counted(run_id: str, names: Any) -> Any:
        found = values(run_id, names)
        read.append(len(found))
        return found

    monkeypatch.setattr(run.journal, "values", counted)
    play(run, 160)
    assert sum(read) <= 132


def test_the_report_that_is_written_again_names_the_commit_of_the_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_COMMIT", "that trained")
    play(run, 1)
    monkeypatch.setenv("TROUPE_COMMIT", "that looks at it")
    opened = Run(run.config, is_read_only=True)
    report = write_reports(opened, out=Path(run.folder) / "again").report
    assert report["commit"] == "that trained"


def test_what_is_not_known_yet_is_no_fact_of_the_page(run: Run) -> None:
    page = Path(write_reports(run).paths["report.html"]).read_text()
    facts = page[page.index('class="facts"') : page.index("</main>")]
    assert "team version" not in facts and "None" not in facts and run.config.workflow.path in facts

"""Where a run keeps its journal and MLflow's tables, below a root with any name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.run.stored_runs import journals, stored_run
from stores.config import StorageConfig

pytestmark = pytest.mark.fast

SMALL = Path(__file__).parents[2] / "e2e" / "small.yaml"


def run_below(root: Path) -> Run:
    config: Any = SimpleNamespace(run="demo", storage=StorageConfig(root=str(root)))
    return Run(config)


@pytest.mark.parametrize("name", ["q?a", "50%", "q%3Fa", "c#1", "plain"])
def test_a_runs_files_lie_below_its_root(name: str, tmp_path: Path) -> None:
    run = run_below(tmp_path / name)
    run.journal.begin_run("demo", "sha", "{}")
    assert (tmp_path / name / "demo" / "journal.db").is_file()
    assert sa.make_url(run._mlflow[0]).database == str(tmp_path / name / "mlflow.db")
    assert [row.run_id for journal in journals(str(tmp_path / name)) for row in journal.runs()] == ["demo"]
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_a_copy_of_a_runs_folder_beside_it_is_not_the_run(tmp_path: Path) -> None:
    def run_of(iterations: int) -> Run:
        return Run(load_config(SMALL, {"storage.root": str(tmp_path), "iterations": iterations}))

    run_of(3).begin()
    shutil.copytree(tmp_path / "small", tmp_path / "small-before")
    run_of(10).begin()
    assert stored_run("small", str(tmp_path)).config.iterations == 10
    shutil.rmtree(tmp_path / "small")
    for is_read_only in (True, False):
        with pytest.raises(
            ValueError, match=rf"small-before/journal\.db: give that folder its name back, {tmp_path}/small"
        ):
            stored_run("small", str(tmp_path), is_read_only=is_read_only)
    assert not (tmp_path / "small").exists(), "no empty run is made"


def test_a_begin_that_is_refused_leaves_the_stored_config_as_it_was(tmp_path: Path) -> None:
    journal = f"sqlite:///{tmp_path}/journal.db"  # of both, as on a cluster

    def run_in(root: Path, **more: Any) -> Run:
        return Run(load_config(SMALL, {"storage.root": str(root), "storage.journal": journal, **more}))

    (tmp_path / "old" / "small").mkdir(parents=True)
    run_in(tmp_path / "old").begin()
    with pytest.raises(ValueError, match="Go on with the one that is there"):
        run_in(tmp_path / "new", iterations=99).begin()
    assert stored_run("small", journal).folder == f"{tmp_path}/old/small"
    run_in(tmp_path / "old", iterations=99).begin()
    assert stored_run("small", journal).config.iterations == 99


def test_a_run_whose_folder_was_moved_is_shown_and_not_continued_and_served_only_while_the_old_one_is_there(
    tmp_path: Path,
) -> None:
    """Its results name files of the old place: they are gone, or are those of the run that was copied."""
    old, new = tmp_path / "old", tmp_path / "new"

    def run_in(root: Path) -> Run:
        return Run(load_config(SMALL, {"storage.root": str(root)}))

    run_in(old).begin()
    shutil.copytree(old, new)
    said = re.escape(f"run 'small' was begun in {old}/small, which its results name, and is now in {new}/small: ")
    with pytest.raises(
        ValueError, match=said + "this copy can be looked at and served. Go on with the one that is there"
    ):
        run_in(new).begin()
    stored_run("small", str(new)).begin(is_continued=False)
    shutil.rmtree(old / "small")
    for use in (run_in(new).begin, lambda: stored_run("small", str(new))):
        with pytest.raises(
            ValueError, match=said + f"here it can be looked at. .* or link it: ln -s {new}/small {old}/small"
        ):
            use()
    assert stored_run("small", str(new), is_read_only=True).folder == f"{new}/small"
    (old / "small").symlink_to(new / "small")
    for run in (run_in(new), run_in(old), stored_run("small", str(old))):
        run.begin()

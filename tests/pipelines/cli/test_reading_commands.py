"""Commands that only read need a disk that is neither writable nor free; what they cannot read they name, and end with 2."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from mounts import on_full_disk, on_read_only_mount
from played_run import GROUP, SMALL
from typer.testing import CliRunner

from pipelines.cli.main import app
from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from stores.types import Purpose, Trace

pytestmark = pytest.mark.nightly

COMMANDS = Path(__file__).with_name("commands.py")
Done = list[tuple[int, str]]


def said(done: subprocess.CompletedProcess[str]) -> Done:
    assert done.returncode == 0, done.stderr[-3000:]
    return [(code, text) for code, text in json.loads(done.stdout.splitlines()[-1])]


def words(commands: Sequence[Sequence[str | Path]], root: str | Path) -> list[str | Path]:
    """The command line of `commands.py`."""
    every = [[*map(str, command), "--root", str(root)] for command in commands]
    return [sys.executable, COMMANDS, json.dumps(every)]


def here(commands: Sequence[Sequence[str | Path]], root: str | Path) -> Done:
    done = subprocess.run(words(commands, root), capture_output=True, text=True, timeout=300)
    return said(done)


def reading(run: Run, out: Path) -> list[list[str | Path]]:
    """Every command that only reads."""
    (episode, *_) = run.traces.newest_episodes(limit=1, run_id=run.run_id, purpose=Purpose.TRAIN)
    return [
        ["runs"],
        ["show", episode["episode_id"], "--run", "small"],
        ["show", "--run", "small", "--purpose", "gate", "--max-outcome", "0.5"],
        ["lineage", "small@champion"],
        ["lineage", episode["episode_id"], "--run", "small"],
        ["serve-config", "small@champion"],
        ["export", GROUP, "6", out / "exported", "--run", "small"],
        ["report", "small", "--out", out / "report"],
        ["graph", "small"],
        ["maintain", "--run", "small", "--dry-run"],
    ]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("place", [on_read_only_mount, on_full_disk])
def test_every_command_that_only_reads_works_without_a_writable_disk(
    place: Callable[..., subprocess.CompletedProcess[str]], played_run: Run, tmp_path: Path
) -> None:
    root = Path(played_run.config.storage.root)
    before = content(root)
    done = said(place(root, words(reading(played_run, tmp_path), root)))
    assert [code for code, _ in done] == [0] * len(done), done
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert (tmp_path / "report" / "report.html").is_file()
    runs, *_, maintain = (text for _, text in done)
    assert "small" in runs and f"{GROUP} v1 removed" in maintain and "would free" in maintain
    assert content(root) == before


def test_commands_that_write_say_where_they_cannot_and_end_with_2_on_a_read_only_mount(played_run: Run) -> None:
    root = Path(played_run.config.storage.root)
    commands = [["serve", "small@champion"], ["maintain", "--run", "small"], ["canary", "small@candidate"]]
    serve, maintain, canary = said(on_read_only_mount(root, words(commands, root)))
    for code, text in (serve, canary):
        assert code == 2
        assert f"storage.root: nothing can be stored at {root}/small: Read-only file system. Give a place" in text
    assert maintain[0] == 2 and f"{root}/small/journal.db cannot be used: Read-only file system" in maintain[1]


def test_a_report_that_cannot_be_written_says_where_it_can(played_run: Run) -> None:
    root = Path(played_run.config.storage.root)
    for place, reason in ((on_read_only_mount, "Read-only file system"), (on_full_disk, "disk full")):
        ((code, text),) = said(place(root, words([["report", "small"]], root)))
        assert code == 2
        assert (
            f"run 'small': {root}/small/report.json cannot be written ({reason}): name another folder with --out"
            in text
        )


def test_a_folder_of_somebody_else_is_read_as_well(played_run: Run, tmp_path: Path) -> None:
    """As root without the right to override permissions, on files that belong to somebody else."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can give files to somebody else")
    root = tmp_path / "runs"
    shutil.copytree(played_run.config.storage.root, root)
    for path in [root, *root.rglob("*")]:
        os.chown(path, 65534, 65534)
    drop = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]
    out = tmp_path / "out"
    commands = reading(played_run, out)
    done = subprocess.run([*drop, *words(commands, root)], capture_output=True, text=True, timeout=300)
    assert [code for code, _ in said(done)] == [0] * len(commands), done.stdout
    (root / "small" / "journal.db").chmod(0o600)
    done = subprocess.run([*drop, *words([["runs"]], root)], capture_output=True, text=True, timeout=300)
    ((code, text),) = said(done)
    assert code == 2 and f"{root}/small/journal.db" in text and "Permission denied" in text


@pytest.mark.test
def test_a_damaged_journal_is_named_and_other_runs_are_shown(tmp_path: Path, make_trace: Callable[..., Trace]) -> None:
    small = Run(load_config(SMALL, {"storage.root": str(tmp_path)}))
    small.open()
    small.traces.write_episodes([trace := make_trace(run_id="small")])
    (tmp_path / "other").mkdir()
    config = SMALL.read_text().replace("run: small", f"run: other\nstorage: {{root: {tmp_path}}}")
    (tmp_path / "other.yaml").write_text(config)
    (tmp_path / "other" / "journal.db").write_bytes(b"garbage" * 1000)
    fault = f"{tmp_path}/other/journal.db is damaged (file is not a database): put a copy of it back"
    for command, code, text in (
        (["runs"], 2, fault),
        (["show", trace.episode_id, "--run", "small"], 0, "expected 5 or five"),
        (
            ["show", trace.episode_id, "--run", "other"],
            2,
            f"'other' is in no journal below {tmp_path} that can be read. {fault}",
        ),
        (["show", trace.episode_id, "--run", str(tmp_path / "other.yaml")], 2, f"run 'other': {fault}"),
        (
            ["show", trace.episode_id, "--run", "third"],
            2,
            f"'third' is in no journal below {tmp_path} that can be read. {fault}",
        ),
    ):
        done = CliRunner().invoke(app, [*command, "--root", str(tmp_path)])
        assert done.exit_code == code, done.output
        assert text in done.output
        assert command != ["runs"] or "small" in done.output


@pytest.mark.test
def test_stored_episodes_are_listed_by_their_properties(tmp_path: Path, make_trace: Callable[..., Trace]) -> None:
    run = Run(load_config(SMALL, {"storage.root": str(tmp_path)}))
    run.open()
    run.traces.write_episodes([make_trace(i, run_id="small") for i in range(3)])

    def done(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["show", "--run", "small", "--root", str(tmp_path), *words])
        return result.exit_code, result.output

    code, listed = done("--limit", "2", "--status", "ok", "--json")
    rows = json.loads(listed)
    assert code == 0 and len(rows["episodes"]) == 2 and rows["num_left_out"] == 1
    episode = rows["episodes"][0]["episode_id"]
    assert "expected 5 or five" in done(episode)[1]
    assert done("--iteration", "99") == (0, "no stored episode is like this\n")
    assert done("--served") == (0, "no stored episode is like this\n")
    code, fault = done(episode, "--status", "ok")
    assert code == 2 and "is shown by itself: leave its id out" in fault
    code, fault = done("--agent", "nobody")
    assert code == 2 and "'nobody' is no agent of run 'small'; there are " in fault


def test_damaged_stores_of_a_run_are_named_by_every_reader(played_run: Run, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    shutil.copytree(played_run.config.storage.root, root)
    episode = played_run.traces.newest_episodes(limit=1, run_id="small", iteration=6)[0]["episode_id"]
    table = root / "small" / "traces" / "episodes.small.it6.lance"
    for file in (table / "data").iterdir():
        os.truncate(file, 100)
    (root / "mlflow.db").write_bytes(b"garbage" * 1000)
    (root / "small" / "deployed.json").write_text("{")
    show, lineage, maintain = here(
        [
            ["show", episode, "--run", "small"],
            ["lineage", "small@champion"],
            ["maintain", "--run", "small", "--dry-run"],
        ],
        root,
    )
    assert show[0] == lineage[0] == maintain[0] == 2
    assert f"table episodes.small.it6 (iteration 6 of run 'small') in {root}/small/traces is damaged" in show[1]
    assert f"put a copy of {table} back" in show[1]
    assert f"{root}/mlflow.db is damaged (file is not a database)" in lineage[1]
    assert " is damaged" in maintain[1] and str(root) in maintain[1]


def test_maintenance_makes_room_on_a_full_disk(played_run: Run) -> None:
    root = Path(played_run.config.storage.root)
    done = said(on_full_disk(root, words([["maintain", "--run", "small"], ["runs"]], root)))
    assert [code for code, _ in done] == [0, 0], done
    assert "disk full; freed" in done[0][1]

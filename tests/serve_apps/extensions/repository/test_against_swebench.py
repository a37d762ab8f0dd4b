"""Our grades of honest changes against those of `swebench`, which reads the log of a run of its own outside of our sandbox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.examples.repair.tasks import Made, generate, make_repository
from pipelines.tasks.splits import settings_of
from serve_apps.extensions.repository.grading import grade
from serve_apps.extensions.repository.suite import suite

ROOT = Path(__file__).parents[4]
pytestmark = [pytest.mark.nightly, pytest.mark.needs_program("bwrap")]


def changes(made: Made) -> dict[str, dict[str, str]]:
    """The files of honest changes, by what they do."""
    other = next(path for path in made.repaired if path != made.path)
    return {
        "nothing": {},
        "the repair": dict(made.repaired),
        "the repair, and another file is gone": {**made.repaired, other: "\n"},
        "the repair, and a word too many": {
            **made.repaired,
            made.path: made.repaired[made.path] + "print('PASSED x')\n",
        },
        "no Python": {made.path: "def (:\n"},
        "an end": {made.path: "import sys\nsys.exit(3)\n"},
    }


def log_of(folder: Path, files: dict[str, str], selected: list[str]) -> str:
    for path, text in files.items():
        (folder / path).write_text(text)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--rootdir", str(folder), *selected]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    marks = ">>>>> Start Test Output", ">>>>> End Test Output", f">>>>> Test Exit Code: {done.returncode}"
    return f"{marks[0]}\n{done.stdout}\n{marks[1]}\n{marks[2]}\n"


def test_swebench_agrees_on_honest_changes(tmp_path: Path) -> None:
    made_here = subprocess.run(
        [ROOT / "tests" / "clients" / "make.sh", "swebench"], capture_output=True, text=True, timeout=900
    )
    if made_here.returncode:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(made_here.stderr[-2000:])
    ours: dict[str, list[Any]] = {}
    asked = []
    with suite() as tests:
        for task in generate(seed=3, split="test", count=3):
            made = make_repository(**settings_of(task))
            names = {"FAIL_TO_PASS": list(made.fail_to_pass), "PASS_TO_PASS": list(made.pass_to_pass)}
            for name, change in changes(made).items():
                files = {**made.files, **change, **made.hidden}
                got = grade(
                    tests, {path: text.encode() for path, text in files.items()},
                    fail_to_pass=made.fail_to_pass, pass_to_pass=made.pass_to_pass,
                )  # fmt: skip
                ours[f"{task.task_id}: {name}"] = [got.is_resolved, got.fail_to_pass, got.pass_to_pass]
                folder = tmp_path / str(len(asked))
                folder.mkdir()
                asked.append({"log": log_of(folder, files, sorted(made.hidden)), **names})
    grader = [
        ROOT / ".cache" / "clients" / "swebench" / "bin" / "python",
        Path(__file__).with_name("swebench_grader.py"),
    ]
    done = subprocess.run(grader, input=json.dumps(asked), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = {
        name: [status == "RESOLVED_FULL", *shares]
        for name, (status, *shares) in zip(ours, json.loads(done.stdout), strict=True)
    }
    assert ours == theirs
    assert sum(is_resolved for is_resolved, *_ in ours.values()) == 6, "the repair, with and without a word too many"

"""The stacks of a session's processes come behind those of the process that hangs; a stopped collector: episodes/test_sampling.py."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from pipelines.extensions.stacks import stacks

pytestmark = pytest.mark.fast


def test_processes_here_and_on_other_nodes_are_added_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "collect-3.txt"
    file.write_text("own stacks\n")
    monkeypatch.setattr(stacks, "session_name", lambda: "")
    stacks.add_stacks(file)
    assert file.read_text() == "own stacks\n", "this process is in no cluster"
    monkeypatch.setattr(stacks, "session_name", lambda: "session_1")
    monkeypatch.setattr(stacks, "processes_of", lambda session: [psutil.Process()])
    monkeypatch.setattr(stacks, "_stacks_elsewhere", lambda session: [("10.0.0.2", "no answer after 20 s")])
    stacks.add_stacks(file)
    own, here, there = file.read_text().split("\n== processes of session_1 on ")
    assert own == "own stacks\n" and f"-- pid {os.getpid()} " in here and "node 10.0.0.2\nno answer" in there

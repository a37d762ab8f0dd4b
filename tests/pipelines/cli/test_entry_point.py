"""The entry point ends the process quickly, and loses nothing by it: exit code, output, threads, functions for the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.test

ROOT = Path(__file__).parents[3]
COMMAND = """
import atexit, sys, threading, time
import pipelines.cli.main as commands
from pipelines.cli.__main__ import main

class Slow:
    def __del__(self):  # what Python calls while it takes modules apart
        print("taken apart")

def command():
    atexit.register(lambda: print("at the end"))
    commands.kept = Slow()
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread done"))).start()
    print("x" * 100_000)
    {end}

commands.main = command
main()
"""


def run_command(end: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND.format(end=end)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("pass", 0),
        ("sys.exit()", 0),
        ("sys.exit(75)", 75),
        ("sys.exit('troupe: no such run')", 1),
        ("raise ValueError('a mistake of ours')", 1),
    ],
)
def test_threads_functions_output_and_exit_code_are_those_of_a_process_that_python_ends(end: str, code: int) -> None:
    done = run_command(end)
    assert done.returncode == code
    assert done.stdout.splitlines() == ["x" * 100_000, "thread done", "at the end"]  # and nothing was taken apart
    if "mistake" in end:
        assert "ValueError: a mistake of ours" in done.stderr
    if "no such run" in end:
        assert done.stderr == "troupe: no such run\n"


@pytest.mark.parametrize(
    ("command", "code"), [("train infra/runs/demo.yaml --dry-run", 1), ("validate infra/runs/demo.yaml", 0)]
)
def test_a_command_whose_reader_has_enough_says_nothing(command: str, code: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    asked = [sys.executable, "-m", "pipelines.cli", *command.split()]
    own = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(asked, cwd=ROOT, env=own, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (code, ""), "and it is no lost infrastructure, after which one repeats"


@pytest.mark.parametrize("is_unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["--version", "--help", "train --help", "validate infra/runs/demo.yaml"])
def test_a_command_whose_output_finds_no_room_says_so_in_one_line(command: str, is_unbuffered: str) -> None:
    asked = [sys.executable, "-m", "pipelines.cli", *command.split()]
    own = {**os.environ, "PYTHONUNBUFFERED": is_unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(asked, cwd=ROOT, env=own, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("troupe: ") and "this command's output" in line

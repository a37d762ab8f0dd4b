"""Log lines: fields, formats, restraint."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest

from stores import logs

pytestmark = pytest.mark.fast

CODE = """
import logging, sys
from stores import logs
logs.configure()
logger = logging.getLogger("pipelines.stages.steps")
with logs.bound(run="r", iteration=3, stage="train", model_group=""):
    logger.info("begins, attempt %d", 1)
    sent = logs.carry()
logger.info("outside")
logging.getLogger("pipelines.run.watchdog").info("collect: 30 s, 3/8 done")
logging.getLogger("someone.else").info("not ours")
with logs.carried(sent), logs.bound(episode="e1"):
    try:
        raise RuntimeError("no")
    except RuntimeError:
        logger.warning("ended", exc_info=True)
"""


def run(variable: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env={"TROUPE_LOG": variable} if variable else {}
    )


def test_json_lines_carry_their_fields_into_other_processes() -> None:
    lines = [json.loads(line) for line in run("json").stderr.splitlines()]
    shown = [{k: v for k, v in line.items() if k not in ("at", "error")} for line in lines]
    stage = {"run": "r", "iteration": 3, "stage": "train"}
    ours = {"level": "INFO", "logger": "pipelines.stages.steps"}
    assert shown == [
        {**ours, **stage, "message": "begins, attempt 1"},
        {**ours, "message": "outside"},
        {"level": "INFO", "logger": "pipelines.run.watchdog", "message": "collect: 30 s, 3/8 done"},
        {**ours, "level": "WARNING", **stage, "episode": "e1", "message": "ended"},
    ]
    assert "RuntimeError: no" in lines[3]["error"]


def test_text_is_for_people_and_silence_for_terminals() -> None:
    first = run("text").stderr.splitlines()[0]
    assert first.endswith("INFO pipelines.stages.steps [run=r iteration=3 stage=train] begins, attempt 1")
    quiet = run("").stderr
    assert "begins" not in quiet
    assert "collect: 30 s, 3/8 done" in quiet.splitlines(), (
        "what a long stage is at, without WARNING and without names of modules"
    )
    assert "[run=r iteration=3 stage=train episode=e1] ended" in quiet


def test_an_unknown_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_LOG", "xml")
    with pytest.raises(ValueError, match="TROUPE_LOG='xml' is unknown: use json or text"):
        logs.configure()


def test_fields_follow_into_threads_that_copy_the_context() -> None:
    with logs.bound(run="a"), ThreadPoolExecutor() as pool:
        inside = pool.submit(copy_context().run, logs.carry).result()
    assert inside["fields"] == {"run": "a"}
    assert logs.carry()["fields"] == {}


def test_many_lines_of_a_kind_become_few_and_a_count(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    few = logs.Sparingly(logging.getLogger("pipelines.test"), count=3)
    for number in range(100):
        few.warning("episode %d failed", number)
    few.close()
    assert caplog.messages == [*(f"episode {n} failed" for n in range(3)), "... and 97 more like these"]

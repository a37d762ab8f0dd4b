"""A stage that hangs ends by its deadline, says what it waited for, and leaves the stacks of its processes."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pipelines.cluster.faults import ClusterLost, diagnose
from pipelines.cluster.owner_links import stage_owner
from pipelines.config.run_config import RunConfig
from pipelines.config.sections import LoopConfig
from pipelines.run import watchdog
from pipelines.run.watchdog import StageHung, Watchdog
from stores.journal.journal import Journal, StageKey
from stores.journal.waiting import waiting

pytestmark = pytest.mark.test

KEY = StageKey("run", 3, "collect")


def fake_run(folder: Path) -> Any:
    """What the watchdog needs of a run, with a real journal."""
    config = SimpleNamespace(loop=LoopConfig())
    journal = Journal(f"sqlite:///{folder}/journal.db")
    return SimpleNamespace(config=config, folder=str(folder), journal=journal, engines_wait_s=60.0)


def hang_here(lease: Any) -> dict[str, Any]:
    with waiting("the end of time"):
        time.sleep(60)
    return {}


def stacks_of(error: StageHung) -> str:
    return Path(str(error).rpartition(": ")[2]).read_text()


def test_a_stage_that_hangs_ends_at_its_deadline_and_names_what_it_waited_for(tmp_path: Path) -> None:
    run = fake_run(tmp_path)
    with pytest.raises(StageHung, match=r"not done after 0.3 s .*; waits for the end of time; stacks") as caught:
        Watchdog(run, KEY, timeout_s=0.3).once(hang_here)
    assert "hang_here" in stacks_of(caught.value)
    (row,) = run.journal.stages("run")
    assert row.status == "failed"
    assert "the end of time" in row.error
    assert Watchdog(run, KEY, timeout_s=9).once(lambda lease: {"ok": 1}) == {"ok": 1}
    (row,) = run.journal.stages("run")
    assert row.owner == stage_owner()


def test_a_stage_in_another_thread_is_ended_too_and_leaves_nothing_behind(tmp_path: Path) -> None:
    def spin(lease: Any) -> dict[str, Any]:
        while True:
            time.sleep(0.01)

    watchdog_in = lambda key, work: Watchdog(fake_run(tmp_path), key, timeout_s=0.3).once(work)  # noqa: E731
    with ThreadPoolExecutor(max_workers=1) as pool:
        with pytest.raises(StageHung, match="train of team, iteration 1"):
            pool.submit(watchdog_in, StageKey("run", 1, "train", "team"), spin).result()
        assert pool.submit(sum, range(5)).result() == 10
    watchdogs = [thread for thread in threading.enumerate() if thread.name.startswith("watchdog")]
    for thread in watchdogs:  # the stage does not wait for the last lines of its watchdog
        thread.join(timeout=10)
    assert not [thread for thread in watchdogs if thread.is_alive()]


@pytest.mark.parametrize("timeout_s", [9, 0.3])
def test_a_process_whose_threads_were_watched_can_be_traced(timeout_s: float, tmp_path: Path) -> None:
    """In a process of its own: one that cannot is lost."""
    traced = f"""if True:
        import faulthandler, sys, time
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path
        from test_watchdog import KEY, Watchdog, fake_run
        def work(lease):
            for _ in range(100):
                time.sleep(0.01)
            return {{"ok": 1}}
        run = fake_run(Path({str(tmp_path)!r}))
        with ThreadPoolExecutor() as pool:
            watched = pool.submit(lambda: Watchdog(run, KEY, timeout_s={timeout_s}).once(work))
            print(type(watched.exception()).__name__)
        faulthandler.dump_traceback_later(20, exit=True)
        sys.settrace(lambda *_: None)
        print((lambda: "traced")())
    """
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", traced], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    how = "StageHung" if timeout_s < 1 else "NoneType"
    assert ended.stdout.split() == [how, "traced"], ended.stderr


def test_an_inner_deadline_leaves_the_stacks_too_and_what_hangs_is_ended(tmp_path: Path) -> None:
    ended: list[str] = []

    def work(lease: Any) -> dict[str, Any]:
        raise TimeoutError("no order after 5 s")

    with pytest.raises(StageHung, match="no order after 5 s") as caught:
        Watchdog(fake_run(tmp_path), KEY, timeout_s=9, recover=lambda: ended.append("trainer")).once(work)
    assert "collect, iteration 3 of run run" in stacks_of(caught.value)
    assert ended == ["trainer"]


def test_what_is_waited_for_is_told_now_and_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pipelines.run.watchdog")
    dog = Watchdog(fake_run(tmp_path), KEY, timeout_s=9, log_interval_s=0.1)
    progress = dog.reporting(None)
    told = re.compile(r"collect, iteration 3 of run run: \d s, 3/8 done, 90 tokens/s, waits for collectors > 2 groups")

    def work(lease: Any) -> dict[str, Any]:
        progress(3, 8, "90 tokens/s")
        with waiting("collectors"), waiting(lambda: "2 groups"):
            while not told.search(caplog.text):  # until the watchdog's timeout
                time.sleep(0.05)
        return {}

    dog.once(work)


@pytest.mark.parametrize("is_main", [True, False])
def test_an_interrupt_that_comes_while_the_stage_ends_is_none(tmp_path: Path, is_main: bool) -> None:
    dog: Watchdog

    class Lock:
        """Has the watchdog interrupt the stage a moment before this is taken."""

        def __enter__(self) -> None:
            if is_main:
                os.kill(os.getpid(), watchdog.SIGNAL)
            else:
                watchdog.interrupt_thread(threading.current_thread(), watchdog.GivenUp)

        def __exit__(self, *_: object) -> None:
            pass

    def ends() -> dict[str, Any]:
        nonlocal dog
        dog = Watchdog(fake_run(tmp_path), KEY, timeout_s=60)
        dog._lock = Lock()  # type: ignore[assignment]
        return dog.once(lambda lease: {"ok": 1})

    before = signal.getsignal(watchdog.SIGNAL)
    with ThreadPoolExecutor(max_workers=1) as pool:
        assert (ends() if is_main else pool.submit(ends).result()) == {"ok": 1}
        assert pool.submit(sum, range(5)).result() == 10
    assert dog._is_over.is_set() and signal.getsignal(watchdog.SIGNAL) == before


STUCK = """
import sqlite3, sys
sys.path.insert(0, {tests!r})
from test_watchdog import KEY, Path, Watchdog, fake_run

def stuck_in_c(lease):
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
    return sqlite3.connect(":memory:").execute(endless).fetchone()

Watchdog(fake_run(Path({folder!r})), KEY, timeout_s=0.3, grace_s=0.3).once(stuck_in_c)
"""


@pytest.mark.nightly
def test_a_stage_that_no_interrupt_reaches_is_ended_with_its_process(tmp_path: Path) -> None:
    code = STUCK.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert "it did not react to an interrupt for 0.3 s: this process ends" in done.stderr
    (row,) = Journal(f"sqlite:///{tmp_path}/journal.db").stages("run")
    assert (row.status, "did not react" in row.error) == ("failed", True)
    (file,) = (tmp_path / "stacks").iterdir()
    assert "stuck_in_c" in file.read_text()


def test_a_stage_that_ends_late_but_by_itself_keeps_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(watchdog, "end_process", ended.append)
    run = fake_run(tmp_path)
    told, is_over = threading.Event(), threading.Event()
    fail = run.journal.fail

    def fail_when_it_is_over(*args: Any) -> None:
        told.set()
        is_over.wait(10)
        fail(*args)

    run.journal.fail = fail_when_it_is_over

    def react_late(lease: Any) -> dict[str, Any]:
        try:
            time.sleep(60)
        finally:
            told.wait(10)
        return {}

    with pytest.raises(StageHung):
        Watchdog(run, KEY, timeout_s=0.3, grace_s=0.1).once(react_late)
    is_over.set()
    for thread in threading.enumerate():
        if thread.name.startswith("watchdog"):
            thread.join(timeout=10)
    assert told.is_set() and ended == []


def test_a_stage_that_is_importing_ray_is_watched_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As long as an import runs, the module is there without its functions: the watchdog's thread died of that."""
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setattr(watchdog, "head_timeout_s", lambda: 0.1)
    run = fake_run(tmp_path)
    with caplog.at_level("INFO", "pipelines.run.watchdog"), pytest.raises(StageHung, match=r"not done after 0\.8 s"):
        Watchdog(run, KEY, timeout_s=0.8, log_interval_s=0.1).watch(lambda: hang_here(None))
    assert "waits for the end of time" in caplog.text


def test_an_interrupt_by_the_user_stays_one(tmp_path: Path) -> None:
    def work(lease: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Watchdog(fake_run(tmp_path), KEY, timeout_s=9).once(work)
    assert not (tmp_path / "stacks").exists()


def test_waiting_to_be_alone_does_not_count_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = fake_run(tmp_path)
    entered, released = threading.Event(), threading.Event()

    def somebody_else() -> None:
        with run.journal.hold("run", "engines", owner="an evaluation"):
            entered.set()
            released.wait(10)

    threading.Thread(target=somebody_else).start()
    entered.wait(10)
    threading.Timer(1.5, released.set).start()
    began = time.monotonic()
    with caplog.at_level("INFO", "pipelines.run.watchdog"):
        ref = Watchdog(run, KEY, timeout_s=1.0, log_interval_s=0.1).once(
            lambda lease: {"ok": 1}, alone=run.journal.hold("run", "engines")
        )
    assert (ref, time.monotonic() - began > 1.2) == ({"ok": 1}, True)
    assert "an evaluation" in caplog.text


def test_work_that_is_no_stage_is_watched_like_one(tmp_path: Path) -> None:
    def start() -> None:
        with waiting("apps to start: a"):
            time.sleep(60)

    with pytest.raises(StageHung, match=r"start-engines.*waits for apps to start: a"):
        Watchdog(fake_run(tmp_path), StageKey("run", 0, "start-engines"), timeout_s=0.3).watch(start)


def watchdogs() -> Iterator[tuple[str, dict[str, str]]]:
    """Where the code makes one with a time of its own, and the source of its named arguments."""
    for file in sorted((Path(__file__).parents[3] / "pipelines").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Watchdog":
                yield file.name, {word.arg or "": ast.unparse(word.value) for word in node.keywords}


def test_the_message_of_a_deadline_names_a_key_of_the_config(tmp_path: Path) -> None:
    other = StageKey("run", 0, "measure")
    with pytest.raises(StageHung, match=r"not done after 0.3 s \(evaluate\.stage_timeout_s\)"):
        Watchdog(fake_run(tmp_path), other, timeout_s=0.3, timeout_key="evaluate.stage_timeout_s").watch(
            lambda: hang_here(None)
        )
    made = list(watchdogs())
    assert len(made) == 3, "all others watch work of a section: `of_section`"
    for file, words in made:
        # Only a stage of the loop is named like its section.
        assert file == "steps.py" or "timeout_key" in words, file
        for section, key in re.findall(r"(\w+)\.(\w+_s)\b", words.get("timeout_key", "")):
            assert key in RunConfig.model_fields[section].annotation.model_fields, (file, section)  # type: ignore[union-attr]


@pytest.mark.nightly
def test_a_head_that_stays_away_ends_the_stage_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_cluster_answers", lambda: False)
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "6")
    with pytest.raises(ClusterLost, match="the head of the Ray cluster is gone; waits for the end of time") as caught:
        Watchdog(fake_run(tmp_path), KEY, timeout_s=9, log_interval_s=0.1).once(hang_here)
    assert diagnose(caught.value).exit_code == 75
    assert not (tmp_path / "stacks").exists()

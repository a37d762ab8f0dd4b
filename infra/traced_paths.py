"""traced_paths: a small run, trained and served -> the source files in which something runs, on three paths.

    task to gradient    from the first stage of iteration 1 to the end of its training
    trainer to engine   the stage `sync`: the new weights go into the engines
    chat request        one call of `/v1/chat/completions`, in the gateway and the engine's app

A profiler in each process notes when a function of the source runs; it comes into the processes by `sitecustomize`, so that the source
knows nothing of it. Background work that happens to run meanwhile is counted as well.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import URLError
from urllib.request import ProxyHandler, Request, build_opener

CONFIG = "tests/e2e/small.yaml"
DEADLINE_S = 60.0
OPENER = build_opener(ProxyHandler({}))
TICKS_PER_S = 10
PROFILER = f"""
import json, os, sys, threading, time
ROOT, OUT = os.environ["TROUPE_TRACED_ROOT"], os.environ["TROUPE_TRACED_OUT"]
FOLDERS = tuple(os.path.join(ROOT, name) + os.sep for name in ("dags", "pipelines", "serve_apps", "train_loops", "stores"))
CO_OPTIMIZED = 1  # a function's code, and not a module's or a class's
ticks, is_ours = {{}}, {{}}
def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and (ours := is_ours.get(code)) is not False:
        if ours is None:
            is_ours[code] = ours = code.co_flags & CO_OPTIMIZED and code.co_filename.startswith(FOLDERS)
            if not ours:
                is_ours[code] = False
                return
        ticks.setdefault(code.co_filename, set()).add(int(time.time() * {TICKS_PER_S}))
def write():
    path = os.path.join(OUT, f"{{os.getpid()}}.json")
    while True:
        time.sleep(0.5)
        if ticks:
            data = {{name[len(ROOT) + 1:]: sorted(at) for name, at in list(ticks.items())}}
            with open(path + ".new", "w") as file:
                json.dump(data, file)
            os.replace(path + ".new", path)
threading.Thread(target=write, daemon=True).start()
threading.setprofile(note)
sys.setprofile(note)
"""


def path_rows(root: Path) -> list[tuple[str, str, str]]:
    """Trains and serves `CONFIG` of the checkout at `root`; returns rows of name, number of files and aim."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "site").mkdir()
        (folder / "ticks").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(PROFILER)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{folder / 'site'}:{root}",
            "TROUPE_TRACED_ROOT": str(root),
            "TROUPE_TRACED_OUT": str(folder / "ticks"),
        }
        ports = [_free_port() for _ in range(3)]
        environment |= {
            "TROUPE_CACHE": str(folder / "cache"),
            "TROUPE_RAY_PORT": str(ports[0]),
            "TROUPE_RAY_DASHBOARD_PORT": str(ports[1]),
            "RAY_ADDRESS": f"127.0.0.1:{ports[0]}",
        }
        changes = ("--set", f"storage.root={folder / 'run'}", "--set", f"gateway.port={ports[2]}")
        in_order = [
            ["infra/ray_head.sh", "up"],
            [sys.executable, "-m", "pipelines.cli", "train", CONFIG, *changes],
            [sys.executable, "-m", "pipelines.cli", "serve", "small@champion", "--root", str(folder / "run")],
        ]
        try:
            for command in in_order:
                subprocess.run(command, cwd=root, env=environment, check=True)
            chat = _seconds_of_a_chat(ports[2])
        finally:
            subprocess.run(["infra/ray_head.sh", "down"], cwd=root, env=environment, check=False)
        began, trained, synced, ended = _times(folder / "run")
        windows = {
            "files from task to gradient": (began, trained, "40"),
            "files from trainer to engine": (synced, ended, "10"),
            "files of a chat request": (*chat, "9"),
        }
        ran = _ticks(folder / "ticks")
        rows = []
        for name, (first, last, aim) in windows.items():
            files = sorted(file for file, at in ran.items() if any(first <= tick / TICKS_PER_S <= last for tick in at))
            print(f"{name}:", *files, sep="\n  ")
            rows.append((name, str(len(files)), aim))
        return rows


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _seconds_of_a_chat(port: int) -> tuple[float, float]:
    url = f"http://127.0.0.1:{port}/v1"
    models = json.loads(_answer(f"{url}/models", deadline=time.monotonic() + DEADLINE_S))["data"]
    body = {"model": models[0]["id"], "messages": [{"role": "user", "content": "2+3*4"}], "max_tokens": 8}
    times = []
    for _ in range(2):  # the first call also builds what later calls use
        time.sleep(2)
        start = time.time()
        _answer(f"{url}/chat/completions", body, deadline=time.monotonic() + 60)
        times.append((start, time.time()))
    time.sleep(2)
    return times[-1]


def _answer(url: str, body: Mapping[str, object] | None = None, *, deadline: float) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    while True:
        try:
            request = Request(url, data=data, headers={"Content-Type": "application/json"})
            with OPENER.open(request, timeout=60) as answer:
                return bytes(answer.read())
        except (URLError, OSError):
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


def _times(run: Path) -> tuple[float, float, float, float]:
    (journal,) = run.rglob("journal.db")
    with sqlite3.connect(journal) as connection:
        rows = connection.execute("SELECT stage, started_at, ended_at FROM stages WHERE iteration = 1").fetchall()
    starts = {stage: start for stage, start, _ in rows}
    ends = {stage: end for stage, _, end in rows}
    return starts["collect"], ends["train"], starts["sync"], ends["sync"]


def _ticks(folder: Path) -> dict[str, set[int]]:
    ran: dict[str, set[int]] = {}
    for path in folder.glob("*.json"):
        for file, at in json.loads(path.read_text()).items():
            ran.setdefault(file, set()).update(at)
    return ran

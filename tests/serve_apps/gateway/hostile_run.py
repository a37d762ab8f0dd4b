"""hostile_run: a gateway process, a probe, honest callers, and every attack in turn -> what honest callers saw meanwhile.

this process: attacks, one after the other        a thread: honest callers, a chat after the other
gateway process (hostile_gateway)                 probe process: GET /health every 50 ms, and the gateway's memory
"""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from serve_apps.gateway.traffic.callers import make_key, write_keys
from tests.serve_apps.gateway.hostile_bodies import BODIES
from tests.serve_apps.gateway.hostile_callers import CALLERS, Attack, Target, ask, connect
from tests.serve_apps.gateway.hostile_connections import REQUESTS

ROOT = Path(__file__).parents[3]
PROBE_INTERVAL_S = 0.05


def attacks() -> dict[str, Attack]:
    """All of them, by what they are."""
    bodies: dict[str, Attack] = {name: lambda target, name=name: ask(target, name) for name in BODIES}  # type: ignore[misc]
    requests: dict[str, Attack] = {name: lambda target, name=name: connect(target, name) for name in REQUESTS}  # type: ignore[misc]
    return bodies | requests | CALLERS


@dataclass
class Seen:
    """What became of the gateway under all attacks."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    """Of the attackers, by attack; empty where the connection was closed without an answer."""
    health_s: list[float] = field(default_factory=list)
    """Of each probe, the seconds until /health had answered; infinite where it did not."""
    slowest: dict[str, float] = field(default_factory=dict)
    """By attack, the slowest answer of /health meanwhile."""
    loop_s: float = 0.0
    """The most processor seconds for which the gateway's event loop came to nothing else."""
    memory: dict[str, int] = field(default_factory=dict)
    """By attack, the most bytes of memory meanwhile."""
    rss_before: int = 0
    rss_peak: int = 0
    rss_after: int = 0
    honest: Counter[int] = field(default_factory=Counter)
    """Statuses of the honest callers; 0 for a lost connection."""
    figures: list[dict[str, Any]] = field(default_factory=list)
    """By deployed team: its figures at the end."""

    @property
    def server_errors(self) -> dict[str, Counter[int]]:
        """Attacks that caused an error of the server; 503 and 504 say that there is no room or time, and are none."""
        return {name: of for name, of in self.statuses.items() if any(s >= 500 and s not in (503, 504) for s in of)}


@contextmanager
def gateway(model: Path, folder: Path, seen: Seen) -> Iterator[tuple[int, int, Mapping[str, str]]]:
    """A gateway process; its port, its pid, and keys by name. Its last words go to `seen`."""
    scopes = {"attacker": ("call", "feedback"), "honest": ("call", "feedback"), "admin": ("admin", "metrics")}
    made = {name: make_key(name, scopes=of) for name, of in scopes.items()}  # type: ignore[arg-type]
    write_keys(folder / "keys.json", [key for _, key in made.values()])
    command = [sys.executable, "-m", "tests.serve_apps.gateway.hostile_gateway", str(model), str(folder)]
    with open(folder / "gateway.log", "wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        try:
            assert process.stdout is not None
            about = json.loads(process.stdout.readline())
            yield about["port"], about["pid"], {name: secret for name, (secret, _) in made.items()}
            assert process.stdin is not None
            process.stdin.close()
            seen.loop_s = json.loads(process.stdout.readline())
        finally:
            process.kill()
            process.wait()


@contextmanager
def probe(port: int, pid: int) -> Iterator[list[tuple[float, float, int]]]:
    """Another process that asks /health all the time; at the end (time, seconds, bytes of memory) of each answer."""
    command = [sys.executable, "-m", "tests.serve_apps.gateway.hostile_run", str(port), str(pid)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    answers: list[tuple[float, float, int]] = []
    try:
        yield answers
    finally:
        out, _ = process.communicate(b"\n", timeout=60)
        answers += [(at, seconds, rss) for at, seconds, rss in json.loads(out)]


def probe_until_told(port: int, pid: int) -> None:
    """What the probe process does until its standard input has a line."""
    answers, of_gateway = [], psutil.Process(pid)
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), is_over.set()), daemon=True).start()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while not is_over.wait(PROBE_INTERVAL_S):
        began = time.time()
        try:
            if len(answers) % 2:  # in turn on a new connection, as load balancers ask
                connection.close()
            connection.request("GET", "/health")
            answered = connection.getresponse()
            answered.read()
            seconds = time.time() - began if answered.status == 200 else float("inf")
        except (OSError, http.client.HTTPException):
            connection.close()
            seconds = float("inf")
        answers.append((began, seconds, of_gateway.memory_info().rss))
    print(json.dumps(answers))


class Honest(threading.Thread):
    """A caller who asks one chat after the other, plain, streamed and with a form, and a whole workflow now and then."""

    def __init__(self, port: int, key: str) -> None:
        super().__init__(daemon=True)
        self._url, self._key = f"http://127.0.0.1:{port}", key
        self.statuses: Counter[int] = Counter()
        self.is_over = threading.Event()

    def run(self) -> None:
        with httpx.Client(base_url=self._url, headers={"Authorization": f"Bearer {self._key}"}, timeout=120) as client:
            number = 0
            while not self.is_over.wait(0.1):
                number += 1
                self.statuses[self._ask(client, number)] += 1

    def _ask(self, client: httpx.Client, number: int) -> int:
        chat: dict[str, Any] = {
            "model": "demo/solver",
            "messages": [{"role": "user", "content": "6*7?"}],
            "max_tokens": 16,
        }
        try:
            match number % 4:
                case 0:
                    return client.post("/v1/workflows/demo/runs", json={"prompt": "6*7?"}).status_code
                case 1:
                    with client.stream("POST", "/v1/chat/completions", json=chat | {"stream": True}) as stream:
                        text = stream.read().decode()
                    return stream.status_code if "[DONE]" in text else 0
                case 2:
                    opened = client.post("/v1/episodes", json={"team": "demo", "prompt": "6*7?"})
                    if opened.status_code == 200:
                        return client.post(f"{opened.json()['base_url']}/outcome", json={"score": 1.0}).status_code
                    return opened.status_code
                case _:
                    return client.post("/v1/chat/completions", json=chat).status_code
        except httpx.HTTPError:
            return 0


async def play(model: Path, folder: Path, *, only: str = "", report: bool = False) -> Seen:
    """Plays every attack (`only`: those whose name has this text)."""
    seen = Seen()
    with gateway(model, folder, seen) as (port, pid, keys):
        target = Target(port=port, key=keys["attacker"])
        await _warm(port, keys)
        seen.rss_before = psutil.Process(pid).memory_info().rss
        honest = Honest(port, keys["honest"])
        spans = []
        with probe(port, pid) as answers:
            honest.start()
            await asyncio.sleep(2)
            for name, attack in attacks().items():
                if only in name:
                    began = time.time()
                    seen.statuses[name] = Counter(await attack(target))
                    spans.append((name, began, time.time()))
                    if report:
                        print(f"{time.time() - began:6.1f} s  {name}: {dict(seen.statuses[name])}", flush=True)
            await asyncio.sleep(2)
            honest.is_over.set()
            await asyncio.to_thread(honest.join)
        seen.rss_after = psutil.Process(pid).memory_info().rss
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {keys['admin']}"}
        ) as admin:
            (team,) = (await admin.get("/v1/admin/status")).json()["teams"]
        seen.figures = team["deployed"]
    seen.honest = honest.statuses
    seen.health_s, seen.rss_peak = [seconds for _, seconds, _ in answers], max(rss for *_, rss in answers)
    for name, began, ended in spans:
        meanwhile = [seconds for at, seconds, _ in answers if at + seconds >= began and at <= ended]
        seen.slowest[name] = max(meanwhile, default=0.0)
        seen.memory[name] = max((rss for at, _, rss in answers if began <= at <= ended), default=0)
    return seen


async def _warm(port: int, keys: Mapping[str, str]) -> None:
    """Asks for one of each, so that what is made once is there."""
    once = Honest(port, keys["honest"])
    with httpx.Client(
        base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {keys['honest']}"}, timeout=60
    ) as client:
        for number in range(40):
            status = await asyncio.to_thread(once._ask, client, number)
            assert status == 200, (number, status)
        chat = {"model": "demo/solver", "messages": [{"role": "user", "content": "6*7?"}], "store": True}
        answer = client.post("/v1/chat/completions", json=chat).json()
        judged = await asyncio.to_thread(client.post, f"/v1/traces/{answer['id']}/feedback", json={"score": 1})
        assert judged.status_code == 200, judged.text


if __name__ == "__main__":
    probe_until_told(int(sys.argv[1]), int(sys.argv[2]))

"""A trainer gives memory back where its container, or the machine, has little of it left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import ray.train

from stores import resources
from train_loops.worker import trainer
from train_loops.worker.trainer import available_share, release_if_scarce

pytestmark = pytest.mark.fast

CHUNK = 64 * 2**10
NUM_CHUNKS = 1000


@pytest.mark.parametrize(("machine", "container", "share"), [(0.8, 0.75, 0.75), (0.3, 0.75, 0.3), (0.3, None, 0.3)])
def test_available_is_what_the_machine_or_its_container_has_less_of(
    machine: float, container: float | None, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(total=1_000_000, available=int(machine * 1_000_000))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(resources, "available_share", lambda: container)
    assert available_share() == pytest.approx(share)


def test_freed_memory_goes_back_only_where_memory_is_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [bytes(CHUNK) for _ in range(NUM_CHUNKS)]
    top_of_the_heap = chunks.pop()  # while it lives, the allocator returns nothing below it by itself
    chunks.clear()
    held = psutil.Process().memory_info().rss

    monkeypatch.setattr(trainer, "available_share", lambda: 0.6)
    release_if_scarce()
    assert psutil.Process().memory_info().rss == pytest.approx(held, abs=NUM_CHUNKS * CHUNK / 10)

    monkeypatch.setattr(trainer, "available_share", lambda: 0.4)
    release_if_scarce()
    assert psutil.Process().memory_info().rss < held - NUM_CHUNKS * CHUNK / 2
    assert len(top_of_the_heap) == CHUNK


def test_a_trainer_gives_memory_back_after_a_job_that_failed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_worker` with a supervisor that is no actor: a job that fails, one that is done, then the end."""
    told: list[str] = []

    def fails_then_works(self: object, job: Any) -> None:
        if job.log["attempt"] == "bad":
            raise ValueError("a row is missing")

    jobs = iter(
        [(name, SimpleNamespace(log={"attempt": name}, is_team=False, leaves_gpu=False)) for name in ("bad", "good")]
    )
    methods = {
        "hello": lambda *_: None,
        "next_job": lambda *_: next(jobs),
        "failed": lambda *given: told.append(f"failed {given[1]}"),
        "finished": lambda *given: told.append(f"finished {given[1]}"),
    }
    supervisor = SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: supervisor)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    monkeypatch.setattr(trainer.Worker, "__init__", lambda self, **_: None)
    monkeypatch.setattr(trainer.Worker, "execute", fails_then_works)
    monkeypatch.setattr(trainer, "release_if_scarce", lambda: told.append("release"))
    with pytest.raises(StopIteration):
        trainer.run_worker({"supervisor": "s", "epoch": 1, "train": {"threads": 1}, "run_folder": ""})
    assert told == ["failed bad", "release", "finished good", "release"]

"""Threads that several callers share: a caller with much work does not hold up one with little."""

from __future__ import annotations

import contextvars
import os
import threading

import pytest

from serve_apps.authoring.fair_lanes import CALLER, FairLanes

pytestmark = pytest.mark.fast


def test_a_caller_with_little_work_waits_for_one_piece_of_each_other_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    lanes, order, is_open = FairLanes("test"), list[str](), threading.Event()

    def submit(caller: str, *names: str) -> None:
        CALLER.set(caller)
        for name in names:
            futures.append(lanes.submit(lambda name=name: order.append(name)))

    futures = [lanes.submit(lambda: is_open.wait(10))]
    for caller, names in (("greedy", [f"g{i}" for i in range(20)]), ("honest", ["h0", "h1"]), ("late", ["l0"])):
        contextvars.copy_context().run(submit, caller, *names)
    is_open.set()
    for future in futures:
        future.result(10)
    assert order == ["g0", "h0", "l0", "g1", "h1", *(f"g{i}" for i in range(2, 20))]


def test_errors_reach_who_asked_and_what_nobody_waits_for_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    lanes, is_open, begun = FairLanes("test"), threading.Event(), list[int]()
    lanes.submit(lambda: is_open.wait(10))
    fails, left, last = lanes.submit(lambda: 1 // 0), lanes.submit(lambda: begun.append(1)), lanes.submit(lambda: 5)
    assert left.cancel()
    is_open.set()
    assert last.result(10) == 5 and begun == []
    with pytest.raises(ZeroDivisionError):
        fails.result(10)

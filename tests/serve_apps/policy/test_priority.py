"""A process and all that it has started take low priority and normal priority again, where the kernel lets them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.test

BOTH_WAYS = """
import os, subprocess, sys, threading
from serve_apps.policy.priority import _threads, has_low_priority, set_process_priority
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
wait = threading.Event()
threading.Thread(target=wait.wait).start()
assert len(list(_threads())) >= 3 and child.pid in _threads() and not has_low_priority()
set_process_priority(True)
assert has_low_priority() and {os.sched_getscheduler(t) for t in _threads()} == {os.SCHED_IDLE}
heir = threading.Thread(target=lambda: print("heir", os.sched_getscheduler(0) == os.SCHED_IDLE))
heir.start(); heir.join()
if sys.argv[1] == "ordinary":
    os.setuid(65534)
try:
    set_process_priority(False)
    print("normal", {os.sched_getscheduler(t) for t in _threads()} == {os.SCHED_OTHER})
except PermissionError:
    print("refused", has_low_priority())
wait.set(); child.stdin.close()
"""


@pytest.mark.parametrize("user", ["root", "ordinary"])
def test_every_thread_of_a_process_and_its_children_takes_low_priority_and_only_root_returns(user: str) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can be both")
    done = subprocess.run(
        [sys.executable, "-c", BOTH_WAYS, user], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:2] == ["heir True", "normal True" if user == "root" else "refused True"]

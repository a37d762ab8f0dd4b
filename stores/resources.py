"""resources: the cores and the memory that control groups (version 2) allow this process, and what Ray calls the head node.

    /proc/self/cgroup: 0::/user/job7 ──> /sys/fs/cgroup/user/job7, /sys/fs/cgroup/user, /sys/fs/cgroup: the tightest limit holds

Containers, Kubernetes, systemd and Slurm set limits so. A container sees its own group as the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
ON_HEAD = {"node:__internal_head__": 0.001}
"""Ray resources that only the head node has. The actors of which a cluster has one each run there, like Serve's controller: the loss
of another node never ends one of them, and the loss of the head ends the cluster anyway. Apps are deployed through the head's
dashboard, which often listens on that machine only."""


def own_groups(root: Path = ROOT, membership: Path = MEMBERSHIP) -> list[Path]:
    """Returns the folders of the groups that this process is in, the innermost first; only `root` where the others are hidden."""
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            if line.startswith("0::/") and ".." not in line:
                inner = root / line.removeprefix("0::/").strip()
                return [folder for folder in (inner, *inner.parents) if folder.is_relative_to(root) and folder.is_dir()]
    return [root]


def cpu_quota(groups: Iterable[Path] | None = None) -> float | None:
    """Returns how many cores the groups allow; None without a limit."""
    return min(_each(groups, _quota), default=None)


def memory_limit(groups: Iterable[Path] | None = None) -> int | None:
    """Returns how many bytes of memory the groups allow; None without a limit."""
    return min(_each(groups, _limit), default=None)


def available_share(groups: Iterable[Path] | None = None) -> float | None:
    """Returns the share of the groups' memory that is not used, cached files apart; None without a limit."""
    return min(_each(groups, _available), default=None)


def _each(groups: Iterable[Path] | None, read: Callable[[Path], T]) -> Iterator[T]:
    for group in own_groups() if groups is None else groups:
        with suppress(OSError, ValueError, KeyError):  # not a group of version 2, or its limit is "max"
            yield read(group)


def _quota(group: Path) -> float:
    limit, period = (group / "cpu.max").read_text().split()  # "<microseconds> <of microseconds>"
    return int(limit) / int(period)


def _limit(group: Path) -> int:
    return int((group / "memory.max").read_text())


def _available(group: Path) -> float:
    counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    cached = int(counts["inactive_file"]) + int(counts["active_file"])  # the kernel drops them where memory is short
    return 1 - (int((group / "memory.current").read_text()) - cached) / _limit(group)

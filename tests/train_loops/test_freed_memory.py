"""A trainer gives memory back where its container, or the machine, has little of it left."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from train_loops.freed_memory import available_share

pytestmark = pytest.mark.fast


def test_container_with_less_memory_than_the_machine_decides(tmp_path: Path) -> None:
    limit = psutil.virtual_memory().total // 1024
    write_cgroup(tmp_path, limit=str(limit), used=limit // 2, cached=limit // 4)
    assert available_share(tmp_path) == pytest.approx(0.75, abs=0.01)


def test_unlimited_container_has_the_share_of_the_machine(tmp_path: Path) -> None:
    write_cgroup(tmp_path, limit="max", used=0, cached=0)
    machine = psutil.virtual_memory()
    assert available_share(tmp_path) == pytest.approx(machine.available / machine.total, abs=0.05)
    assert available_share(tmp_path / "missing") == pytest.approx(machine.available / machine.total, abs=0.05)


def write_cgroup(folder: Path, *, limit: str, used: int, cached: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cached}\ninactive_file {cached}\nactive_file 0\n")

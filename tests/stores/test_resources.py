"""What a container or job may use: of the groups that a process is in, the tightest limit holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from stores.resources import available_share, cpu_quota, memory_limit, own_groups

pytestmark = pytest.mark.fast


def written(folder: Path, *, cores: str = "max", limit: str = "max", used: int = 0, cached: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "cpu.max": f"{cores} 100000",
        "memory.max": limit,
        "memory.current": str(used),
        "memory.stat": f"anon {used - cached}\ninactive_file {cached}\nactive_file 0",
    }
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("membership", "names"),
    [
        ("0::/", ["."]),
        ("0::/slurm/job7", ["slurm/job7", "slurm", "."]),
        ("12:cpu:/old\n0::/slurm", ["slurm", "."]),
        ("0::/docker/hidden", ["."]),
        ("0::/../beside", ["."]),
        ("12:cpu:/version-1", ["."]),
    ],
)
def test_groups_are_the_own_one_and_those_around_it(tmp_path: Path, membership: str, names: list[str]) -> None:
    (tmp_path / "root" / "slurm" / "job7").mkdir(parents=True)
    (tmp_path / "membership").write_text(f"{membership}\n")
    root = tmp_path / "root"
    assert own_groups(root, tmp_path / "membership") == [root / name for name in names]
    assert own_groups(root, tmp_path / "missing") == [root]


def test_the_tightest_limit_holds(tmp_path: Path) -> None:
    job = written(tmp_path / "job", cores="350000", limit="1000", used=500, cached=250)
    step = written(tmp_path / "job" / "step", cores="800000", limit="900", used=90)
    assert cpu_quota([step, job]) == 3.5
    assert memory_limit([step, job]) == 900
    assert available_share([step, job]) == pytest.approx(0.75), "cached files can be dropped"


def test_without_a_limit_nothing_is_said(tmp_path: Path) -> None:
    groups = [written(tmp_path / "free"), tmp_path / "of version 1"]
    assert cpu_quota(groups) is memory_limit(groups) is available_share(groups) is None

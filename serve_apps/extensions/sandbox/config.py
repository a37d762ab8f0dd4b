"""Settings of the sandbox. Pydantic only."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from pydantic import Field, field_validator

from stores.settings import Settings


class SandboxConfig(Settings):
    """These settings limit code that a model wrote when it is run."""

    wall: Literal["auto", "bubblewrap", "landlock", "none"] = "auto"
    """The isolation between the code and this machine. `auto`: the strongest that works here, and never `none`."""
    time_s: float = Field(2.0, gt=0)
    """The wall-clock time in seconds that one test case may take."""
    max_time_s: float = Field(10.0, gt=0)
    """The longest time in seconds per test case that a task may ask for instead of `time_s`."""
    memory_mib: int = Field(512, ge=64)
    """The memory in MiB of each process, and of all processes of a test case together, which is checked ten times a
    second."""
    processes: int = Field(8, ge=1)
    """The number of processes and threads that a test case may have."""
    output_kib: int = Field(256, ge=1)
    """The size in KiB of standard output, standard error and result of a test case together."""
    scratch_mib: int = Field(16, ge=1)
    """The size in MiB of all files that a program may write."""
    open_files: int = Field(64, ge=16)
    """The number of files that a process may have open at once."""
    readable: tuple[str, ...] = ()
    """Folders that programs may read besides the interpreter, by absolute paths outside of /tmp, which is the programs' own.
    The sandbox's user must be able to read them."""
    python: str = ""
    """The path of the Python interpreter. Empty: this one, or the system's where the sandbox's user cannot read this
    one."""

    @field_validator("readable")
    @classmethod
    def _check_readable(cls, readable: tuple[str, ...]) -> tuple[str, ...]:
        for folder in readable:
            path = PurePosixPath(folder)
            if not path.is_absolute() or path.is_relative_to("/tmp"):
                raise ValueError(f"{folder!r} is not an absolute path outside of /tmp")
        return readable

"""loading: what transformers says of a model folder when it loads it without the numbers (on the meta device).

    loading_faults(folder) ──> a process of its own, `python -m stores.weights.loading FOLDER` ──> LoadingFaults as JSON

transformers knows every family, and how names in files lead to names in models. Its import takes seconds and half a gigabyte,
so that it is done in a process that ends, unless this one has it already.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingFaults:
    """What does not fit, by names of the model's tensors; all empty where everything does."""

    error: str = ""
    """Why the model cannot be built at all."""
    missing: list[str] = field(default_factory=list)
    """Tensors that the files do not hold, so that they would begin at random numbers."""
    surplus: list[str] = field(default_factory=list)
    """Tensors of the files that the model has no place for."""
    shapes: dict[str, list[list[int]]] = field(default_factory=dict)
    """Shape in the files and shape in the model, where they differ."""


def can_load() -> bool:
    """Returns whether torch and transformers are installed here."""
    return all(find_spec(name) is not None for name in ("torch", "transformers"))


def loading_faults(folder: Path) -> LoadingFaults | None:
    """Returns what transformers finds wrong with a folder of whole files; None where it is not installed."""
    if not can_load():
        return None
    if "transformers" in sys.modules:
        return _load(folder)
    files = tuple((file.name, file.stat().st_mtime_ns) for file in sorted(folder.glob("*.*s*")))
    return _load_apart(folder.resolve(), files)


@cache
def _load_apart(folder: Path, files: tuple[tuple[str, int], ...]) -> LoadingFaults:
    """Asks a process of its own, once for files that stay as they are."""
    command = [sys.executable, "-m", "stores.weights.loading", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return LoadingFaults(**json.loads(done.stdout.splitlines()[-1]))


def _load(folder: Path) -> LoadingFaults:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # else it draws a table of what is returned here
    try:
        _, found = AutoModelForCausalLM.from_pretrained(
            folder, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False
        )
    except Exception as error:  # noqa: BLE001 - whatever its code for one of hundreds of families makes of this config
        return LoadingFaults(error=f"{type(error).__name__}: {error}".partition("\n")[0])
    finally:
        logging.set_verbosity(verbosity)
    return LoadingFaults(
        missing=sorted(found["missing_keys"]),
        surplus=sorted(found["unexpected_keys"]),
        shapes={name: [list(stored), list(built)] for name, stored, built in sorted(found["mismatched_keys"])},
    )


if __name__ == "__main__":
    print(json.dumps(asdict(_load(Path(sys.argv[1])))))

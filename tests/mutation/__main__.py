"""Changes the code of what must not fail silently in one place at a time, and counts the changes that its tests notice.

    python -m tests.mutation                         all targets (targets.py)
    python -m tests.mutation --targets losses rows
    python -m tests.mutation --show                  the table of what is done

Each target is a copy of the working tree in runs/mutation/<target>, in which mutmut changes its modules and plays its own
tests. A run that was stopped goes on. After a change of the tests only the survivors are tried again, after a change of the
modules everything. Writes runs/mutation/table.md: kill rates, and every survivor with its changed lines.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from tests.mutation.targets import TARGETS, Target

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "runs" / "mutation"
PACKAGES = ("dags", "pipelines", "serve_apps", "stores", "train_loops")
NOTICED = ("killed", "timeout", "caught by type check", "segfault", "suspicious")
"""Verdicts of mutmut for a change that does not pass."""
TEXT_ONLY = (r"^\s*f?r?\"[^\"]*\"$", r"^\s*raise ", r"^\s*assert ", r"logger\.", r"waiting\(")
"""Lines that are not changed: parts of messages, and checks of what only a bug can break."""


def main() -> int:
    """Runs the targets one after another; returns 0, or 1 where one of them could not be run."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", nargs="+", choices=[t.name for t in TARGETS], default=[t.name for t in TARGETS])
    parser.add_argument("--processes", type=int, default=1, help="how many changes are tried at once")
    parser.add_argument("--show", action="store_true", help="run nothing")
    args = parser.parse_args()
    if find_spec("mutmut") is None:
        parser.error("mutmut is not installed: make mutation sets it up with the environment for development")
    os.nice(19)
    failed = []
    for target in TARGETS:
        if target.name in args.targets and not args.show:
            prepare(target)
            failed += [] if run(target, processes=args.processes) else [target.name]
            write_table()
    print(write_table())
    if failed:
        print(f"failed: {', '.join(failed)}; see {RUNS}/<target>/run.log", file=sys.stderr)
    return len(failed) > 0


def prepare(target: Target) -> None:
    """Copies the working tree, and forgets what a change of modules or tests has made stale."""
    folder = RUNS / target.name
    files = _git_files()
    sources = [f for f in files if any(fnmatch(f, pattern) for pattern in target.sources)]
    state = {"sources": _digest(sources), "tests": _digest(f for f in files if f.startswith(target.tests))}
    if folder.exists() and _state_of(folder).get("sources") != state["sources"]:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        copy = folder / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists() or copy.read_bytes() != (ROOT / file).read_bytes():
            shutil.copy2(ROOT / file, copy)
            if (folder / "mutants").exists() and file not in sources:  # mutmut copies what is missing only
                (folder / "mutants" / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, folder / "mutants" / file)
    (folder / "setup.cfg").write_text(_settings(target, sources))
    if _state_of(folder).get("tests") != state["tests"]:
        _state_file(folder, "again").write_text("\n".join(survivors(target)))
    for name, digest in state.items():
        _state_file(folder, name).write_text(digest)


def run(target: Target, *, processes: int) -> bool:
    """Tries what has not been tried; returns whether mutmut came to its end."""
    folder, again = RUNS / target.name, _state_file(RUNS / target.name, "again")
    names = again.read_text().split() if again.exists() else []
    ended = True
    for chosen in ([], names) if names else ([],):
        command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(processes), *chosen]
        with (folder / "run.log").open("a") as log:
            ended &= subprocess.run(command, cwd=folder, env=_environment(), stdout=log, stderr=log).returncode == 0
    if ended:
        again.unlink(missing_ok=True)
    return ended


def verdicts(target: Target) -> dict[str, str]:
    """Returns the verdict of every change that was tried or is to be, by its name."""
    folder = RUNS / target.name
    if not (folder / "mutants").exists():
        return {}
    listed = subprocess.run(
        [sys.executable, "-m", "mutmut", "results", "--all", "true"],
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
    )
    return dict(re.findall(r"^\s+(\S+__mutmut_\d+): (.+)$", listed.stdout, re.MULTILINE))


def survivors(target: Target) -> list[str]:
    """Returns the names of the changes that no test noticed."""
    return sorted(name for name, verdict in verdicts(target).items() if verdict in ("survived", "no tests"))


def write_table() -> str:
    """Writes runs/mutation/table.md and returns its first part, the kill rate of each module."""
    lines = [
        "| module | changes | noticed | not noticed | without a test | left | kill rate |",
        "|---|---|---|---|---|---|---|",
    ]
    details: list[str] = []
    for target in TARGETS:
        by_module: dict[str, Counter[str]] = {}
        for name, verdict in verdicts(target).items():
            by_module.setdefault(_module_of(name), Counter())[verdict] += 1
        for module, counts in sorted(by_module.items()):
            lines.append(_row(module, counts))
        if by_module:
            details += [f"\n## {target.name}\n", *(_shown(target, name) for name in survivors(target))]
    table = "\n".join(lines)
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / "table.md").write_text(f"# Mutation\n\n{table}\n" + "\n".join(details) + "\n")
    return table


def _row(module: str, counts: Counter[str]) -> str:
    noticed = sum(counts[verdict] for verdict in NOTICED)
    missed, untested = counts["survived"], counts["no tests"]
    tried = noticed + missed + untested
    rate = f"{noticed / tried:.1%}" if tried else ""
    return f"| `{module}` | {tried} | {noticed} | {missed} | {untested} | {counts['not checked']} | {rate} |"


def _shown(target: Target, name: str) -> str:
    """Returns a survivor's name and changed lines. They are kept beside the copy: mutmut takes half a second for each."""
    kept = RUNS / target.name / "shown" / f"{name}.diff"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        shown = subprocess.run(
            [sys.executable, "-m", "mutmut", "show", name],
            cwd=RUNS / target.name,
            env=_environment(),
            capture_output=True,
            text=True,
        ).stdout
        kept.write_text("\n".join(line for line in shown.splitlines() if re.match(r"[+-](?![+-])", line)))
    return f"`{name}`\n\n```diff\n{kept.read_text()}\n```\n"


def _settings(target: Target, sources: Sequence[str]) -> str:
    """Returns the settings of mutmut for a target."""
    lists: dict[str, Iterable[str]] = {
        "source_paths": PACKAGES,
        "only_mutate": sources,
        "also_copy": ("infra", "README.md", "CHANGELOG.md", "Makefile"),
        "do_not_mutate_patterns": TEXT_ONLY,
        "pytest_add_cli_args_test_selection": target.tests,
        "pytest_add_cli_args": ("--tier", target.tier, *(("-k", target.chosen) if target.chosen else ())),
    }
    lines = [f"{key} =\n  " + "\n  ".join(values) for key, values in lists.items()]
    # torch and lancedb have threads, which do not survive a fork. A change may make the code wait for what never comes.
    scalars = ["process_isolation = forkserver", "timeout_multiplier = 3", "timeout_constant = 20"]
    return "\n".join(["[mutmut]", *scalars, *lines, ""])


def _environment() -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "HYPOTHESIS_STORAGE_DIRECTORY": "/dev/null"}
    return {**os.environ, **quiet}


def _git_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [file for file in listed.stdout.splitlines() if (ROOT / file).is_file()]


def _digest(files: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file}\n".encode() + (ROOT / file).read_bytes())
    return digest.hexdigest()


def _state_file(folder: Path, name: str) -> Path:
    return folder / f".{name}"


def _state_of(folder: Path) -> dict[str, str]:
    files = {name: _state_file(folder, name) for name in ("sources", "tests")}
    return {name: file.read_text() for name, file in files.items() if file.exists()}


def _module_of(name: str) -> str:
    return re.split(r"\.(?=x_|xǁ)", name)[0]


if __name__ == "__main__":
    sys.exit(main())

"""new_team: a name -> a folder with a team that validates, trains and has a passing test (`troupe new`)."""

from __future__ import annotations

import importlib.util
import itertools
import json
import keyword
import random
import re
import sys
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from pipelines.cli.options import TRAIN, Debug, errors

FILES = {
    "$name.py": "workflow.py.tmpl",
    "$name.yaml": "run.yaml.tmpl",
    "${name}_demonstrator.py": "demonstrator.py.tmpl",
    "test_$name.py": "test.py.tmpl",
    "README.md": "README.md.tmpl",
}
"""Path in the new folder -> template in `pipelines/cli/templates`; both are filled in by `string.Template`."""
NUM_TASKS = {"train": 376, "gate": 100, "test": 100}
"""Of the 576 problems `a+b*c` with a of 1 to 9, b and c of 2 to 9."""


def add_to(app: typer.Typer) -> None:
    """Makes the command of this file a command of `app`."""
    app.command(rich_help_panel=TRAIN)(new)


def new(
    name: Annotated[str, typer.Argument(help="Name of the team and of the folder to make, e.g. my_team.")],
    debug: Debug = False,
) -> None:
    """Write a folder with a small team: workflow, credit rule, run config, tasks and a test. It trains as it is."""
    with errors(debug):
        check_name(name)
        for path in write_team(Path(name)):
            print(path)
        print(f"next: cd {name} && troupe train {name}.yaml")


def check_name(name: str) -> None:
    """Raises ValueError, with a name to use instead, where modules called `name` cannot be imported or hide others."""
    if fault := _fault(name):
        raise ValueError(f"team name {name!r} {fault}: use {_suggestion(name)!r}, for example")


def write_team(folder: Path) -> list[Path]:
    """Makes `folder`, whose name is the team's, and returns its files.

    Raises ValueError, and writes nothing, where `folder` exists.
    """
    texts = team_files(folder.name)
    try:
        folder.mkdir()
    except FileExistsError:
        raise ValueError(f"{folder} exists already: choose another name, or move it away") from None
    paths = []
    for path, text in texts.items():
        target = folder / path
        target.parent.mkdir(exist_ok=True)
        target.write_text(text, encoding="utf-8")
        paths.append(target)
    return paths


def team_files(name: str) -> dict[str, str]:
    """Path -> text of every file of the team `name`."""
    templates = files("pipelines.cli") / "templates"
    texts = {
        Template(path).substitute(name=name): Template((templates / file).read_text("utf-8")).substitute(name=name)
        for path, file in FILES.items()
    }
    return texts | {f"tasks/{section}.jsonl": rows for section, rows in _tasks().items()}


def _tasks() -> dict[str, str]:
    """The rows of each set of tasks: different problems `a+b*c`, the same ones at every call.

    `a+b*c` and `a+c*b` are one family, and in one set: who has seen one of them has seen the other.
    """
    from pipelines.tasks.splits import share_out

    def family(form: tuple[int, int, int]) -> str:
        a, b, c = form
        return f"{a}+{min(b, c)}*{max(b, c)}"

    forms = itertools.product(range(1, 10), range(2, 10), range(2, 10))
    sets = share_out(forms, NUM_TASKS, problem=family, dice=random.Random(0))
    texts = {}
    for section, own in sets.items():
        rows = [{"question": f"{a}+{b}*{c}", "answer": str(a + b * c), "family": family((a, b, c))} for a, b, c in own]
        texts[section] = "".join(f"{json.dumps(row)}\n" for row in rows)
    return texts


def _fault(name: str) -> str:
    """What is wrong with `name` as the name of a module; empty where nothing is."""
    if not (name.isidentifier() and name.isascii()) or name.startswith("_"):
        return "is no name of a Python module"
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        return "is a keyword of Python"
    for module in (name, f"{name}_demonstrator", f"test_{name}"):
        if module in sys.stdlib_module_names:
            return f"hides the module {module!r} of Python's standard library"
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None:  # None: a folder without __init__.py, which hides nothing
            return f"hides the installed module {module!r}"
    return ""


def _suggestion(name: str) -> str:
    """A name like `name` that can be used."""
    words = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
    if not words or words[0].isdigit():
        words = f"team_{words}".strip("_")
    candidates = itertools.chain((words, f"{words}_team"), (f"{words}_team_{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if not _fault(candidate))

"""user_code: the folder of a user's own modules -> on the path of this process and of Ray's workers.

Workers of a head that runs already get the folder that their driver was started in from Ray. A gateway, which no driver starts, gets
the modules of a team with its route: see stores/team_code.py.

That folder comes first on the path. A `stores.py` in it would hide Troupe's package `stores`, and every process that starts
afterwards would fail with "No module named 'stores.journal.journal'": so names are checked before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

PACKAGES = ("dags", "pipelines", "serve_apps", "stores", "train_loops")
OWN_FOLDER = Path(__file__).parents[2]


def add_user_code() -> None:
    """Modules of the folder that the command is started in can be named in configs, here and in Ray's workers.

    Raises ValueError, naming the file and the fix, where one of them hides a package of Troupe.
    """
    folder = os.getcwd()
    check_names([folder, *sys.path])
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (folder, os.environ.get("PYTHONPATH", "")) if p)


def check_names(path: Sequence[str]) -> None:
    """Raises ValueError where the first module that `path` leads to under the name of a package of Troupe is another one."""
    for name in PACKAGES:
        # An editable install may be on no path: it has a finder of its own, which is asked after this one.
        spec = PathFinder.find_spec(name, list(path))
        other = None if spec is None else _other_module(name, spec)
        if other is not None:
            raise ValueError(
                f"{other} hides Troupe's own package {name!r}: rename it, or run troupe from another folder and without the "
                "folder of that file on PYTHONPATH"
            )


def _other_module(name: str, spec: ModuleSpec) -> Path | None:
    """The file or folder of a module that is not Troupe's; None for Troupe's."""
    own = OWN_FOLDER / name
    if spec.origin is not None:
        file = Path(spec.origin)
        return None if file.resolve() == (own / "__init__.py").resolve() else file
    # A folder without __init__.py. Many Airflow projects have one called `dags`; no command imports Troupe's package of that
    # name, so it does no harm.
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return None if name == "dags" else next((folder for folder in folders if folder.resolve() != own.resolve()), None)

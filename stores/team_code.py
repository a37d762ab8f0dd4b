"""team_code: the modules that a user wrote for a team -> texts that its record carries -> modules, wherever the team acts.

    my_team:SolveAndReview ── the file, and what it imports of the user's own ──> {"my_team.py": "..."} in team.json and in a route
                                      package `troupe_code_<hash>` in a gateway replica <── in_use ──┘

Each code has a package of its own: teams whose modules have the same names act in one process, and so do two versions of one team. In
it `import my_tools` is the team's own module of that name if it has one.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import resolve_name
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from stores.files import cache_folder, write_file

PREFIX = "troupe_code_"
TROUPE = ("dags", "pipelines", "serve_apps", "stores", "train_loops")
MAX_BYTES = 4 * 2**20
"""Of the source files of a team: they travel with every change of its route."""
MODULE = re.compile(r"[\w-]+(\.[\w-]+)*")
"""The name of a module in a dotted path: of any file, also of one that no import statement could name."""
_DOTTED = re.compile(r"[\w-]+(\.[\w-]+)*:[^\W\d]\w*")
"""`package.module:Name`."""


def collect_code(*named_by: Any) -> dict[str, str]:
    """Returns path -> text of the user's own source files that a team consists of.

    These are the modules that dotted paths `module:Name` in `named_by` (JSON values) and in the files themselves name, and what
    they import, wherever in the file. What is installed and what belongs to Troupe is left out: every process has it.
    ValueError where it is too much, or no UTF-8.
    """
    code: dict[str, str] = {}
    size = 0
    todo = [module for value in named_by for module in _named_in(value)]
    while todo:
        for path, file in _files_of(todo.pop()):
            if path in code:
                continue
            code[path] = _text_of(file)
            size += len(code[path].encode())
            if size > MAX_BYTES:
                largest = max(code, key=lambda path: len(code[path]))
                raise ValueError(
                    f"modules that are not installed in site-packages, and that the team imports, are more than {MAX_BYTES // 2**20} MiB "
                    f"of Python (the largest is {largest}), which is what may travel with a team: install what is no part of the team"
                )
            todo += _modules_named_by(code[path], path)
    return dict(sorted(code.items()))


@contextmanager
def in_use(code: Mapping[str, str]) -> Iterator[None]:
    """Within it, what names a module by a dotted path gets that of this code, if it has one of that name."""
    token = _code_in_use.set(_opened(code) if code else None)
    try:
        yield
    finally:
        _code_in_use.reset(token)


def import_module(name: str) -> ModuleType:
    """Returns the module of the code that is in use, or else that of this process."""
    code = _code_in_use.get()
    return importlib.import_module(f"{code.package}.{name}" if code is not None and code.holds(name) else name)


def own_folders() -> list[str]:
    """Returns where processes that are started for a team find its modules, before all others; empty where no code is in use."""
    code = _code_in_use.get()
    return [] if code is None else [str(code.folder)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Code:
    """The code of a team version, as this process imports it."""

    package: str
    folder: Path
    names: frozenset[str]
    """Of its modules and packages at the top."""

    def holds(self, name: str) -> bool:
        """Whether a dotted module name is one of this code's."""
        return name.partition(".")[0] in self.names

    def import_name(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> ModuleType:
        """What an import statement in this code does; takes the arguments of `builtins.__import__`."""
        if level or not self.holds(name):
            return builtins.__import__(name, globals, locals, fromlist, level)
        package = builtins.__import__(f"{self.package}.{name}", None, None, fromlist, 0)
        return package if fromlist else sys.modules[f"{self.package}.{name.partition('.')[0]}"]


_code_in_use: ContextVar[_Code | None] = ContextVar("code_in_use", default=None)
_codes: dict[str, _Code] = {}
"""By package, all that this process has opened."""
_opening = threading.Lock()


class _Loader(SourceFileLoader):
    """Runs a module of a team's code, whose import statements find the team's own modules first."""

    def exec_module(self, module: ModuleType) -> None:
        code = _codes[module.__name__.partition(".")[0]]
        # Functions keep the builtins of their module, so that imports within them, much later, go the same way.
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": code.import_name}
        super().exec_module(module)


class _Finder:
    """Has `_Loader` load what lies in the package of a code."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.partition(".")[0] in _codes else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


def _opened(code: Mapping[str, str]) -> _Code:
    """Makes the package that a code is imported from, if this process has not made it."""
    package = PREFIX + sha256(json.dumps(dict(code), sort_keys=True).encode()).hexdigest()[:16]
    with _opening:
        folder = _written(code, package)
        if package not in _codes:
            names = frozenset(path.partition("/")[0].removesuffix(".py") for path in code)
            module = ModuleType(package)
            module.__path__ = [str(folder)]
            module.__spec__ = ModuleSpec(package, None, is_package=True)
            sys.modules[package] = module
            if _Finder not in sys.meta_path:
                sys.meta_path.insert(0, _Finder)
            _codes[package] = _Code(package=package, folder=folder, names=names)
    return _codes[package]


def _written(code: Mapping[str, str], package: str) -> Path:
    """Returns a folder of this user's alone with the files of a code: tracebacks and processes of the team read them."""
    cache = cache_folder() / "code"
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    if cache.stat().st_uid != os.getuid():
        raise ValueError(
            f"{cache} belongs to another user, and what lies there would be run: set TROUPE_CACHE to a folder"
        )
    for path, text in code.items():
        file, data = cache / package / path, text.encode()
        if not file.is_file() or file.read_bytes() != data:  # something may have swept the folder for temporary files
            write_file(str(file), data)
    return cache / package


def _named_in(value: Any) -> Iterator[str]:
    """Yields the module of every dotted path in a JSON value."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _named_in(part)
    elif isinstance(value, str) and _DOTTED.fullmatch(value):
        yield value.partition(":")[0]


def _modules_named_by(text: str, path: str) -> Iterator[str]:
    """Yields what a source file imports, and the modules of dotted paths in it; some names are those of no module."""
    package = path.removesuffix(".py").replace("/", ".").rpartition(".")[0]
    with suppress(SyntaxError):  # whoever imports it is told
        for node in ast.walk(ast.parse(text.encode(), path)):
            yield from _named_by(node, package)


def _named_by(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        with suppress(ImportError):  # beyond the package: the import fails as well
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Constant):
        yield from _named_in(node.value)


def _files_of(module: str) -> Iterator[tuple[str, Path]]:
    """Yields path and file of what importing a module of the user's own reads: the packages that it is in, and itself."""
    for folder in _folders_with(module.partition(".")[0]):
        for stem in accumulate(module.split("."), "{}/{}".format):
            for path in (f"{stem}/__init__.py", f"{stem}.py"):
                if (folder / path).is_file():
                    yield path, folder / path


def _folders_with(name: str) -> list[Path]:
    """Returns the folders from which a module or package at the top is imported; none where it is not the user's own."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded is not None and is_installed(Path(loaded).parent):
        return []  # of Troupe's own imports: a file of that name in the user's folder is not what an import here gives
    spec = None if name in (*TROUPE, *sys.builtin_module_names) else PathFinder.find_spec(name)
    if spec is None:
        return []
    parts = spec.submodule_search_locations or ([] if spec.origin is None else [spec.origin])
    folders = [Path(part).absolute().parent for part in parts]
    return [folder for folder in folders if not is_installed(folder)]


def is_installed(folder: Path) -> bool:
    """Returns whether a folder of source files is that of an installed package, or of Python, and so none of the user's own."""
    if {"site-packages", "dist-packages"} & set(folder.parts):
        return True
    installed = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "scripts")]
    return any(folder.is_relative_to(place) or folder.resolve().is_relative_to(place.resolve()) for place in installed)


def _text_of(file: Path) -> str:
    try:
        return (
            file.read_bytes().decode()
        )  # byte for byte: what hashes its source is to find the same where it is served
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 ({error}): save it as UTF-8, so that it can travel with the team"
        ) from None

"""house: the source -> how much there is of it, and where it is not as it was meant.

    python infra/house.py            prints the table
    python infra/house.py --paths    also trains a small team and asks a gateway, and counts the files that run

`tests/test_house.py` holds the figures that must not grow.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("dags", "pipelines", "serve_apps", "train_loops", "stores")
MAX_FUNCTION_LINES = 60
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """A module of the source."""

    name: str
    """With dots, as it is imported."""
    path: Path
    text: str

    @property
    def is_extension(self) -> bool:
        """Whether it lies in a folder `extensions/`."""
        return ".extensions." in f"{self.name}."

    @property
    def num_lines(self) -> int:
        """All lines of the file."""
        return self.text.count("\n")

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file."""
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        """The package that it lies in."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class House:
    """The modules of a checkout."""

    root: Path
    modules: Mapping[str, Module]

    @property
    def vllm_folders(self) -> set[str]:
        """The packages in which some module imports vllm."""
        return {module.room for module in self.modules.values() if "vllm" in imported_libraries(module.tree)}

    @cached_property
    def importers(self) -> Mapping[str, set[str]]:
        """Module -> the modules that import it."""
        importers: dict[str, set[str]] = defaultdict(set)
        for module in self.modules.values():
            for name in imported_names(module.tree):
                if (target := self._module_of(name)) is not None and target != module.name:
                    importers[target].add(module.name)
        return importers

    @property
    def single_caller_modules(self) -> dict[str, str]:
        """Module -> the one module that imports it, where both lie in one package."""
        return {
            name: caller
            for name, (caller, *others) in sorted((name, sorted(names)) for name, names in self.importers.items())
            if not others and self.modules[caller].room == self.modules[name].room
        }

    @property
    def inner_imports(self) -> int:
        """Imports inside functions."""
        return sum(
            isinstance(node, ast.Import | ast.ImportFrom)
            for module in self.modules.values()
            for function in functions_of(module.tree)
            for node in own_nodes(function)
        )

    @property
    def long_functions(self) -> dict[str, int]:
        """`module:function` -> its lines, for those over `MAX_FUNCTION_LINES`."""
        return {
            f"{module.name}:{function.name}": length
            for module in self.modules.values()
            for function in functions_of(module.tree)
            if (length := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES
        }

    @property
    def comments_per_100_lines(self) -> float:
        """Comments by `#`, of the core."""
        core = [module for module in self.modules.values() if not module.is_extension]
        return 100 * sum(num_comments(module.text) for module in core) / sum(module.num_lines for module in core)

    def files_with(self, word: str) -> list[str]:
        """The modules in which a word stands."""
        pattern = re.compile(rf"\b{word}\b")
        return [module.name for module in self.modules.values() if pattern.search(module.text)]

    def _module_of(self, name: str) -> str | None:
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name or None


def read_house(root: Path = ROOT) -> House:
    """Reads the source of a checkout; nothing of it is imported."""
    modules = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            modules[name] = Module(name, path, path.read_text(encoding="utf-8"))
    return House(root, modules)


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yields the dotted names that a module imports, inside functions as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_libraries(tree: ast.AST) -> set[str]:
    """Returns the top-level packages that a module imports."""
    return {name.partition(".")[0] for name in imported_names(tree)}


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields every function and method, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes inside a function, but for those of functions inside it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, FUNCTIONS):
            yield node
            yield from own_nodes(node)


def num_comments(text: str) -> int:
    """Counts the comments by `#`."""
    return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline))


def config_fields() -> dict[str, list[str]]:
    """Key name -> the places in a run config at which it may stand, as `section.key`."""
    from pipelines.config.run_config import run_config_schema

    places: dict[str, list[str]] = defaultdict(list)
    schema = run_config_schema()
    for section, model in [("", schema), *schema.get("$defs", {}).items()]:
        for key in model.get("properties", {}):
            places[key].append(f"{section}.{key}".lstrip("."))
    return places


def fields_without_use(root: Path = ROOT) -> list[str]:
    """Config fields whose key stands in no YAML file, no page of the documentation and no test."""
    texts = [
        path.read_text(encoding="utf-8", errors="ignore")
        for folder, pattern in (("infra", "*.yaml"), ("infra/docs", "*.md"), ("tests", "*.py"), ("pipelines", "*.yaml"))
        for path in (root / folder).rglob(pattern)
        if "reference" not in path.parts
    ]
    words = set(re.findall(r"\w+", "\n".join(texts)))
    return sorted(place for key, places in config_fields().items() if key not in words for place in places)


def table(house: House) -> list[tuple[str, str, str]]:
    """Returns rows of name, figure and aim."""
    core = [module for module in house.modules.values() if not module.is_extension]
    extensions = [module for module in house.modules.values() if module.is_extension]
    tests = [path.read_text(encoding="utf-8").count("\n") for path in (house.root / "tests").rglob("*.py")]
    single = house.single_caller_modules
    return [
        ("lines of the core", f"{lines_of(core):,}", "42,000"),
        ("lines of extensions", f"{lines_of(extensions):,}", "12,000"),
        ("files", f"{len(house.modules)} ({len(extensions)} of extensions)", "380"),
        ("lines of tests", f"{sum(tests):,}", "48,000"),
        ("folders that import vllm", ", ".join(sorted(house.vllm_folders)), "1"),
        ("files that spell min_p, a sampling field", str(len(house.files_with("min_p"))), "4"),
        ("modules with one caller in their folder", f"{len(single)}", "with a reason each"),
        ("their lines", f"{lines_of(house.modules[name] for name in single):,}", ""),
        ("config fields", str(sum(map(len, config_fields().values()))), "250"),
        ("config fields in no YAML, page or test", str(len(fields_without_use(house.root))), "0"),
        ("imports inside functions", str(house.inner_imports), "150"),
        (f"functions over {MAX_FUNCTION_LINES} lines", str(len(house.long_functions)), "5"),
        ("comments per 100 lines of the core", f"{house.comments_per_100_lines:.1f}", "3"),
    ]


def lines_of(modules: Iterator[Module] | list[Module]) -> int:
    """Adds up the lines of modules."""
    return sum(module.num_lines for module in modules)


def main(arguments: list[str]) -> int:
    """Prints the table."""
    sys.path.insert(0, str(ROOT))
    rows = table(read_house())
    if "--paths" in arguments:
        from traced_paths import path_rows

        rows += path_rows(ROOT)
    width = max(len(name) for name, _, _ in rows)
    for name, figure, aim in rows:
        print(f"{name:<{width}}  {figure:<40}  {aim}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

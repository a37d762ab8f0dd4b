"""Layers hold, each heavy library is imported by its owner only, and the light core stays light."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[1]
PACKAGES = ("dags", "pipelines", "serve_apps", "train_loops", "stores")
HEAVY = (
    "torch",
    "ray",
    "vllm",
    "transformers",
    "lancedb",
    "mlflow",
    "deepspeed",
    "pandas",
    "pyarrow",
    "jinja2",
    "plotly",
    "opentelemetry",
)
LIGHT = (
    "stores.types",
    "stores.config",
    "serve_apps",
    "serve_apps.config",
    "train_loops.config",
    "pipelines.config.run_config",
    "pipelines.credit",
    "pipelines.cli.main",
    "pipelines.runners.validate",
    "train_loops.engine.state_sizes",
    "pipelines.stages.steps",
    "pipelines.stages.score",
    "pipelines.stages.promote",
    "dags.local_airflow",
)
OWNERS = {
    "airflow": ("dags",),
    "vllm": ("serve_apps",),
    "ray.serve": ("serve_apps",),
    "deepspeed": ("train_loops",),
    "ray.train": ("train_loops",),
    "lancedb": ("stores",),
    "mlflow": ("stores",),
    "sqlalchemy": ("stores",),
    "ray.data": ("pipelines",),
    "opentelemetry": ("serve_apps",),
}
WARMED = {("pipelines/episodes/collector.py", "lancedb"), ("pipelines/episodes/collector.py", "ray.serve")}
"""A collector imports these before its first episode, so that none waits for it; it uses nothing of them."""
RUN_BY_OTHERS = {
    ("pipelines/stages/team_model.py", "mlflow"),
    ("pipelines/extensions/mlflow_traces/traces.py", "mlflow"),
}
"""MLflow runs the first, which needs what is above stores; the second is about nothing else."""


@cache
def imported(path: Path) -> frozenset[str]:
    """Dotted names of everything a file imports, late imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Late and type-only imports count, too: they hide a circle, they do not open it."""
    files = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for package in PACKAGES
        for file in ROOT.glob(f"{package}/**/*.py")
    }
    graph = {module: imported(file) & files.keys() - {module} for module, file in files.items()}
    assert len(graph) > 300 and sum(map(len, graph.values())) > 1000, "the imports were not read"
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_data_flows_down_through_the_layers() -> None:
    checked = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-logo"], cwd=ROOT, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("library", OWNERS)
def test_a_heavy_library_is_imported_by_its_owner_only(library: str) -> None:
    files = [f for package in PACKAGES for f in ROOT.glob(f"{package}/**/*.py")]
    strangers = [
        str(file.relative_to(ROOT))
        for file in files
        if file.relative_to(ROOT).parts[0] not in OWNERS[library]
        and (str(file.relative_to(ROOT)), library) not in WARMED | RUN_BY_OTHERS
        and any(name == library or name.startswith(f"{library}.") for name in imported(file))
    ]
    assert strangers == []


@pytest.mark.parametrize("module", LIGHT)
def test_the_light_core_pulls_in_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(sorted({set(HEAVY)!r} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]", f"import {module} pulls in {shown.stdout.strip()}"


def test_episodes_of_programs_are_served_without_the_gateway() -> None:
    code = "import sys, serve_apps.program.server as s; s.build_api({}); print({'serve_apps.gateway', 'ray.serve'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()", "each worker that plays episodes would import it in the first of them"


def test_help_names_every_command_without_anything_heavy() -> None:
    code = (
        "import sys\nfrom pipelines.cli.main import main\n"
        "try:\n    main()\nfinally:\n    print('HEAVY', sorted(set(sys.argv[2:]) & set(sys.modules)), file=sys.stderr)\n"
    )
    asked = [sys.executable, "-c", f"import sys; sys.argv = ['troupe', '--help', *{HEAVY!r}]\n{code}"]
    shown = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, env={"COLUMNS": "120", "TERM": "dumb"})
    assert shown.returncode == 0, shown.stderr
    assert "HEAVY []" in shown.stderr
    for command in ("train", "stage", "warmstart", "validate", "evaluate", "runs", "show", "diff", "export"):
        assert command in shown.stdout


CORE_ONLY = """
import re, sys, tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement

core, rest = {"troupe-rl"}, tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
while rest:
    need = Requirement(rest.pop())
    name = re.sub(r"[-_.]+", "-", need.name).lower()
    if name not in core and (need.marker is None or need.marker.evaluate({"extra": ""})):
        core.add(name)
        rest += requires(name) or ()
owners, finders = packages_distributions(), list(sys.meta_path)


class Core:
    def find_spec(self, name, path=None, target=None):
        distributions = {re.sub(r"[-_.]+", "-", owner).lower() for owner in owners.get(name.partition(".")[0], ())}
        if distributions and not distributions & core:
            return None
        return next((spec for finder in finders if (spec := finder.find_spec(name, path, target))), None)

    def find_distributions(self, *context):
        return (found for f in finders if hasattr(f, "find_distributions") for found in f.find_distributions(*context))


sys.meta_path[:] = [Core()]
try:
    import torch
except ModuleNotFoundError:
    from pipelines.cli.__main__ import main

    sys.argv = ["troupe", "validate", "infra/workflows/reflective_code.yaml"]
    sys.exit(main())
"""


def test_validate_needs_the_dependencies_of_the_core_only() -> None:
    done = subprocess.run([sys.executable, "-c", CORE_ONLY], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "reflective_code.yaml: ok" in done.stdout, done.stdout + done.stderr


def test_what_starts_without_pytest_imports_other_tests_by_their_package() -> None:
    """`make bench` and its like find what is in the root; pytest alone finds a file of tests by its bare name."""
    bare = {file.stem for file in (ROOT / "tests").rglob("*.py")} - {"__init__"}
    starts = [ROOT / "tests/showcase.py"]
    for folder in ("algorithms", "bench", "chaos", "gpu_check", "mutation"):
        starts += [f for f in (ROOT / "tests" / folder).glob("*.py") if not f.name.startswith(("test_", "conftest"))]
    left, seen, faults = starts, set(starts), []
    while left:
        file = left.pop()
        for name in imported(file):
            if name in bare:
                faults.append(f"{file.relative_to(ROOT)} imports {name}")
            other = ROOT / f"{name.replace('.', '/')}.py"
            if name.startswith("tests.") and other.is_file() and other not in seen:
                seen.add(other)
                left.append(other)
    assert len(seen) > len(starts) and not faults

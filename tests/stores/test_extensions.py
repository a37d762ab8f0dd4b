"""Extensions: they are found by their folders and by entry points, add what they say, and the core goes on without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import stores.extensions
from pipelines.config.run_config import load_config
from stores.extensions import HOMES, SECTIONS, Extension, extensions, section_models

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
PACKAGES = ("dags", "pipelines", "serve_apps", "stores", "train_loops")
FOLDERS = sorted(folder for home in HOMES for folder in (ROOT / home.replace(".", "/")).glob("*/"))
FOLDERS = [folder for folder in FOLDERS if (folder / "__init__.py").is_file()]

ONLY_THIS_TREE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
"""
"""A sitecustomize.py: an editable install has a finder that would find the folders where it was made."""


@pytest.fixture
def fresh() -> Iterator[None]:
    extensions.cache_clear()
    yield
    extensions.cache_clear()


def test_every_folder_says_what_it_is_and_has_tests() -> None:
    assert FOLDERS
    for folder in FOLDERS:
        readme = folder / "README.md"
        assert 300 < readme.stat().st_size < 2048, f"{readme} says in about 1 KB what it is"
        assert list((ROOT / "tests" / folder.relative_to(ROOT)).glob("test_*.py")), f"{folder} has no tests"


def test_every_config_of_an_extension_parses() -> None:
    for path in (ROOT / "infra" / "extensions").rglob("*.yaml"):
        assert load_config(path).run


def test_the_section_of_each_of_troupes_own_extensions_is_known_where_it_is_not_installed() -> None:
    own = [extension for extension in extensions() for section in extension.sections]
    assert section_models().keys() == SECTIONS.keys() and {e.name for e in own} <= {folder.name for folder in FOLDERS}


def test_a_package_adds_an_extension_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "their_extension.py").write_text(
        "from stores.extensions import Extension\nfrom stores.settings import Settings\n"
        "class Theirs(Settings):\n    level: int = 3\n"
        "EXTENSION = Extension(name='theirs', sections={'theirs': 'their_extension:Theirs'})\n"
        "TWICE = Extension(name='twice', sections={'theirs': 'their_extension:Theirs'})\n"
        "PROMOTE = Extension(name='watcher', sections={'promote': 'their_extension:Theirs'})\n"
        "NONE = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def installed(*names: str) -> None:
        points = [EntryPoint(name, f"their_extension:{name}", stores.extensions.GROUP) for name in names]
        monkeypatch.setattr(stores.extensions, "entry_points", lambda group: points)
        extensions.cache_clear()

    installed("EXTENSION")
    assert section_models()["theirs"]().level == 3
    installed("EXTENSION", "TWICE")
    assert section_models()["theirs"]().level == 3
    assert "extensions 'theirs' and 'twice' both have the config section 'theirs': uninstall one" in caplog.text
    installed("PROMOTE")
    assert section_models().keys() - section_models({"promote"}).keys() == {"promote"}
    assert "watcher, section promote is left out: Troupe has a config section 'promote' itself: rename" in caplog.text
    installed("NONE", "absent")
    assert all(extension.name != "theirs" for extension in extensions())
    assert "package their_extension is left out: extension their_extension:NONE: " in caplog.text
    assert "must be a stores.extensions.Extension" in caplog.text and "has no 'absent'" in caplog.text
    assert Extension(name="a").commands == ""


@pytest.fixture
def tree_without(tmp_path: Path) -> Path:
    """Troupe's packages without the folders of extensions, as links."""
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        for child in (ROOT / package).iterdir():
            if child.name not in ("extensions", "__pycache__"):
                (tmp_path / package / child.name).symlink_to(child)
    (tmp_path / "infra").symlink_to(ROOT / "infra")
    (tmp_path / "sitecustomize.py").write_text(ONLY_THIS_TREE)
    return tmp_path


def run_in(tree: Path, program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run([sys.executable, "-c", program], cwd=tree, env=environment, capture_output=True, text=True)


def test_without_the_folders_the_command_line_and_configs_are_there(tree_without: Path) -> None:
    ended = run_in(
        tree_without,
        "from pipelines.cli.main import app\n"
        "from pipelines.config.run_config import load_config\n"
        "from stores.extensions import extensions\n"
        "import pipelines.stages.table\n"
        "print(load_config('infra/workflows/math_chain.yaml').run, len(app.registered_commands) > 20, extensions())",
    )
    assert ended.stdout == "math_chain True ()\n", ended.stderr


@pytest.mark.parametrize("section", sorted(SECTIONS))
def test_a_section_of_an_extension_that_is_not_there_says_how_to_get_it(tree_without: Path, section: str) -> None:
    ended = run_in(
        tree_without,
        f"from pipelines.config.run_config import load_config\nload_config('infra/runs/demo.yaml', {{{section!r}: {{}}}})",
    )
    said = f"unknown key {section!r}: the extension {SECTIONS[section].rpartition('.')[2]!r} is not installed"
    assert said in ended.stderr and "it comes with troupe-rl: install that again" in ended.stderr


@pytest.mark.nightly
def test_the_core_passes_its_fast_tests_without_the_folders(tmp_path: Path) -> None:
    """In a copy of the tree from which the folders and their tests are gone."""
    for name in (*PACKAGES, "tests", "infra"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("extensions", "__pycache__", "node_modules")
        )
    for file in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "sitecustomize.py").write_text(ONLY_THIS_TREE)
    # Tests of pages, images and wheels; of examples, comparisons, contracts, targets of mutation and figures of the source, some of which are about
    # extensions; and these.
    left_out = [
        "docs",
        "infra",
        "mutation",
        "packaging",
        "pipelines/examples",
        "algorithms",
        "test_house.py",
        "test_imports.py",
        "stores/test_extensions.py",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--tier", "fast"]
    ended = subprocess.run(
        [*command, *(f"--ignore=tests/{place}" for place in left_out), "tests"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-5000:]

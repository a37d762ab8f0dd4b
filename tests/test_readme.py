"""What the README shows is so: the tree is the tracked tree, and its example workflow and config pass `troupe validate`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
UNLISTED = {"__init__.py", ".gitignore"}


def shown_tree() -> list[str]:
    """Paths in the README's tree, folders with a slash at the end; two spaces per level, then the annotation."""
    found = re.search(r"<!-- tree -->\n```\n(.*?)\n```", README, re.DOTALL)
    assert found, "README.md has no `<!-- tree -->` followed by a code block"
    paths: list[str] = []
    parents: list[str] = []
    for line in found[1].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        parents = [*parents[:depth], name]
        paths.append("".join(parents))
    return paths


def tracked_tree() -> set[str]:
    """Tracked files and their folders; below tests/ folders only."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    paths: set[str] = set()
    for path in map(Path, listed):
        folders = [f"{parent.as_posix()}/" for parent in path.parents if parent.as_posix() != "."]
        paths |= set(folders)
        if path.parts[0] != "tests" and path.name not in UNLISTED:
            paths.add(path.as_posix())
    return paths


def test_the_tree_in_the_readme_is_the_tracked_tree() -> None:
    shown, tracked = shown_tree(), tracked_tree()
    assert len(shown) == len(set(shown)), "a path is shown twice"
    assert (sorted(set(shown) - tracked), sorted(tracked - set(shown))) == ([], []), "(gone, not shown)"


def example(language: str, name: str) -> str:
    """The code block that follows `name`."""
    found = re.search(rf"`{re.escape(name)}`.*?```{language}\n(.*?)```", README, re.DOTALL)
    assert found, f"README.md has no {language} block after `{name}`"
    return found[1]


def write_examples(folder: Path) -> None:
    """The README's workflow, its two configs and tasks for them."""
    workflow, config = example("python", "my_team.py"), example("yaml", "my_team.yaml")
    assert len(workflow.splitlines()) + len(config.splitlines()) < 40, "a new workflow is short, config included"
    (folder / "my_team.py").write_text(workflow)
    (folder / "my_team.yaml").write_text(config)
    (folder / "my_run.yaml").write_text(example("yaml", "my_run.yaml"))
    (folder / "tasks").mkdir()
    for first, section in ((0, "train"), (100, "gate"), (200, "test")):
        rows = [json.dumps({"question": f"What is {n}*2?", "answer": str(2 * n)}) for n in range(first, first + 64)]
        for place in (folder, folder / "tasks"):
            (place / f"{section}.jsonl").write_text("\n".join(rows))


def test_the_example_workflow_and_config_could_start(tmp_path: Path) -> None:
    write_examples(tmp_path)
    (tmp_path / "models" / "base").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "models" / "base" / name).write_text("{}")
    troupe = Path(sys.executable).parent / "troupe"
    for config, groups in (("my_run.yaml", 2), ("my_team.yaml", 1)):
        done = subprocess.run([troupe, "validate", config], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert f"ok ({groups} model groups, 2 agents)" in done.stdout


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z]+)`", README))
    assert named, "the README names no make target"
    assert named - targets == set()

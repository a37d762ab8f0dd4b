"""readme_example: the README's workflow and run config -> files in a folder, with tasks for them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.docs.markdown_pages import fences


def write_example(folder: Path) -> None:
    """Writes my_team.py, my_team.yaml and three sets of tasks that share none."""
    for name, language in (("my_team.py", "python"), ("my_team.yaml", "yaml")):
        (fence,) = [fence for fence in fences("README.md") if fence.language == language]
        (folder / name).write_text(fence.text)
    for first, section in ((0, "train"), (100, "gate"), (200, "test")):
        rows = [json.dumps({"question": f"What is {n}*2?", "answer": str(2 * n)}) for n in range(first, first + 64)]
        (folder / f"{section}.jsonl").write_text("\n".join(rows))

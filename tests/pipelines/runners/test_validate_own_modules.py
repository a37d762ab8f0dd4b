"""What `troupe validate` says of the user's own modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipelines.cli.new_team import write_team
from pipelines.config.run_config import load_config
from pipelines.run.run import Run
from pipelines.runners.validate import _notes_on_code, check
from stores.team_code import MAX_BYTES

pytestmark = pytest.mark.fast


def test_validate_names_the_code_of_a_team_and_says_when_it_cannot_be_served_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path / "cache"))
    write_team(tmp_path / "checked_team")
    monkeypatch.chdir(tmp_path / "checked_team")
    monkeypatch.syspath_prepend(str(tmp_path / "checked_team"))
    config, module = load_config("checked_team.yaml"), Path("checked_team.py")
    Path("wording.py").write_text("")
    module.write_text(f"import wording\n{module.read_text().replace('from __future__ import annotations', '')}")
    assert "its code, which travels with the team: checked_team.py, wording.py" in check(config)

    Path("own_figures.py").write_text("")
    figures = config.evaluate.model_copy(update={"figures": ("own_figures:Late",)})
    assert list(Run(with_figures := config.model_copy(update={"evaluate": figures})).code)[1] == "own_figures.py"
    assert _notes_on_code(with_figures) == [
        "its code, which travels with the team: checked_team.py, own_figures.py, wording.py"
    ]

    Path("prompt.txt").write_text("Solve it")
    Path("wording.py").write_text("from pathlib import Path\nTEXT = Path(__file__).with_name('prompt.txt').read_text()")
    for name in ("wording", "checked_team"):
        sys.modules.pop(name)
    (note,) = [line for line in check(config) if "not served" in line]
    assert "checked_team.py, wording.py do not load by themselves ([Errno 2]" in note and "prompt.txt" in note

    once = "import os\nif os.environ['WORDING']:\n    raise RuntimeError('registered already')\nos.environ['WORDING'] = 'here'"
    Path("wording.py").write_text(once)
    monkeypatch.setenv("WORDING", "")
    for name in ("wording", "checked_team"):
        sys.modules.pop(name)
    (note,) = [line for line in check(config) if "not served" in line]
    assert "(RuntimeError: registered already, wording.py line 3)" in note
    for name in ("wording", "checked_team"):
        sys.modules.pop(name)

    Path("wording.py").write_text(f"TEXT = {'x' * MAX_BYTES!r}")
    (note,) = [line for line in check(config) if "by itself" in line]
    assert "it can be trained" in note and "the largest is wording.py" in note
    run = Run(config)
    assert run.workflow.agents and run.code == {}, "what cannot travel is trained nevertheless"
    for name in ("wording", "checked_team", "checked_team_demonstrator"):
        sys.modules.pop(name)

"""The user's own modules of a team: what is collected, and how teams whose modules have the same names act side by side."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from serve_apps.authoring.workflow import Workflow, load_carried
from serve_apps.episode.scripted import play_scripted
from serve_apps.workflows.program import Program
from stores.by_name import open_by_name
from stores.team_code import MAX_BYTES, collect_code, import_module, in_use, own_folders
from stores.types import Task

pytestmark = pytest.mark.fast

TASK = Task(task_id="a-task", prompt="2+3*4", answers=("14",))
TEAM = """
from dataclasses import dataclass
from typing import ClassVar
import json, {helper}
from serve_apps import Agent, Outcome, Workflow

@dataclass
class Said:
    known: ClassVar[list] = []
    text: "str"

class Team(Workflow):
    solver = Agent(prompt={helper}.PROMPT)

    async def run(self, task, agents, tools):
        from later import ending
        reply = await agents.solver(question=task.prompt)
        return Outcome(answer=Said(reply.text).text + ending())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that a user starts troupe in, first on the path as `add_user_code` has it."""
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    known = set(sys.modules)
    yield tmp_path / "mine"
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def team_files(ending: str, prompt: str = "Solve {question}") -> dict[str, str]:
    return {
        "a_team.py": TEAM.format(helper="prompts_of_it"),
        "prompts_of_it.py": f"PROMPT = {prompt!r}",
        "later.py": f"def ending(): return {ending!r}",
    }


def workflow_of(
    code: Mapping[str, str], path: str = "a_team:Team", settings: Mapping[str, Any] | None = None
) -> Workflow:
    return load_carried(code, path, settings or {})


def test_all_that_a_module_imports_of_the_users_own_is_collected_wherever_it_is_imported(folder: Path) -> None:
    write(
        folder, team_files("!") | {"not_imported.py": "", "tasks/train.jsonl": "{}", ".env": "KEY=1", "keys.json": "{}"}
    )
    assert collect_code({"path": "a_team:Team", "settings": {}}) == team_files("!")
    assert collect_code({"path": "serve_apps.workflows.math_chain:MathChain"}) == {}
    assert collect_code("json:dumps", "numpy:array", "no_such_module:X", "127.0.0.1:8000", "http://a:1", None, 3) == {}


@pytest.mark.parametrize("init", ["", None], ids=["a package", "a folder without __init__.py"])
def test_a_package_is_collected_with_its_relative_imports(folder: Path, init: str | None) -> None:
    files = {
        "my_pkg/team.py": TEAM.format(helper="my_pkg.prompts").replace("from later", "from .parts.later"),
        "my_pkg/prompts.py": "from . import words\nPROMPT = words.SOLVE",
        "my_pkg/words.py": "from .. import nothing_beyond" if init else "SOLVE = 'Solve {question}'",
        "my_pkg/parts/later.py": "from ..words import SOLVE\ndef ending(): return SOLVE[:5]",
    }
    files |= {} if init is None else {"my_pkg/__init__.py": init}
    write(folder, files | {"my_pkg/notes.md": "", "my_pkg/unused.py": ""})
    code = collect_code("my_pkg.team:Team")
    assert code == dict(sorted(files.items()))
    trace = play_scripted(workflow_of(code, "my_pkg.team:Team"), TASK, {"solver": ["14"]})
    assert trace.answer == "14Solve"


@pytest.mark.parametrize("name", ["my-team", "2agents", "teams.my-team"])
def test_a_file_that_no_import_statement_could_name_travels_like_any_other(folder: Path, name: str) -> None:
    files = {f"{name.replace('.', '/')}.py": "import a_helper\nclass Team: pass", "a_helper.py": ""}
    write(folder, files)
    assert open_by_name(f"{name}:Team", place="workflow.path").__module__ == name
    assert collect_code(f"{name}:Team") == dict(sorted(files.items()))


def test_modules_that_only_a_text_names_are_collected(folder: Path) -> None:
    """Worlds, functions of programs, tools in settings: they are named by dotted paths, in the config or in the code."""
    world = "from serve_apps import Environment, Workflow\nclass Team(Workflow):\n    home = Environment('worlds.house:House')\n"
    write(folder, {"a_team.py": world, "worlds/house.py": "import rooms", "rooms.py": "", "tool.py": ""})
    named = {"path": "a_team:Team", "settings": {"tools": [{"path": "tool:Tool"}]}}
    assert list(collect_code(named)) == ["a_team.py", "rooms.py", "tool.py", "worlds/house.py"]


def test_teams_with_modules_of_the_same_names_act_side_by_side(folder: Path) -> None:
    """Two teams, or two versions of one; neither sees the module of that name which this process has."""
    write(folder, team_files(" in this process"))
    open_by_name("a_team:Team", place="here")
    codes = [team_files(ending, f"{ending} {{question}}") for ending in (" of the first", " of the second")]
    teams = [workflow_of(code) for code in codes]
    for _ in range(2):
        traces = [play_scripted(team, TASK, {"solver": ["14"]}) for team in teams]
        assert [trace.answer for trace in traces] == ["14 of the first", "14 of the second"]
    assert [team.agents["solver"].prompt for team in teams] == [" of the first {question}", " of the second {question}"]
    assert type(workflow_of(codes[0])) is type(teams[0]), "the same code is imported once"
    assert open_by_name("a_team:Team", place="here") is sys.modules["a_team"].Team


def test_a_team_acts_where_its_folder_is_not_and_its_errors_show_its_lines(folder: Path) -> None:
    fails = team_files("!") | {"later.py": "def ending():\n    raise KeyError('of the user')\n"}
    with in_use(fails):
        later = import_module("later")
    with pytest.raises(KeyError) as raised:
        later.ending()
    shown = "".join(traceback.format_exception(raised.value))
    assert "later.py" in shown and "raise KeyError('of the user')" in shown
    assert own_folders() == []
    with pytest.raises(ValueError, match="here: cannot import 'later'"):
        open_by_name("later:ending", place="here")


def test_the_worlds_of_a_team_find_its_modules_first(folder: Path) -> None:
    write(folder, {"house.py": "WHERE = 'here'"})
    homes = "from serve_apps import Agent, Environment, Workflow\nclass Homes(Workflow):\n"
    homes += "    actor = Agent(prompt='{see}')\n    home = Environment('house:House', paths=('/own',))\n"
    home = workflow_of({"house.py": "WHERE = 'in the code'", "homes.py": homes}, "homes:Homes").environments["home"]
    program = f"import sys; sys.path[:0] = {list(home.paths)!r}; import house; print(house.WHERE)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "in the code\n"
    assert home.paths[0] == "/own", "folders that the author names come first"


@pytest.mark.test
def test_the_function_of_a_program_is_played_from_the_code(folder: Path) -> None:
    write(folder, {"solving.py": "def solve(prompt, client): return 'here'"})
    code = {"solving.py": "import aid\ndef solve(prompt, client): return aid.WHERE", "aid.py": "WHERE = 'in the code'"}
    settings = {"agents": {"a": {}}, "function": "solving:solve"}
    program = workflow_of(code, "serve_apps.workflows.program:Program", settings)
    assert isinstance(program, Program)
    episode = {"id": "e", "prompt": "?", "base_url": "http://127.0.0.1:1", "api_key": "none"}

    async def play() -> dict[str, Any]:
        return await program._workers_of_loop().play(episode)

    assert asyncio.run(play())["answer"] == "in the code"


def test_too_much_code_is_refused_by_name(folder: Path) -> None:
    write(folder, {"a_team.py": "import vendored", "vendored.py": f"TEXT = {'x' * MAX_BYTES!r}"})
    with pytest.raises(
        ValueError, match=r"not installed in site-packages.* more than 4 MiB of Python \(the largest is vendored\.py\)"
    ):
        collect_code("a_team:Team")
    (folder / "a_team.py").write_bytes("# gr\u00fcn".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a_team\.py is not UTF-8 .*: save it as UTF-8"):
        collect_code("a_team:Team")


def test_a_file_that_only_fails_where_it_is_imported_is_left_to_that_place(folder: Path) -> None:
    code = {
        "a_team.py": "try:\n    import old\nexcept SyntaxError:\n    old = None\n",
        "old.py": "print 'of Python 2'\n",
    }
    write(folder, code)
    code["a_team.py"] = f"\ufeff{code['a_team.py']}".replace("\n", "\r\n")  # as some editors write files
    (folder / "a_team.py").write_bytes(code["a_team.py"].encode())
    assert collect_code("a_team:Team") == code
    with in_use(code):
        assert import_module("a_team").old is None


def test_a_program_has_the_same_prompts_hash_where_it_is_served(folder: Path) -> None:
    """It is part of the team's key. The hash covers the bytes of the function's file."""
    (folder / "solving.py").write_bytes(b"\xef\xbb\xbfdef solve(prompt, client):\r\n    return 'it'\r\n")
    named = ("serve_apps.workflows.program:Program", {"agents": {"a": {}}, "function": "solving:solve"})
    served = workflow_of(collect_code(*named), *named)
    assert served.prompts_sha256 == workflow_of({}, *named).prompts_sha256


def test_a_file_that_hides_a_module_which_is_loaded_already_stays_out(folder: Path) -> None:
    """Troupe has loaded `queue`, `httpx` and others before the user's folder comes onto the path: imports give those, here and served."""
    write(folder, {"a_team.py": "import pytest, queue, own\nKIND = queue.Queue", "own.py": ""})
    write(folder, {"queue.py": "raise OSError", "pytest/__init__.py": "raise OSError"})
    code = collect_code("a_team:Team")
    assert list(code) == ["a_team.py", "own.py"]
    with in_use(code):
        assert import_module("a_team").KIND is queue.Queue


def test_what_was_changed_or_swept_in_the_folder_for_copies_is_written_again(folder: Path, tmp_path: Path) -> None:
    code = team_files(" as it was registered")
    program = (
        "import json, sys; from stores.team_code import import_module, in_use\n"
        "with in_use(json.loads(sys.argv[1])): print(import_module('later').ending())"
    )
    for damage in (lambda file: None, lambda file: file.write_text("raise OSError"), Path.unlink):
        ended = subprocess.run([sys.executable, "-c", program, json.dumps(code)], capture_output=True, text=True)
        assert ended.stdout == " as it was registered\n", ended.stderr
        (copy,) = (tmp_path / "cache").rglob("later.py")
        damage(copy)


def test_copies_that_were_swept_while_the_process_lives_are_there_after_the_next_change_of_a_route(
    folder: Path,
) -> None:
    code = team_files(" swept")
    with in_use(code):
        (copies,) = own_folders()
    shutil.rmtree(copies)
    team = workflow_of(code)
    assert play_scripted(team, TASK, {"solver": ["14"]}).answer == "14 swept", "`run` imports `later` only now"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import os\nKEY = os.environ['OF_NO_HEAD']",
            r"\(KeyError: 'OF_NO_HEAD', a_team\.py line 2\): variables, files",
        ),
        ("def later(:", r"\(SyntaxError: invalid syntax \(a_team\.py, line 1\)\)"),
        ("x = 1\nassert x == 2", r"\(AssertionError: , a_team\.py line 2\)"),
        ("import sys\nsys.exit('no GPU')", r"\(SystemExit: no GPU, a_team\.py line 2\)"),
        (
            "from serve_apps import Agent, Workflow\nclass Team(Workflow):\n  a = Agent(prompt='{q}')\n  def __init__(self): {}['k']",
            r"\(KeyError: 'k', a_team\.py line 4\)",
        ),
    ],
)
def test_whatever_the_code_of_a_team_raises_is_a_value_error_with_its_line(folder: Path, text: str, said: str) -> None:
    """A gateway reports those and keeps its teams; any other error would end its replica, and all teams of the port with it."""
    with pytest.raises(ValueError, match=said):
        workflow_of({"a_team.py": text})


def test_code_in_a_folder_of_another_user_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(ValueError, match=r"belongs to another user.* set TROUPE_CACHE"):
        workflow_of(team_files(" of nobody else"))


def test_a_folder_that_another_user_has_made_around_the_copies_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders for temporary files are everyone's: who makes `troupe-<uid>` first could exchange what lies in it."""
    stat, me = Path.stat, os.getuid()
    monkeypatch.delenv("TROUPE_CACHE")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def of_another_user(path: Path, **options: Any) -> os.stat_result:
        found = stat(path, **options)
        return os.stat_result((*found[:4], 12345 if path.name == f"troupe-{me}" else me, *found[5:]))

    monkeypatch.setattr(Path, "stat", of_another_user)
    with pytest.raises(ValueError, match=r"troupe-\d+ belongs to another user"):
        workflow_of(team_files(" of a folder in a folder"))


def test_a_folder_of_the_modules_name_is_named_with_where_to_start(folder: Path) -> None:
    """`troupe new a_team` makes the folder a_team with a_team.py: from beside it, Python takes the folder for the module."""
    write(
        folder,
        {
            "a_team/a_team.py": TEAM,
            "elsewhere/own.py": "",
            "elsewhere/pkg/own.py": "",
            "elsewhere/whole/__init__.py": "",
            "broken.py": "import not_installed",
            "empty_folder/readme.md": "",
            "a_module.py": "x = 1",
            "team_of_two.py": "SolveAndReview = 1",
        },
    )
    expected = {
        "a_team:Team": r"the folder .*mine/a_team, which is no module and has no 'Team': a_team/a_team\.py has that name, so "
        r"start troupe in its folder \(cd a_team\)",
        "own:Team": r"cannot import 'own' .*: elsewhere/own\.py has that name, so start troupe in its folder \(cd elsewhere\)",
        "pkg.own:Team": r"'pkg.own' \(No module named 'pkg'\): elsewhere/pkg/own\.py has that name, .* \(cd elsewhere\)",
        "whole:Team": r"elsewhere/whole/__init__\.py has that name, so start troupe in its folder \(cd elsewhere\)",
        "broken:Team": r"cannot import 'broken' \(No module named 'not_installed'\): is it on PYTHONPATH\?",
        "empty_folder:Team": r"the folder .*mine/empty_folder, which is no module and has no 'Team': name a module in it",
        "a_module:Team": r"'a_module' \(.*mine/a_module\.py\) has no 'Team'; it has x",
        "teamoftwo:Team": r"cannot import 'teamoftwo' .*: did you mean 'team_of_two'\?",
        "team_of_two:SolveReview": r"team_of_two\.py\) has no 'SolveReview'; did you mean 'SolveAndReview'\?",
        "no_such:Team": r"cannot import 'no_such' \(No module named 'no_such'\): is it on PYTHONPATH\?",
    }
    for path, message in expected.items():
        with pytest.raises(ValueError, match=message):
            open_by_name(path, place="workflow.path")

"""Programs whose process stays for many episodes: functions that are not async, and commands that read JSON lines."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_program import ONE, by_turn, play

from serve_apps.authoring.workflow import load_workflow
from serve_apps.program import workers
from serve_apps.program.process import ProgramError
from serve_apps.program.workers import Workers
from serve_apps.workflows.program import Program
from stores.types import EpisodeStatus

pytestmark = pytest.mark.test

NUMBERS = itertools.count()
ECHO = """
import json, os, sys, time
for line in sys.stdin:
    episode = json.loads(line)
    if episode["prompt"] == "sleep": time.sleep(60)
    if episode["prompt"] == "die": sys.exit("out of ideas")
    if episode["prompt"] == "chat": print("hello")
    answer = {"id": episode["id"], "answer": episode["prompt"], "metadata": {"process": os.getpid()}}
    print(json.dumps(answer), flush=True)
    if episode["prompt"] == "twice": print(json.dumps(answer), flush=True)
    if episode["prompt"] == "last": sys.exit()
"""


def episode(prompt: str) -> dict[str, str]:
    return {"id": f"episode-{next(NUMBERS)}", "prompt": prompt}


def echo() -> Workers:
    return Workers([sys.executable, "-c", ECHO], environment={}, folder=None)


@pytest.mark.anyio
async def test_a_process_plays_one_episode_after_the_other_and_several_play_side_by_side() -> None:
    played = echo()
    first = [await played.play(episode(str(i))) for i in range(3)]
    assert [reply["answer"] for reply in first] == ["0", "1", "2"]
    assert len({reply["metadata"]["process"] for reply in first}) == 1
    together = await asyncio.gather(*(played.play(episode(str(i))) for i in range(4)))
    assert len({reply["metadata"]["process"] for reply in together}) == 4


@pytest.mark.anyio
async def test_an_episode_that_is_given_up_ends_its_process_and_keeps_no_other_waiting() -> None:
    played = echo()
    process = (await played.play(episode("x")))["metadata"]["process"]
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await played.play(episode("sleep"))
    assert (await played.play(episode("next")))["answer"] == "next" and time.monotonic() - began < 10
    assert not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("die", r"ended with exit code 1 instead of an answer; out of ideas"),
        ("chat", r"wrote b'hello\\n': a line of its standard output is the JSON object of an answer"),
    ],
)
async def test_what_is_no_answer_is_the_programs_error_and_the_next_has_a_new_process(prompt: str, said: str) -> None:
    played = echo()
    with pytest.raises(ProgramError, match=said):
        await played.play(episode(prompt))
    assert (await played.play(episode("next")))["answer"] == "next"


@pytest.mark.anyio
async def test_what_a_process_left_behind_does_not_hold_the_episode_in_which_it_died() -> None:
    """The child has the standard error of its parent, whose end is not waited for."""
    away = "subprocess.Popen(['sleep', '20'], start_new_session=True, stdout=subprocess.DEVNULL)"
    died = Workers(
        [sys.executable, "-c", f"import os, subprocess, sys\nsys.stdin.readline()\n{away}\nos._exit(3)"],
        environment={},
        folder=None,
    )
    with pytest.raises(ProgramError, match="ended with exit code 3"):
        async with asyncio.timeout(15):
            await died.play(episode("x"))


@pytest.mark.anyio
async def test_an_answer_too_many_is_never_the_next_episodes() -> None:
    played = echo()
    assert (await played.play(episode("twice")))["answer"] == "twice"
    await asyncio.sleep(0.2)
    with pytest.raises(ProgramError, match="with the id of its episode"):
        await played.play(episode("next"))
    assert (await played.play(episode("after that")))["answer"] == "after that"


@pytest.mark.anyio
async def test_a_process_that_ended_by_itself_takes_no_episode_with_it() -> None:
    played = echo()
    assert (await played.play(episode("last")))["answer"] == "last"
    await asyncio.sleep(0.5)
    assert (await played.play(episode("next")))["answer"] == "next"


@pytest.mark.anyio
async def test_a_process_without_episodes_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "IDLE_S", 0.2)
    played = echo()
    process = psutil.Process((await played.play(episode("x")))["metadata"]["process"])
    await asyncio.sleep(1)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert (await played.play(episode("next")))["answer"] == "next"


@pytest.mark.parametrize(
    ("says", "status", "error"),
    [
        ("55", EpisodeStatus.OK, ""),
        ("raise", EpisodeStatus.AGENT_ERROR, "ProgramError: ValueError: no such planet"),
        ("die", EpisodeStatus.AGENT_ERROR, "ended with exit code 3 instead of an answer; a word for a reader"),
    ],
)
def test_a_function_is_played_in_a_process_of_its_own(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, says: str, status: EpisodeStatus, error: str
) -> None:
    monkeypatch.setenv("USER", "somebody")
    program = Program(ONE, function="program_functions:do_as_told")
    trace = play(program, tiny_model, by_turn(says))
    assert trace.status == status and error in trace.error and bool(trace.error) == bool(error)
    if not error:
        assert trace.answer == "55" and trace.outcome_metadata["num_played"] == 1
        assert trace.outcome_metadata["user"] is None, "it gets the variables that the configuration names"


@pytest.mark.nightly
def test_functions_that_sleep_do_not_starve_later_episodes(tiny_model: Path) -> None:
    """As many processes as episodes, and the deadline of an episode ends its own."""
    program = Program(ONE, function="program_functions:do_as_told")
    began = time.monotonic()
    asleep = play(program, tiny_model, by_turn("sleep"), timeout_s=4)
    assert asleep.status == EpisodeStatus.TIMEOUT and len(asleep.turns) == 1
    assert play(program, tiny_model, by_turn("55"), timeout_s=8).answer == "55"
    assert time.monotonic() - began < 30


LINES = """
import json, sys
from openai import OpenAI
for number, line in enumerate(sys.stdin, 1):
    episode = json.loads(line)
    client = OpenAI(base_url=episode["agents"]["calculator"], api_key=episode["api_key"])
    messages = [{"role": "user", "content": episode["prompt"]}]
    answer = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
    about = {"number": number, "task": episode["task"]}
    print(json.dumps({"id": episode["id"], "answer": answer, "score": 0.5, "metadata": about}), flush=True)
"""


def test_a_command_that_stays_reads_episodes_as_lines(tiny_model: Path) -> None:
    program = Program(ONE, command=[sys.executable, "-c", LINES], stays=True)
    trace = play(program, tiny_model, by_turn("55"))
    assert (trace.status, trace.answer, trace.error) == (EpisodeStatus.OK, "55", "")
    assert trace.outcome_metadata["score"] == 0.5 and trace.outcome_metadata["number"] == 1
    assert trace.outcome_metadata["task"]["prompt"] == "7+6*8" and "answers" not in trace.outcome_metadata["task"]


@pytest.mark.parametrize(
    "settings",
    [{"command": ["x", "{prompt}"]}, {"command": ["x"], "stdin": True}, {"function": "program_functions:ask"}],
)
def test_what_cannot_stay_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="stays: true needs a command without"):
        load_workflow("serve_apps.workflows.program:Program", {"agents": ONE, "stays": True, **settings})


@pytest.mark.anyio
async def test_a_program_that_is_built_again_keeps_its_processes_until_its_source_changes(tmp_path: Path) -> None:
    """Each stage builds the workflow anew, and a framework takes seconds to import."""
    file = tmp_path / "program.py"

    async def played_by() -> int:
        program = Program(ONE, command=[sys.executable, str(file)], stays=True)
        reply = await program._workers_of_loop().play(episode("x"))
        return int(reply["metadata"]["process"])

    file.write_text(ECHO)
    first, again = await played_by(), await played_by()
    file.write_text(f"{ECHO}# changed")
    assert first == again != await played_by()

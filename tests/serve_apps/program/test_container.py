"""A program in a container reaches its episode's API and nothing else, and no container outlives its episode. The networks are real."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_program import ONE, by_turn, play

from serve_apps.program import container
from serve_apps.program.container import Container
from serve_apps.workflows.program import Program
from stores.types import EpisodeStatus

pytestmark = [pytest.mark.test, pytest.mark.needs_program("nsenter")]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """The engine of the tests, in a folder of its own."""
    path = tmp_path / "engine"
    path.write_text(f"#!{sys.executable}\n" + Path(__file__).with_name("container_engine.py").read_text())
    path.chmod(0o755)
    return path


@pytest.fixture
def neighbour() -> Iterator[int]:
    """The port of another service on this machine's loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


ASK = """
import json, os, socket, sys, urllib.request
def reaches(host, port):
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
        return "reached"
    except OSError as error:
        return type(error).__name__
body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(json.dumps({"url": os.environ["OPENAI_BASE_URL"], "said": said, "prompt": sys.argv[1],
                  "neighbour": reaches("127.0.0.1", sys.argv[2]), "outside": reaches("192.0.2.1", 80)}))
"""


def containers(engine: Path) -> list[int]:
    """Process ids of the containers that the engine started."""
    return [int(path.read_text()) for path in (engine.parent / "containers").iterdir()]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_a_program_in_a_container_reaches_its_episode_and_nothing_else(
    tiny_model: Path, tmp_path: Path, engine: Path, neighbour: int
) -> None:
    (tmp_path / "agent.py").write_text(ASK)
    image = {"image": str(tmp_path / "agent.py"), "arguments": ["{prompt}", str(neighbour)], "engine": str(engine)}
    trace = play(Program(ONE, container=image), tiny_model, by_turn("hm"))
    assert trace.status == EpisodeStatus.OK, trace.error
    seen = json.loads(trace.answer)
    assert seen.pop("url").startswith("http://127.0.0.1:8000/v1/episodes/")
    assert seen == {"said": "hm", "prompt": "7+6*8", "neighbour": "ConnectionRefusedError", "outside": "OSError"}
    assert len(trace.turns) == 1
    assert not any(map(is_alive, containers(engine)))
    socket.create_connection(("127.0.0.1", neighbour), timeout=2).close()  # which is there


def test_a_program_in_a_container_reads_the_prompt_from_its_standard_input(
    tiny_model: Path, tmp_path: Path, engine: Path
) -> None:
    """An engine passes standard input on where it is asked to alone, and the program would read an empty prompt."""
    told = ASK.replace("sys.argv[1]", "sys.stdin.read()").replace("sys.argv[2]", "1")
    (tmp_path / "agent.py").write_text(told)
    program = Program(ONE, container={"image": str(tmp_path / "agent.py"), "engine": str(engine)}, stdin=True)
    trace = play(program, tiny_model, by_turn("hm"))
    assert trace.status == EpisodeStatus.OK, trace.error
    assert json.loads(trace.answer)["prompt"] == "7+6*8"


@pytest.mark.nightly
def test_no_container_is_left_of_an_episode_that_ran_into_its_deadline(
    tiny_model: Path, tmp_path: Path, engine: Path
) -> None:
    (tmp_path / "agent.py").write_text("import time\ntime.sleep(600)")
    image = {"image": str(tmp_path / "agent.py"), "engine": str(engine)}
    trace = play(Program(ONE, container=image), tiny_model, by_turn(), timeout_s=4)
    assert trace.status == EpisodeStatus.TIMEOUT
    both = containers(engine)
    assert len(both) == 2, "the program's and the forwarder's"
    deadline = time.monotonic() + 5
    while any(map(is_alive, both)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, both))


def test_an_image_without_python_needs_another_for_the_forwarder(
    tiny_model: Path, tmp_path: Path, engine: Path
) -> None:
    image = {"image": "without-python", "engine": str(engine)}
    error = play(Program(ONE, container=image), tiny_model, by_turn()).error or ""
    assert "which needs python3 (else name another in container.forwarder_image): exec" in error


def test_the_forwarder_may_read_and_do_nothing(tmp_path: Path) -> None:
    command = Container(image="me/agent:1", forwarder_image="python:3.13-slim").forwarder_command("x-network", tmp_path)
    assert command == [
        *("docker", "run", "--rm", "--interactive", "--name", "x-network", "--network", "none", "--read-only"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--volume", f"{tmp_path}:/troupe:ro"),
        *("--entrypoint", "python3", "python:3.13-slim", "/troupe/forward.py", "8000", "/troupe/episodes.sock"),
    ]


def test_a_program_may_have_a_network_of_the_users() -> None:
    own = Container(image="me/agent:1", network="agents", options=["--memory", "1g"], arguments=["--ask"])
    assert not own.is_isolated
    assert own.run_command("x", own.network, ["A", "B"], own.arguments) == [
        *("docker", "run", "--rm", "--name", "x", "--network", "agents", "--env", "A", "--env", "B"),
        *("--memory", "1g", "me/agent:1", "--ask"),
    ]
    with pytest.raises(TypeError, match=r"'--network=host' goes to container\.network"):
        Container(image="me/agent:1", options=["--network=host"])


def test_the_forwarder_carries_many_connections_and_large_bodies_both_ways(tmp_path: Path) -> None:
    size, num = 1 << 20, 16
    with socket.socket(socket.AF_UNIX) as server, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        server.bind(str(tmp_path / "sock"))
        server.listen()

        def echo(connection: socket.socket) -> None:
            with connection:
                body = b"".join(iter(lambda: connection.recv(1 << 16), b""))
                connection.sendall(body)

        def serve() -> None:
            for _ in range(num):
                threading.Thread(target=echo, args=[server.accept()[0]], daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        shutil.copy(container.FORWARDER, tmp_path)
        # The collector runs at every few objects: a connection that only the event loop knows would be lost.
        script = "import gc, runpy, sys; gc.set_threshold(10); runpy.run_path(sys.argv.pop(1), run_name='__main__')"
        forwarder = tmp_path / container.FORWARDER.name
        command = [sys.executable, "-c", script, str(forwarder), str(port), str(tmp_path / "sock")]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            replies: list[bool] = []

            def ask(letter: int) -> None:
                body = bytes([letter]) * size
                with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                    connection.sendall(body)
                    connection.shutdown(socket.SHUT_WR)
                    replies.append(b"".join(iter(lambda: connection.recv(1 << 16), b"")) == body)

            threads = [threading.Thread(target=ask, args=[letter]) for letter in range(num)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert replies == [True] * num
            process.stdin.close()
            assert process.wait(timeout=10) == 0, "it ends with its standard input"
        finally:
            process.kill()

#!/usr/bin/env python3
"""container_engine: `run` and `rm` of a container engine -> processes in real network namespaces; an image is a Python file.

What the tests start programs with where no engine is installed. As with an engine, a container goes on when the client that started
it is killed; mounts are paths, and a container's files are the machine's. Needs `unshare` and `nsenter` (util-linux).
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

STATE = Path(__file__).parent / "containers"
VALUED = ("--name", "--network", "--cap-drop", "--security-opt", "--volume", "--entrypoint", "--env")
FLAGS = ("--rm", "--interactive", "--read-only")
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def inside(name: str, command: list[str]) -> None:
    """Becomes a container's process: its loopback is up, as in an engine's network `none`."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    (STATE / name).write_text(str(os.getpid()))
    os.execv(sys.executable, [sys.executable, *command])


def run(words: list[str]) -> int:
    """Runs a container to its end; returns its exit code."""
    values: dict[str, list[str]] = {}
    while words[0].startswith("--"):
        option = words.pop(0)
        assert option in VALUED or option in FLAGS, option
        values.setdefault(option, []).append(words.pop(0) if option in VALUED else "")
    image, *arguments = words
    for volume in values.get("--volume", []):
        source, target, mode = volume.split(":")
        assert mode == "ro"
        arguments = [argument.replace(target, source) for argument in arguments]
    if values.get("--entrypoint") == ["python3"]:
        if image == "without-python":
            print('exec: "python3": executable file not found in $PATH', file=sys.stderr)
            return 127
    else:
        arguments = [image, *arguments]
    (name,), (network,) = values["--name"], values["--network"]
    STATE.mkdir(exist_ok=True)
    own = os.geteuid() == 0
    if network == "none":
        enter = ["unshare", "--net"] if own else ["unshare", "--user", "--map-root-user", "--net"]
    else:
        pid = (STATE / network.removeprefix("container:")).read_text()
        enter = ["nsenter", "--target", pid, "--net", *([] if own else ["--user", "--preserve-credentials"])]
    environment = {name: os.environ[name] for name in ("PATH", *values.get("--env", [])) if name in os.environ}
    command = [*enter, sys.executable, __file__, "inside", name, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    ) as container:
        assert container.stdin is not None and container.stdout is not None and container.stderr is not None
        if "--interactive" in values:
            threading.Thread(target=relay, args=(sys.stdin.buffer, container.stdin), daemon=True).start()
        else:
            container.stdin.close()
        outputs = ((container.stdout, sys.stdout.buffer), (container.stderr, sys.stderr.buffer))
        relays = [threading.Thread(target=relay, args=ends) for ends in outputs]
        for thread in relays:
            thread.start()
        for thread in relays:
            thread.join()
        return container.wait()


def relay(source: BinaryIO, target: BinaryIO) -> None:
    """Copies what comes, as it comes; the target is closed with the source. The container has no pipe of the client's caller."""
    with suppress(OSError), target:
        for block in iter(lambda: source.read1(1 << 16), b""):  # type: ignore[attr-defined]
            target.write(block)
            target.flush()


def remove(name: str) -> int:
    """Kills a container; 1 where there is none of that name."""
    try:
        os.kill(int((STATE / name).read_text()), signal.SIGKILL)
    except (OSError, ValueError):
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "inside":
        inside(sys.argv[2], sys.argv[3:])
    if sys.argv[1] == "run":
        sys.exit(run(sys.argv[2:]))
    assert sys.argv[1:3] == ["rm", "--force"]
    sys.exit(remove(sys.argv[3]))

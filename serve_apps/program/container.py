"""container: an image, an episode -> a program that runs in a network in which the episode's API alone is in reach.

    container of the program ── 127.0.0.1:8000 ──> container of the forwarder ── mounted Unix socket ──> EpisodeServer
    (network of the forwarder's container)         (--network none)

Neither has an interface but loopback, and that loopback is their own: no service of this machine, no other episode and no
outside address can be reached. With `network` a program runs in a network of the user's instead, without a forwarder.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from serve_apps.program.process import TAIL, ProgramError, inherited, started
from serve_apps.program.server import FORWARDED_PORT, SOCKET_NAME

FORWARDER = Path(__file__).with_name("forward.py")
MOUNT = "/troupe"
END_S = 10.0
"""Seconds that removing a container may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What `docker run`, or another engine of that command line, starts for each episode."""

    image: str
    arguments: Sequence[str] = ()
    engine: str = "docker"
    options: Sequence[str] = ()
    """Options of `run` for the program's container, without a network."""
    network: str = "none"
    """`none`: the episode's API alone is in reach. Else the engine's network of that name, from which `host` must be reached; with
    `host` all that listens on this machine is in reach of the program."""
    forwarder_image: str = ""
    """An image with `python3` for the forwarder; empty: the program's own."""

    def __post_init__(self) -> None:
        """Raises TypeError where the options name a network."""
        if named := [option for option in self.options if option.startswith(("--network", "--net"))]:
            raise TypeError(f"container.options: {named[0]!r} goes to container.network")

    @property
    def is_isolated(self) -> bool:
        """Whether programs reach the episode's API alone, through a forwarder."""
        return self.network == "none"

    def run_command(
        self, name: str, network: str, variables: Sequence[str], arguments: Sequence[str], *, has_stdin: bool = False
    ) -> list[str]:
        """Returns the command of the program's container.

        Args:
            variables: their names alone, so that no value, such as the episode's key, stands among the machine's processes.
            has_stdin: whether the program reads standard input, of which an engine passes nothing on by itself.
        """
        passed = [part for variable in variables for part in ("--env", variable)]
        start = [self.engine, "run", "--rm", "--name", name, "--network", network]
        return [*start, *(["--interactive"] if has_stdin else []), *passed, *self.options, self.image, *arguments]

    def forwarder_command(self, name: str, folder: Path) -> list[str]:
        """Returns the command of the forwarder's container; it ends with its standard input. Args: folder: holds the socket."""
        return [
            *(self.engine, "run", "--rm", "--interactive", "--name", name, "--network", "none", "--read-only"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--volume", f"{folder}:{MOUNT}:ro"),
            *("--entrypoint", "python3", self.forwarder_image or self.image),
            *(f"{MOUNT}/{FORWARDER.name}", str(FORWARDED_PORT), f"{MOUNT}/{SOCKET_NAME}"),
        ]

    @asynccontextmanager
    async def started(self, folder: Path | None, environment: Mapping[str, str]) -> AsyncIterator[tuple[str, str]]:
        """Yields the name and the network of the program's container; afterwards no container of this episode is left.

        Raises ProgramError where the forwarder does not start.

        Args:
            folder: of the episodes' socket; None without a forwarder.
            environment: variables that the engine's client gets, beside PATH and HOME.
        """
        name = f"troupe-{secrets.token_hex(8)}"
        try:
            if folder is None:
                yield name, self.network
            else:
                async with self._forwarding(f"{name}-network", folder, environment) as network:
                    yield name, network
        finally:  # the engine's client may have been killed, and its container goes on without it
            await self._remove(name, environment)

    @asynccontextmanager
    async def _forwarding(self, name: str, folder: Path, environment: Mapping[str, str]) -> AsyncIterator[str]:
        shutil.copy(FORWARDER, folder)
        command = self.forwarder_command(name, folder)
        process = await started(command, environment=environment)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            if (await process.stdout.readline()).strip() != b"ready":
                said = (await process.stderr.read()).decode(errors="replace")[-TAIL:].strip()
                raise ProgramError(
                    f"the forwarder of the container's network did not start from {self.forwarder_image or self.image!r}, which "
                    f"needs python3 (else name another in container.forwarder_image): {said or 'nothing on standard error'}"
                )
            yield f"container:{name}"
        finally:
            process.stdin.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), timeout=END_S)
            if process.returncode is None:
                await self._remove(name, environment)
                with suppress(ProcessLookupError):
                    process.kill()

    async def _remove(self, name: str, environment: Mapping[str, str]) -> None:
        """Removes a container, if it is there; the engine gets `END_S` for it."""
        null, env = asyncio.subprocess.DEVNULL, inherited() | dict(environment)
        with suppress(OSError):  # without an engine there is no container
            command = (self.engine, "rm", "--force", name)
            process = await asyncio.create_subprocess_exec(*command, env=env, stdin=null, stdout=null, stderr=null)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), timeout=END_S)
            if process.returncode is None:
                process.kill()

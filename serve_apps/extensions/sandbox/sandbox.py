"""sandbox: a program, inputs -> what it did with each input, run behind as many walls as this machine has.

Whatever comes out of the sandbox is treated as hostile.

Walls, strongest first:
    bubblewrap   own user, pid, net, ipc, uts and mount namespaces; a read-only root with the interpreter and nothing else;
                 an empty scratch of bounded size; no capabilities; seccomp; another user where this process is root
    landlock     where user namespaces are blocked: files, network and signals by Landlock (Linux 6.12), seccomp, limits, a
                 supervisor above the runner. The total of memory and disk is less well guarded
    none         limits alone, and only where the settings ask for it: programs then run as this process's user
Limits on time, memory, processes, files and output hold behind all of them. The kernel is shared in any case.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from serve_apps.chat import long_json
from serve_apps.extensions.sandbox.config import SandboxConfig
from serve_apps.extensions.sandbox.seccomp import seccomp_program

logger = logging.getLogger(__name__)
RUNNER_SOURCE = Path(__file__).with_name("runner.py").read_bytes()
"""Read when this module is loaded, because it may not be readable later: a process that gives up root's rights afterwards
may no longer enter the folder of this package. The two files are then also of the same version."""
START_DEADLINE_S = 20.0
"""Seconds until a sandbox must be ready; a later one is a fault of this machine, not of the program."""
END_DEADLINE_S = 5.0
REMOVE_DEADLINE_S = 60.0
GRACE_S = 2.0
"""Seconds beyond a case's own limit, for ending it and everything it started."""
MAX_TIMEOUTS = 2
"""The number of cases that may take too long; later ones are not run."""
MAX_STARTS = 3
"""The number of sandboxes for a program that did not begin: it is not to blame,
and a machine under load may just be late."""
NOBODY = 65534
MAX_LINE_BYTES = 64 << 20
WATCH_S = 0.1
"""Seconds between two looks at the memory of all processes of a sandbox."""

Wall = Literal["bubblewrap", "landlock", "none"]


class SandboxUnavailable(RuntimeError):
    """Raised where no wall works here, or a sandbox did not start, or did not start the program: it was not judged."""

    is_infrastructure = True
    """For worlds that run programs: their episode is repeated."""


class _NotBegun(SandboxUnavailable):
    """Raised where the sandbox started and the program did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Describes a program to run."""

    code: str
    fn_name: str = ""
    """The function, or method of `Solution`, to call with each input; empty for a program that reads standard input."""
    min_arguments: int = 0
    """Arguments of a function after so many are passed only where it takes them. 0: all are passed."""
    is_in_place: bool = False
    """Whether the value of a call that returns None is its first argument, which the function has changed."""
    prelude: str = ""
    """Code of ours that runs once in a new sandbox, outside of the walls of a case: imports that each case finds done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Describes the input of a function whose arguments have names."""

    arguments: Sequence[Any]
    names: Sequence[str]
    """The parameters of the arguments, passed by place to a function that has other ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRun:
    """Describes what a program did with one input."""

    status: Literal["ended", "time", "memory", "output", "compile", "error", "lost"]
    """`ended`: by itself, with exit code 0. `error`: with another code, or by a signal. `time`: too slow, or not run.
    `lost`: it, or an earlier case of the same program, ended the runner."""
    stdout: str = ""
    stderr: str = ""
    """The end of standard error, at most 4,000 characters."""
    value: Any = None
    """The value that the function returned, as JSON (`long_json.loads`)."""
    has_value: bool = False
    seconds: float = 0.0
    cpu_s: float = 0.0
    max_rss_mib: float = 0.0


@dataclass
class Sandbox:
    """Runs programs behind the walls of this machine. Safe to use from several threads.

    Raises SandboxUnavailable, naming what failed, where the wall that the settings ask for does not work here.
    """

    config: SandboxConfig = field(default_factory=SandboxConfig)

    @cached_property
    def wall(self) -> Wall:
        """The wall in use: the one in the settings, else the first that works."""
        candidates: Sequence[Wall] = ("bubblewrap", "landlock") if self.config.wall == "auto" else (self.config.wall,)
        faults = []
        for wall in candidates:
            try:
                self._probe(wall)
            except SandboxUnavailable as fault:
                faults.append(f"{wall}: {fault}")
            else:
                return wall
        raise SandboxUnavailable(
            f"code cannot be run safely on this machine ({'; '.join(faults)}): install bubblewrap and allow user "
            "namespaces, or set sandbox.wall: none, which runs what a model wrote as this user"
        )

    def describe(self) -> str:
        """Returns one line about the layers that are active here."""
        parts = {
            "bubblewrap": ["namespaces (user, pid, net, ipc, uts, mount)", "read-only root", "no capabilities"],
            "landlock": ["Landlock on files and network", "no namespaces"],
            "none": ["NO WALL: programs run as this user"],
        }[self.wall]
        if self.wall != "none":
            parts.append("seccomp" if seccomp_program() else "no seccomp filter for this processor")
        if self.wall == "bubblewrap" and os.geteuid() == 0:
            parts.append(f"user {NOBODY}")
        parts.append(
            f"limits: {self.config.time_s:g} s, {self.config.memory_mib} MiB, {self.config.processes} processes, "
            f"{self.config.output_kib} KiB of output, {self.config.scratch_mib} MiB of scratch"
        )
        return f"sandbox: {self.wall}: {', '.join(parts)}"

    def run(
        self, program: Program, inputs: Sequence[Any], *, time_s: float | None = None, total_s: float = math.inf
    ) -> list[CaseRun]:
        """Returns one result per input, in order. Raises SandboxUnavailable only if the sandbox does not start a program.

        Args:
            program: the program, which is started anew for every input.
            inputs: text for standard input; with `fn_name` the list of arguments, or a `Call`.
            time_s: seconds per input, by the clock; by default those of the settings.
            total_s: seconds for all inputs. Those that are left then, or after MAX_TIMEOUTS that took too long, are `time`.
        """
        return self._run(self.wall, program, inputs, time_s or self.config.time_s, total_s)

    @contextmanager
    def kept(self, program: Program) -> Iterator[KeptSandbox]:
        """Gives a sandbox that stays for many inputs, which need not come from one source, and ends it with the block.

        All processes and files of an input are gone before the next one. The program's prelude runs once.
        """
        with KeptSandbox(self, program) as kept:
            yield kept

    def _probe(self, wall: Wall) -> None:
        if wall == "bubblewrap" and shutil.which("bwrap") is None:
            raise SandboxUnavailable("bwrap is not installed")
        (ran,) = self._run(wall, Program(code="print(input()[::-1])"), ["olleh"], 10.0, math.inf)
        if ran.status != "ended" or ran.stdout != "hello\n":
            raise SandboxUnavailable(f"a program that reverses a word ended with {ran.status}: {ran.stderr[-300:]}")

    def _run(self, wall: Wall, program: Program, inputs: Sequence[Any], time_s: float, total_s: float) -> list[CaseRun]:
        deadline = time.monotonic() + total_s
        results: list[CaseRun] = []
        num_late = 0
        while len(results) < len(inputs) and not _is_enough(results, deadline):
            try:
                self._run_in_one(wall, program, inputs, results, time_s, deadline)
            except _NotBegun:
                num_late += 1
                if num_late == MAX_STARTS:
                    raise
        return results + [CaseRun(status="time")] * (len(inputs) - len(results))

    def _run_in_one(
        self,
        wall: Wall,
        program: Program,
        inputs: Sequence[Any],
        results: list[CaseRun],
        time_s: float,
        deadline: float,
    ) -> None:
        """Adds to the results until there are enough, or the sandbox can no longer be used.

        A program that does not begin in a new sandbox is a fault of this machine: `_NotBegun`. In a used one an earlier
        input may be the cause: the remaining inputs then get a new one.
        """
        is_new = True
        with self.started(wall, program, time_s) as runner:
            while len(results) < len(inputs) and not _is_enough(results, deadline):
                line = runner.ask(_request(inputs[len(results)]), time_s + GRACE_S)
                if not runner.has_begun:
                    if is_new:
                        raise _NotBegun(f"the program was not begun: {_fault(line)}")
                    return
                is_new = False
                if runner.is_lost:
                    lost = CaseRun(status="memory" if runner.is_over_memory else "lost")
                    results += [lost] * (len(inputs) - len(results))
                else:
                    results.append(_case(line, program))

    @contextmanager
    def started(self, wall: Wall, program: Program, time_s: float, *, is_kept: bool = False) -> Iterator[_Runner]:
        """Gives a sandbox that is ready for inputs. Args: is_kept: whether it clears its scratch after each."""
        config = self.config
        with _faults_of_this_machine(), ExitStack() as stack:
            scratch = "/tmp" if wall == "bubblewrap" else stack.enter_context(_scratch())
            header = {
                "code": program.code,
                "fn_name": program.fn_name,
                "min_arguments": program.min_arguments,
                "is_in_place": program.is_in_place,
                "prelude": program.prelude,
                "is_kept": is_kept,
                "time_s": time_s,
                "memory_bytes": config.memory_mib << 20,
                "file_bytes": config.scratch_mib << 20,
                "output_bytes": config.output_kib << 10,
                "open_files": config.open_files,
                "processes": config.processes + (1 if wall == "bubblewrap" else 512),
                "scratch": scratch,
                "supervised": wall != "bubblewrap",
                "landlock": wall == "landlock",
                "readable": self._readable,
                "seccomp": (seccomp_program() or b"").hex(),
            }
            begun, writer = os.pipe()
            stack.callback(os.close, begun)
            header["begun"] = writer
            command, files = self._command(wall)
            files.append(writer)
            try:
                process = subprocess.Popen(
                    command,
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,  # bwrap's own message, where it does not start; the runner closes it
                    cwd="/",
                    env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "HOME": scratch},
                    pass_fds=files,
                    start_new_session=True,
                )
            finally:
                for number in files:
                    os.close(number)
            runner = _Runner(process, begun, config.memory_mib << 20, has_namespace=wall == "bubblewrap")
            try:
                runner.begin(header)
                yield runner
            finally:
                runner.end()

    def _command(self, wall: Wall) -> tuple[list[str], list[int]]:
        python = [self._python, "-P", "-s", "-S", "-B"]
        if wall != "bubblewrap":
            files = [_file_of(RUNNER_SOURCE)]  # the user NOBODY may not be able to read the folder of this package
            return [*_as_nobody(wall), *python, f"/dev/fd/{files[0]}"], files
        arguments = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        # The runner is the namespace's first process: of a program's signals it gets SIGINT alone. Were it a second one, its
        # end would end the bwrap outside at once, and nobody would reap the first.
        arguments += ["--as-pid-1", "--hostname", "sandbox"]
        for folder in self._readable:
            arguments += ["--ro-bind", folder, folder]
        for name in ("bin", "lib", "lib64"):
            if Path(f"/{name}").is_symlink():
                arguments += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        arguments += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        files = [_file_of(RUNNER_SOURCE)]
        arguments += ["--ro-bind-data", str(files[0]), "/runner.py"]
        arguments += ["--size", str(self.config.scratch_mib << 20), "--perms", "1777", "--tmpfs", "/tmp"]
        arguments += ["--remount-ro", "/"]
        if program := seccomp_program():
            files.append(_file_of(program))
            arguments += ["--seccomp", str(files[-1])]
        # By a file: a program reads the command line of its first process, and learns no more than this.
        files.append(_file_of(b"\0".join(a.encode() for a in arguments) + b"\0"))
        return [*_as_nobody(wall), "bwrap", "--args", str(files[-1]), "--", *python, "/runner.py"], files

    @cached_property
    def _python(self) -> str:
        """The interpreter of the runner: this process's own, else the system's, whichever the program's user may run."""
        if self.config.python:
            return self.config.python
        own = os.path.join(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
        for candidate in (own, *(f"{folder}/python3" for folder in ("/usr/bin", "/usr/local/bin", "/bin"))):
            path = os.path.realpath(candidate)
            if os.access(path, os.R_OK | os.X_OK) and (os.geteuid() != 0 or _is_open_to_all(Path(path))):
                return path
        user = NOBODY if os.geteuid() == 0 else os.geteuid()
        raise SandboxUnavailable(
            f"user {user} may run neither {own} nor a python3 of the system: install one in /usr, or name one in "
            "sandbox.python"
        )

    @cached_property
    def _readable(self) -> list[str]:
        prefix = str(Path(self._python).parents[1])
        folders = ["/usr", *(f"/{n}" for n in ("bin", "lib", "lib64") if Path(f"/{n}").is_dir())]
        folders = [f for f in folders if not Path(f).is_symlink()]
        return [*folders, *([] if prefix.startswith("/usr") else [prefix]), *self.config.readable]


class KeptSandbox:
    """A sandbox for many inputs of one program, started when the first one comes, and anew where it was lost. For one thread."""

    def __init__(self, sandbox: Sandbox, program: Program) -> None:
        self._sandbox, self._program = sandbox, program
        self._stack = ExitStack()
        self._runner: _Runner | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, program_input: Any) -> CaseRun:
        """Returns what the program did with an input. Raises SandboxUnavailable if the sandbox does not start it."""
        time_s, line = self._sandbox.config.time_s, None
        for _ in range(MAX_STARTS):
            if self._runner is None:
                started = self._sandbox.started(self._sandbox.wall, self._program, time_s, is_kept=True)
                self._runner = self._stack.enter_context(started)
            runner = self._runner
            line = runner.ask(_request(program_input), time_s + GRACE_S)
            if not runner.has_begun:  # an earlier input may have broken it
                self._end()
            elif runner.is_lost:
                self._end()
                return CaseRun(status="memory" if runner.is_over_memory else "lost")
            else:
                return _case(line, self._program)
        raise _NotBegun(f"the program was not begun: {_fault(line)}")

    def _end(self) -> None:
        self._runner = None
        self._stack.close()


class _Runner:
    """Exchanges requests and answers with a started sandbox, until an answer does not come."""

    def __init__(self, process: subprocess.Popen[bytes], begun: int, memory_bytes: int, *, has_namespace: bool) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._begun, self._has_namespace = process, begun, has_namespace
        self._stdin, self._stdout = process.stdin, process.stdout
        for number in (begun, self._stdin.fileno()):
            os.set_blocking(number, False)
        self._buffer = bytearray()
        self._memory_bytes = memory_bytes
        self._first: int | None = None
        self.is_lost = False
        self.has_begun = False
        """True if the program of the last request has begun to run: a later failure is then its own."""
        self.is_over_memory = False

    def begin(self, header: Mapping[str, Any]) -> None:
        """Waits until the sandbox is ready."""
        answer = self.ask(header, START_DEADLINE_S)
        if answer != {"ready": True}:
            self.end()
            stderr = self._process.stderr.read() if self._process.stderr else b""
            raise SandboxUnavailable(
                answer["fault"]
                if answer
                else f"no answer after {START_DEADLINE_S:g} s"
                if self._process.returncode == -signal.SIGKILL
                else f"exit code {self._process.returncode}: {stderr.decode(errors='replace')[-500:].strip()}"
            )
        if self._has_namespace:
            first, *_ = _below(self._process.pid) or [-1]  # of no process: OSError
            self._first = os.pidfd_open(first)

    def ask(self, request: Mapping[str, Any], deadline_s: float) -> Any:
        """Returns the answer; None, and nothing from then on, where none comes in time or it is no JSON object."""
        try:
            answer = json.loads(
                self._exchange(long_json.dumps(request).encode() + b"\n", time.monotonic() + deadline_s)
            )
        except (OSError, ValueError, RecursionError):
            answer = None
        self.is_lost = not isinstance(answer, dict)
        try:
            self.has_begun = bool(os.read(self._begun, 1 << 10))
        except BlockingIOError:
            self.has_begun = False
        return answer

    def end(self) -> None:
        """Ends all processes of the sandbox, and waits until they have ended.

        The kernel ends a whole pid namespace with its first process. Without a namespace every descendant is killed one by
        one, and the supervisor, which ends last, kills those that lose their parent meanwhile.
        """
        if self._process.returncode is not None:
            return
        if self._first is not None:
            # Kill the namespace's first process and not the bwrap outside: that one then reaps it, and leaves no zombie.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
            gone = select.poll()
            gone.register(self._first, select.POLLIN)
            gone.poll(1000 * END_DEADLINE_S)
            os.close(self._first)
        else:
            self._stdin.close()
            _kill_below(self._process.pid)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=END_DEADLINE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._stdin.close()
        self._stdout.close()

    def _exchange(self, request: bytes, deadline: float) -> bytes:
        """Sends a request and returns the line that answers it; empty where that takes too long."""
        stdin, stdout, rest = self._stdin.fileno(), self._stdout.fileno(), memoryview(request)
        poll = select.poll()
        poll.register(stdin, select.POLLOUT)
        poll.register(stdout, select.POLLIN)
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or len(self._buffer) > MAX_LINE_BYTES:
                return b""
            ready = [number for number, _ in poll.poll(1000 * min(left, WATCH_S))]
            if stdin in ready:
                rest = rest[os.write(stdin, rest[: 1 << 16]) :]
                if not rest:
                    poll.unregister(stdin)
            if stdout in ready:
                data = os.read(stdout, 1 << 16)
                if not data:
                    return b""
                self._buffer += data
            if not ready and _memory_of(self._process.pid) > self._memory_bytes:
                self.is_over_memory = True
                return b""
        line, _, self._buffer = self._buffer.partition(b"\n")
        return bytes(line)


def _request(program_input: Any) -> dict[str, Any]:
    if isinstance(program_input, Call):
        return {"input": program_input.arguments, "names": program_input.names}
    return {"input": program_input}


def _is_enough(results: Sequence[CaseRun], deadline: float) -> bool:
    return sum(r.status == "time" for r in results) >= MAX_TIMEOUTS or time.monotonic() >= deadline


def _fault(line: Any) -> str:
    if not isinstance(line, dict):
        return "its runner gave no answer"
    return str(line.get("stderr", "")).strip().rpartition("\n")[2] or f"it ended by itself: {line}"


def _case(line: Any, program: Program) -> CaseRun:
    """Reads a result from the runner's line, which a hostile program may have written."""
    try:
        code, why = int(line["exit_code"]), str(line["why"])
        status = why if why in ("time", "output", "compile") else "ended" if code == 0 else "error"
        stderr = str(line["stderr"])
        if status == "error" and "MemoryError" in stderr[-200:]:
            status = "memory"
        value, has_value = None, False
        if program.fn_name and status == "ended":
            has_value = bool(line["value"])
            value = long_json.loads(line["value"]) if has_value else None
        return CaseRun(
            status=status,  # type: ignore[arg-type]
            stdout=str(line["stdout"]),
            stderr=stderr,
            value=value,
            has_value=has_value,
            seconds=float(line["seconds"]),
            cpu_s=float(line["cpu_s"]),
            max_rss_mib=float(line["max_rss_mib"]),
        )
    except (KeyError, TypeError, ValueError, RecursionError):
        return CaseRun(status="lost")


def _file_of(content: bytes) -> int:
    """Returns a descriptor from which `content` can be read."""
    number = os.memfd_create("sandbox")
    os.write(number, content)
    os.lseek(number, 0, os.SEEK_SET)
    os.set_inheritable(number, True)
    return number


def _as_nobody(wall: Wall) -> list[str]:
    """Returns the command that makes a command of root run without root's rights; empty for other users.

    It is a command, not `subprocess.Popen(user=...)`: with that Python forks instead of a vfork, and runs the fork handlers
    of every library in this process; the one of grpcio (Ray depends on it) has waited for ever in the child.
    """
    if os.geteuid() != 0 or wall == "none":
        return []
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]


@contextmanager
def _faults_of_this_machine() -> Iterator[None]:
    """Turns an OSError of the work inside into SandboxUnavailable."""
    try:
        yield
    except OSError as fault:
        raise SandboxUnavailable(f"this machine: {fault}") from fault


def _is_open_to_all(path: Path) -> bool:
    folders = path.resolve().parents
    return bool(path.stat().st_mode & 0o005 == 0o005) and all(f.stat().st_mode & 0o001 for f in folders)


@contextmanager
def _scratch() -> Iterator[str]:
    """Makes a folder for one program's files, and removes it at the end."""
    folder = tempfile.mkdtemp(prefix="troupe-sandbox-")
    try:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        yield folder
    finally:
        _remove(folder)


def _remove(folder: str) -> None:
    """Removes a folder with `rm`: nested folders may be too deep for shutil.

    Folders closed to their own user are opened first.
    """
    fault = ""
    for command in (["rm", "-rf", "--"], ["chmod", "-R", "u+rwx", "--"], ["rm", "-rf", "--"]):
        try:
            done = subprocess.run([*command, folder], check=False, capture_output=True, timeout=REMOVE_DEADLINE_S)
            fault = done.stderr.decode(errors="replace")[-300:].strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            fault = str(error)
            with suppress(RecursionError):
                shutil.rmtree(folder, ignore_errors=True)  # where not even `rm` can be started
        if not os.path.lexists(folder):
            return
    logger.warning("%s is left behind: %s", folder, fault)


def _memory_of(pid: int) -> int:
    """Returns the resident bytes of a process and all its descendants."""
    total, page = 0, os.sysconf("SC_PAGE_SIZE")
    for process in (pid, *_below(pid)):
        with suppress(OSError):
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * page
    return total


def _kill_below(pid: int) -> None:
    """Kills all descendants of a process that adopts orphans, until only dying ones are left."""
    for _ in range(200):
        below = _below(pid)
        if not below:
            return
        for descendant in below:
            with suppress(ProcessLookupError):
                os.kill(descendant, signal.SIGKILL)
        time.sleep(0.005)


def _below(pid: int) -> list[int]:
    """Returns the descendants that are alive."""
    alive, todo = [], [pid]
    while todo:
        current = todo.pop()
        with suppress(OSError):
            for task in Path(f"/proc/{current}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
            if current != pid and _state_of(current) not in "ZX":
                alive.append(current)
    return alive


def _state_of(pid: int) -> str:
    stat = Path(f"/proc/{pid}/stat").read_bytes()  # a program may give itself a name of any bytes
    return stat.rpartition(b")")[2].split()[0].decode()

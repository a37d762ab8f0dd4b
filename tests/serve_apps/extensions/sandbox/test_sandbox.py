"""The sandbox and its judge against programs that do not want to be judged."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from tiers import each_push
from waits import wait_until

import serve_apps
import stores
from pipelines.extensions.code_tasks.code_tests import Case, CodeTests
from pipelines.extensions.code_tasks.code_verifier import CodeVerifier
from serve_apps.extensions.sandbox import Program, Sandbox, SandboxUnavailable
from serve_apps.extensions.sandbox.config import SandboxConfig
from serve_apps.extensions.sandbox.runner import check_landlock
from serve_apps.extensions.sandbox.sandbox import _below, _kill_below, _memory_of
from tests.serve_apps.extensions.sandbox.hostile_programs import FUNCTIONS, HONEST, HONEST_FUNCTION, PROGRAMS, TELLING

pytestmark = [pytest.mark.test, pytest.mark.needs_program("bwrap")]
TIME_S = 1.0
NOBODY, ORDINARY = 65534, 1234
LIBC, PR_SET_CHILD_SUBREAPER = ctypes.CDLL(None), 36
WRITTEN = {"x", "d", "link", "root", "loop", "kmsg", *map(str, range(1, 100))}
"""Names under which hostile programs write into /tmp."""
EACH_PUSH = {
    "memory at once", "memory of many processes", "disk, many files", "output without end", "thread bomb", "deep recursion",
    "computes for ever", "ignores every signal", "kills everybody", "leaves a daemon", "reads files of the host",
    "reads environments", "connects by TCP", "connects by an abstract name", "another user", "a user namespace of its own",
    "attaches to its parent", "kernel doors", "imports the judge", "says it passed", "searches memory for the answer",
    "equals everything", "prints the answer but returns none",
}  # fmt: skip
"""One of each class of attack: resources, signals, leftovers, files, network, rights, kernel, the judge. `make nightly` plays all."""
FUNCTION_TESTS = CodeTests(cases=(Case(given=[2, 3], expected=5),), fn_name="f")


def test_each_push_names_programs_that_exist() -> None:
    assert {*PROGRAMS, *FUNCTIONS} >= EACH_PUSH


@dataclass
class World:
    """What a program must not reach."""

    secret: str
    folder: Path
    port: int
    name: str
    num_reached: int = 0

    @property
    def tests(self) -> CodeTests:
        """Hidden: the sum of the last two numbers, which no hostile program prints."""
        line = f"{self.folder / 'secret'} {self.port} {self.name} {self.folder / 'socket'} {os.getpid()}"
        return CodeTests(cases=(Case(given=line, expected=str(len(self.secret) * 7919)),))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    temporary = tempfile.TemporaryDirectory(dir="/tmp")  # not pytest's folder, which pytest closes to others
    folder = Path(temporary.name)
    folder.chmod(0o755)  # readable by all: only a wall keeps it from being read
    secret = f"canary-{uuid4().hex}"
    (folder / "secret").write_text(secret)
    (folder / "secret").chmod(0o644)
    if os.geteuid() == 0:
        os.chown(folder / "secret", ORDINARY, ORDINARY)
    listener = socket.create_server(("127.0.0.1", 0))
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", listener.getsockname()[1]))
    abstract = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"troupe-{uuid4().hex}"
    abstract.bind(f"\0{name}")
    abstract.listen()
    by_path = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    by_path.bind(str(folder / "socket"))
    by_path.listen()
    datagrams_by_path = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams_by_path.bind(str(folder / "socket.datagrams"))
    for file in ("socket", "socket.datagrams"):
        (folder / file).chmod(0o777)
    world = World(secret, folder, listener.getsockname()[1], name)

    def listen(server: socket.socket) -> None:
        while True:
            try:
                if server.type == socket.SOCK_DGRAM:
                    server.recv(1)
                else:
                    server.accept()[0].send(secret.encode())
            except OSError:
                return
            world.num_reached += 1

    servers = (listener, datagrams, abstract, by_path, datagrams_by_path)
    for server in servers:
        threading.Thread(target=listen, args=(server,), daemon=True).start()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TROUPE_TEST_SECRET", secret)
        yield world
    for server in servers:
        server.close()
    temporary.cleanup()


@pytest.fixture(scope="module", params=["bubblewrap", pytest.param("landlock", marks=pytest.mark.nightly)])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return sandbox_of(request.param)


def inhabitants() -> set[int]:
    """Processes below this one, and orphans of users whom nothing but a sandbox uses."""
    pids = {p.pid for p in psutil.Process().children(recursive=True)}
    users = (NOBODY, ORDINARY) if os.getuid() in (0, ORDINARY) else ()
    own = {0, 1, os.getpid(), *(p.pid for p in psutil.Process().parents())}
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if process.uids().real in users and process.status() != psutil.STATUS_ZOMBIE:
                above = next((p for p in process.parents() if p.uids().real not in users), None)
                if above is None or above.pid in own:  # else it is another judge's
                    pids.add(process.pid)
    return pids


def newcomers(before: set[int]) -> set[int]:
    """Inhabitants that were not there before, but for what older processes started: Ray's workers come when they like."""
    pids = set()
    for pid in inhabitants() - before:
        with suppress(psutil.NoSuchProcess):
            if not before & {p.pid for p in psutil.Process(pid).parents()}:
                pids.add(pid)
    return pids


def ipc_objects(kind: str) -> set[str]:
    """Ids of System V objects, but for those of a PostgreSQL that another test started, as nobody, too."""
    head, *lines = [line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()]
    objects = [dict(zip(head, line, strict=False)) for line in lines]
    return {ipc_object[head[1]] for ipc_object in objects if _name_of(ipc_object.get("cpid", "0")) != "postgres"}


def _name_of(pid: str) -> str:
    file = Path(f"/proc/{pid}/comm")
    return file.read_text().strip() if file.is_file() else ""


def traces(world: World) -> list[object]:
    """What a program could leave on this machine, or change about its judge."""
    stat = (world.folder / "secret").stat()
    return [
        {*os.listdir("/tmp")} & WRITTEN,
        [ipc_objects(kind) for kind in ("sem", "msg", "shm")],
        (stat.st_mode, stat.st_mtime, os.listxattr(world.folder / "secret")),
        (resource.getrlimit(resource.RLIMIT_NOFILE), os.getpriority(os.PRIO_PROCESS, 0)),
        (os.sched_getaffinity(0), os.sched_getscheduler(0)),
    ]


def withstands(sandbox: Sandbox, world: World, name: str) -> None:
    """Whether one program earns nothing, learns nothing and leaves nothing."""
    judge, before, left = CodeVerifier(sandbox=sandbox), inhabitants(), traces(world)
    free = psutil.virtual_memory().available
    honest = CodeTests(cases=(Case(given="2 3", expected="5"),))
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(CodeVerifier(sandbox=sandbox).judge, HONEST, honest, time_s=20)
        judged = judge.judge(PROGRAMS[name], world.tests)
        assert beside.result().verdict == "pass", "an honest program beside it"
    (ran,) = sandbox.run(Program(code=PROGRAMS[name]), [world.tests.cases[0].given])
    everything_returned = f"{judged} {ran}"
    assert judged.verdict not in ("pass", "sandbox_error"), everything_returned
    assert judged.passed == 0
    assert world.secret not in everything_returned
    assert not newcomers(before), "something of it is still running"
    assert traces(world) == left
    assert psutil.virtual_memory().available > free - (2 << 30)


@pytest.mark.timeout(120)  # a program that runs for ever is ended, on a busy machine too
@pytest.mark.parametrize("name", each_push(PROGRAMS, EACH_PUSH))
def test_no_program_escapes_or_earns_a_pass(sandbox: Sandbox, world: World, name: str) -> None:
    reached = world.num_reached
    withstands(sandbox, world, name)
    assert world.num_reached == reached, "it reached the network"


@pytest.mark.skipif(os.geteuid() != 0, reason="whoever is no ordinary user becomes one")
@pytest.mark.parametrize("name", each_push(TELLING, EACH_PUSH))
def test_no_program_escapes_a_judge_that_is_an_ordinary_user(sandbox: Sandbox, world: World, name: str) -> None:
    reached = world.num_reached
    as_ordinary_user(lambda: withstands(sandbox_of(sandbox.wall), world, name))
    assert world.num_reached == reached, "it reached the network"


def test_what_a_dead_runner_leaves_is_ended(world: World) -> None:
    sandbox, before = sandbox_of("landlock"), inhabitants()
    code = "import os, time\nfor _ in range(3):\n    if os.fork() == 0: os.setsid()\ntime.sleep(60)"
    with ThreadPoolExecutor() as pool:
        run = pool.submit(sandbox.run, Program(code=code), [""], time_s=30)
        wait_until(lambda: len(inhabitants() - before) >= 10)
        supervisor = next(p for p in psutil.Process().children() if p.pid not in before)
        (runner,) = supervisor.children()
        runner.send_signal(signal.SIGKILL)
        assert run.result(timeout=20)[0].status == "lost"
    assert inhabitants() <= before


def test_buffers_of_sockets_keep_their_default_size(sandbox: Sandbox) -> None:
    """The program counts what it puts there: free memory changes with all else that runs beside it."""
    code = PROGRAMS["memory in buffers of sockets"]
    free = psutil.virtual_memory().available
    (ran,) = sandbox.run(Program(code=code), [""], time_s=10)
    sizes = [int(line.split()[0]) for line in ran.stdout.splitlines()]
    each = int(Path("/proc/sys/net/core/wmem_default").read_text())
    assert len(sizes) == sandbox.config.processes, ran
    assert 0 < sum(sizes) < 1.5 * each * sandbox.config.open_files * sandbox.config.processes
    assert psutil.virtual_memory().available > free - (2 << 30)


def test_a_lock_of_a_program_holds_up_nobody(sandbox: Sandbox) -> None:
    with ThreadPoolExecutor() as pool, open(sandbox._python) as file:
        run = pool.submit(sandbox.run, Program(code=PROGRAMS["locks a file of the host"]), [""])
        while not run.done():
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # BlockingIOError: the program has it
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(0.01)
    assert run.result()[0].status == "time"


ORDINARY_USES = """
import asyncio, fcntl, multiprocessing, sqlite3
async def ask():
    asked = await asyncio.create_subprocess_exec("echo", "hi", stdout=-1)
    return (await asked.communicate())[0]
one, other = multiprocessing.Pipe()
one.send(asyncio.run(ask()))
with sqlite3.connect("a.db") as base:
    base.execute("create table t(x)")
fcntl.lockf(open("x", "w"), fcntl.LOCK_EX)
print(other.recv().decode().strip(), base.execute("select count(*) from t").fetchone())
"""


def test_programs_may_use_pairs_of_sockets_and_lock_files_of_their_own(sandbox: Sandbox) -> None:
    (ran,) = sandbox.run(Program(code=ORDINARY_USES), [""], time_s=10)
    assert (ran.status, ran.stdout) == ("ended", "hi (0,)\n"), ran


@pytest.mark.parametrize("victim", ["os.getppid()", "-1"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_program_that_signals_its_runner_leaves_no_zombie(number: int, victim: str) -> None:
    """A zombie's parent is then this process, which adopts orphans as the first process of a container does."""
    sandbox, before = sandbox_of("bubblewrap"), {p.pid for p in psutil.Process().children()}
    assert LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
    try:
        sandbox.run(Program(code=f"import os\nos.kill({victim}, {int(number)})"), [""])
        children = [p for p in psutil.Process().children() if p.pid not in before]
        assert not [p for p in children if p.name() == "bwrap"]
    finally:
        LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.mark.parametrize("name", each_push(FUNCTIONS, EACH_PUSH))
def test_no_function_is_right_by_what_it_returns(sandbox: Sandbox, name: str) -> None:
    judged = CodeVerifier(sandbox=sandbox).judge(FUNCTIONS[name], FUNCTION_TESTS)
    assert judged.verdict not in ("pass", "sandbox_error"), judged
    assert CodeVerifier(sandbox=sandbox).judge(HONEST_FUNCTION, FUNCTION_TESTS).verdict == "pass"


def test_no_program_makes_its_failure_look_like_one_of_this_machine(sandbox: Sandbox) -> None:
    tests = CodeTests(cases=tuple(Case(given=str(n), expected=str(n)) for n in range(4)))
    kills = "import os\nn = input()\nprint(n, flush=True)\nif n == '1': os.kill(os.getppid(), 9)"
    judged = CodeVerifier(sandbox=sandbox).judge(kills, tests)
    assert {c.verdict for c in judged.cases} <= {"pass", "runtime_error"}
    unwalled = CodeVerifier(sandbox=Sandbox(SandboxConfig(wall="none")))
    assert unwalled.judge("import os\nprint(input())\nos.rmdir(os.getcwd())", tests).passed == 4


CLOSED_FOLDER = """
import os, sys
import serve_apps
import stores
from serve_apps.extensions.sandbox.config import SandboxConfig
from serve_apps.extensions.sandbox import Program, Sandbox
folder, wall, user = sys.argv[1], sys.argv[2], int(sys.argv[3])
assert serve_apps.__file__.startswith(folder), serve_apps.__file__
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
(ran,) = Sandbox(SandboxConfig(wall=wall)).run(Program(code="print(int(input()) + 1)"), ["4"])
print(ran.status, ran.stdout.strip(), os.access(folder, os.R_OK))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone may read a folder that is closed to the program's user")
@pytest.mark.parametrize(("user", "may_read"), [(0, True), (ORDINARY, False)])
def test_a_package_in_a_folder_that_only_root_may_enter_is_no_hindrance(
    sandbox: Sandbox, tmp_path: Path, user: int, may_read: bool
) -> None:
    """A checkout below /root, as in many containers: neither NOBODY nor a judge that gave up root can read it."""
    for package in (serve_apps, stores):
        shutil.copytree(Path(package.__file__).parent, tmp_path / package.__name__)
    tmp_path.chmod(0o700)
    command = [sys.executable, "-c", CLOSED_FOLDER, tmp_path, sandbox.wall, str(user)]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=60)
    assert ran.stdout.strip() == f"ended 5 {may_read}", ran.stderr


NO_FORK = """
import ctypes
from serve_apps.extensions.sandbox import Program, Sandbox
from serve_apps.extensions.sandbox.config import SandboxConfig
forks = []
count = ctypes.CFUNCTYPE(None)(lambda: forks.append(1))
ctypes.CDLL(None).__register_atfork(count, None, None, None)
for wall in ("bubblewrap", "landlock"):
    (ran,) = Sandbox(SandboxConfig(wall=wall)).run(Program(code="print(5)"), [""])
    print(wall, ran.stdout.strip(), len(forks))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to give up")
def test_no_fork_handler_of_a_library_runs_when_a_sandbox_starts() -> None:
    """grpcio's waits for ever, now and then, in the child of a process with threads, as a collector is."""
    ran = subprocess.run([sys.executable, "-c", NO_FORK], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines() == ["bubblewrap 5 0", "landlock 5 0"]


def test_a_program_that_was_not_begun_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = sandbox_of("landlock")
    monkeypatch.setitem(sandbox.__dict__, "_readable", ["/nowhere"])
    judged = CodeVerifier(sandbox=sandbox).judge("print(5)", CodeTests(cases=(Case(given="", expected="5"),)))
    assert judged.verdict == "sandbox_error"
    assert "/nowhere" in judged.cases[0].message


def test_a_program_that_begins_in_a_later_sandbox_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox, start, tries = sandbox_of("landlock"), Sandbox.started, []
    readable = sandbox._readable

    def start_late(self: Sandbox, *args: Any) -> Any:
        self.__dict__["_readable"] = readable if tries else ["/nowhere"]
        tries.append(1)
        return start(self, *args)

    monkeypatch.setattr(Sandbox, "started", start_late)
    judged = CodeVerifier(sandbox=sandbox).judge("print(5)", CodeTests(cases=(Case(given="", expected="5"),)))
    assert (judged.verdict, len(tries)) == ("pass", 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="whoever is no ordinary user becomes one")
def test_a_machine_without_processes_is_no_fault_of_the_program() -> None:
    def judge() -> None:
        sandbox = sandbox_of("landlock")
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        judged = CodeVerifier(sandbox=sandbox).judge("print(5)", CodeTests(cases=(Case(given="", expected="5"),)))
        assert judged.verdict == "sandbox_error", judged

    before = scratches()
    as_ordinary_user(judge)
    assert scratches() <= before


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_machine_without_descriptors_is_no_fault_of_the_program(sandbox: Sandbox, is_kept: bool) -> None:
    program = Program(code="def f(): return 1", fn_name="f")
    assert sandbox.run(program, [[]])[0].value == 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(SandboxUnavailable, match=r"this machine: .* Too many open files"), ExitStack() as stack:
            stack.enter_context(sandbox.kept(program)).run([]) if is_kept else sandbox.run(program, [[]])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_than_1024_open_files_are_no_hindrance_and_none_is_inherited(sandbox: Sandbox) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    code = """
import os
for number in range(4, 4096):
    try: print(number, os.fstat(number))
    except OSError: pass"""
    try:
        with ExitStack() as stack:
            for _ in range(1100):
                stack.enter_context(open(os.devnull))
            (ran,) = sandbox.run(Program(code=code), [""])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (ran.status, ran.stdout) == ("ended", "")


def test_a_byte_order_mark_before_a_program_is_no_error(sandbox: Sandbox) -> None:
    (ran,) = sandbox.run(Program(code="\ufeffprint(7)"), [""])
    assert (ran.status, ran.stdout) == ("ended", "7\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="root removes anything")
def test_a_folder_that_a_program_closed_is_removed() -> None:
    def run() -> None:
        code = "import os\nos.makedirs('d/e')\nos.chmod('d', 0)\nos.chmod('.', 0)"
        (ran,) = sandbox_of("none").run(Program(code=code), [""])
        assert ran.status == "ended", ran

    before = scratches()
    as_ordinary_user(run)
    assert scratches() <= before


@pytest.mark.timeout(50)  # the runner sleeps for 60
def test_a_runner_that_does_not_read_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = tmp_path / "python"
    deaf.write_text("#!/bin/sh\nexec sleep 60\n")
    deaf.chmod(0o755)
    sandbox = Sandbox(SandboxConfig(wall="none", python=str(deaf)))
    monkeypatch.setitem(sandbox.__dict__, "wall", "none")
    monkeypatch.setattr("serve_apps.extensions.sandbox.sandbox.START_DEADLINE_S", 0.5)
    monkeypatch.setattr("serve_apps.extensions.sandbox.sandbox.END_DEADLINE_S", 0.5)
    with pytest.raises(SandboxUnavailable, match=r"no answer after 0\.5 s"):
        sandbox.run(Program(code="#" * (1 << 20)), [""])


def test_a_landlock_that_lets_signals_out_is_no_wall() -> None:
    check_landlock(6)
    with pytest.raises(OSError, match="version 6 is needed"):
        check_landlock(5)


def sandbox_of(wall: str) -> Sandbox:
    sandbox = Sandbox(SandboxConfig(wall=wall, time_s=TIME_S, memory_mib=512))  # type: ignore[arg-type]
    try:
        assert sandbox.wall == wall
    except SandboxUnavailable as fault:
        pytest.fail(str(fault)) if wall == "bubblewrap" else pytest.skip(str(fault))
    return sandbox


def as_ordinary_user(action: Callable[[], None]) -> None:
    """Does it in a child of this process that is no longer root."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        error = ""
        try:
            os.setgroups([])
            os.setgid(ORDINARY)
            os.setuid(ORDINARY)
            action()
        except BaseException:  # noqa: BLE001 - whatever it is, the parent raises it
            error = traceback.format_exc()
        finally:
            os.write(writer, error.encode()[-60_000:])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        error = file.read()
    os.waitpid(pid, 0)
    assert not error, error


def scratches() -> set[str]:
    return {f.name for f in Path("/tmp").glob("troupe-sandbox-*") if f.stat().st_uid == ORDINARY}


@pytest.mark.parametrize("wall", ["bubblewrap", "landlock"])
def test_a_kept_sandbox_forgets_an_input_before_the_next(wall: str) -> None:
    code = """
import os, subprocess
started = LIFE
def f(how):
    found = sorted(os.listdir("."))
    open("file", "w").close()
    os.makedirs("folder/inner")
    if how == "closed":
        os.mkdir("closed", 0)
    if how == "kills":
        os.kill(os.getppid(), 9)
    if how == "daemon":
        subprocess.Popen(["sleep", "60"], start_new_session=True)
    return [found, started]
"""
    program = Program(
        code=code, fn_name="f", prelude="import os\nLIFE = str(os.stat('/proc/self').st_ino) + str(os.times())"
    )
    with sandbox_of(wall).kept(program) as kept:
        ran = [kept.run([how]) for how in ("", "daemon", "", "closed", "", "kills", "")]
    lives = [run.value and run.value[1] for run in ran]
    assert all(run.value[0] == [] for run in ran if run.has_value), ran
    assert lives[0] == lives[1] == lives[2] == lives[3] and lives[4] != lives[0], (
        "a folder that cannot be removed costs a new sandbox"
    )
    assert ran[5].status == ("ended" if wall == "bubblewrap" else "error") and ran[6].has_value


def test_a_kept_sandbox_that_was_lost_is_started_anew() -> None:
    """A runner is the first process of its namespace and gets only the signal that Python handles: SIGINT."""
    code = "import os\ndef f(how): return os.kill(os.getppid(), how) or how"
    with sandbox_of("bubblewrap").kept(Program(code=code, fn_name="f")) as kept:
        ran = [kept.run([how]) for how in (0, signal.SIGINT, 0)]
    assert [run.status for run in ran] == ["ended", "lost", "ended"], ran


def test_annotations_of_a_program_are_read_as_python_reads_them(sandbox: Sandbox) -> None:
    code = "def f(items: List[int]): return sum(items)\nprint(f([1, 2]))"
    without, with_import = (
        sandbox.run(Program(code=begin + code), [""])[0] for begin in ("", "from typing import List\n")
    )
    assert without.status == "error" and "NameError: name 'List' is not defined" in without.stderr
    assert (with_import.status, with_import.stdout) == ("ended", "3\n")


def test_a_name_that_programs_are_given_is_not_taken_for_their_function(sandbox: Sandbox) -> None:
    own = "class Solution:\n    def merge(self, items: List[int]) -> List[int]:\n        return nlargest(2, items)"
    (merged,) = sandbox.run(Program(code=own, fn_name="merge"), [[[1, 3, 2]]])
    assert merged.value == [3, 2], merged
    (nothing,) = sandbox.run(Program(code="pass", fn_name="gcd"), [[12, 18]])
    assert nothing.status == "error" and "defines neither gcd nor Solution.gcd" in nothing.stderr
    (imported,) = sandbox.run(Program(code="from math import gcd", fn_name="gcd"), [[12, 18]])
    assert imported.value == 6


def test_folders_that_programs_may_read_are_named_outside_of_their_own() -> None:
    for folder in ("relative", "/tmp/x"):
        with pytest.raises(ValueError, match=f"'{folder}' is not an absolute path outside of /tmp"):
            SandboxConfig(readable=(folder,))
    with (
        pytest.raises(SandboxUnavailable, match="its prelude: ModuleNotFoundError: No module named 'nothing'"),
        sandbox_of("bubblewrap").kept(Program(code="", fn_name="f", prelude="import nothing")) as kept,
    ):
        kept.run([])


def test_a_process_whose_name_is_no_text_is_found_and_killed_below_its_supervisor() -> None:
    named = "import time\nopen('/proc/self/comm', 'wb').write(bytes([0xff, 0xd0]))\nprint(flush=True)\ntime.sleep(60)"
    outer = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {named!r}])\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None and supervisor.stdout.readline()
        assert _memory_of(supervisor.pid) > 0
        _kill_below(supervisor.pid)
        assert not _below(supervisor.pid)
        supervisor.kill()

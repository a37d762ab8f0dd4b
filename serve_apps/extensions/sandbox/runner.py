"""runner: the part of the sandbox that is inside it. Runs one program on many inputs, each in a child of its own.

    stdin   {"code", "fn_name", limits}   {"input"}   {"input", "names"} ...      one JSON line each
    stdout  {"ready": true}               {case}      {case}    ...
    begun                                 a byte      a byte    ...      from the child, just before the program runs

It knows inputs, never expected outputs: those are compared outside. Whatever a program does to this process costs only its
own remaining cases. Where there is no pid namespace to end what a dead runner leaves behind, the process that was started
stays as its supervisor and ends it. It runs as a script with the standard library alone; Troupe cannot be imported here.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import fcntl
import io
import json
import os
import resource
import select
import signal
import site
import struct
import sys
import time
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_CHUNK = 1 << 16
_ERROR, _COMPILE_ERROR = 1, 120
_STACK_BYTES = 110 << 20
"""Stack for 20,000 nested calls through C; the kernel keeps 128 MiB free below the stack of a process."""
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
_PRELUDE = (
    "from typing import *\nfrom collections import *\nfrom itertools import *\nfrom functools import *\nfrom math import *\n"
    "from heapq import *\nfrom bisect import *\nfrom string import *\nfrom operator import *\n"
    "from builtins import *\n"  # math and operator have a `pow` of their own, of two arguments
    "import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys\n"
)
"""The names that a program of a function-call task may use without an import (LeetCode's convention)."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Reads the program, then cases, until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    _prctl(_PR_SET_DUMPABLE, 0)  # no child looks into this process
    _prepare_the_interpreter()
    header = json.loads(requests.readline())
    if header["supervised"]:
        _leave_a_supervisor()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a case leaves behind becomes a child of this process, and is ended
    prelude: dict[str, Any] = {}
    if header["fn_name"]:
        exec(_PRELUDE, prelude)  # before the fork, so that every case has it at once
        import inspect  # noqa: F401 - likewise
    try:
        exec(compile(header["prelude"], "prelude.py", "exec", dont_inherit=True), prelude)
    except ImportError as fault:
        print(json.dumps({"fault": f"its prelude: {type(fault).__name__}: {fault}"}), file=replies, flush=True)
        return
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in requests:
        try:
            case = _run_case(header, json.loads(line), prelude)
        except OSError as fault:
            print(json.dumps({"stderr": f"the runner: {fault}"}), file=replies, flush=True)
            return
        print(json.dumps(case), file=replies, flush=True)
        if header["is_kept"]:
            _clear(header["scratch"])


def _clear(folder: str) -> None:
    """Removes all that is in a folder. What it raises ends this process: the next input gets another sandbox."""
    import shutil

    for entry in os.scandir(folder):
        shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


def _prepare_the_interpreter() -> None:
    """Adds what a program expects that runs as a script: the names that `site` gives, and integers of any length, on
    which the limit is the program's time."""
    site.setquit()
    site.setcopyright()
    site.sethelper()
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)


def _leave_a_supervisor() -> None:
    """Continues in a child; this process waits until the child has ended, and ends all its descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    runner = os.fork()
    if runner:
        _close_from(0)
        os.waitid(os.P_PID, runner, os.WEXITED | os.WNOWAIT)
        _end_all(runner)
        os._exit(0)


def _run_case(header: dict[str, Any], request: dict[str, Any], prelude: dict[str, Any]) -> dict[str, Any]:
    stdin, outputs = os.pipe(), [os.pipe() for _ in range(3)]
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become_the_program(header, request, prelude, (stdin[0], *(writer for _, writer in outputs), header["begun"]))
    for number in (stdin[0], *(writer for _, writer in outputs)):
        os.close(number)
    text = b"" if header["fn_name"] else str(request["input"]).encode(errors="surrogatepass")
    readers = [reader for reader, _ in outputs]
    outputs_read, why = _exchange(pid, stdin[1], text, readers, header["time_s"], header["output_bytes"])
    seconds = time.monotonic() - began
    status, used = _end_all(pid)
    for index, reader in enumerate(readers):
        while sum(map(len, outputs_read)) <= header["output_bytes"] and (data := _read(reader)):
            outputs_read[index] += data
        os.close(reader)
    code = os.waitstatus_to_exitcode(status)
    why = why or {-signal.SIGXCPU: "time", -signal.SIGXFSZ: "output", _COMPILE_ERROR: "compile"}.get(code, "")
    return {
        "exit_code": code,
        "why": why,
        "stdout": outputs_read[0].decode(errors="replace"),
        "stderr": outputs_read[1][-4000:].decode(errors="replace"),
        "value": outputs_read[2].decode(errors="replace"),
        "seconds": seconds,
        "cpu_s": used.ru_utime + used.ru_stime,
        "max_rss_mib": used.ru_maxrss / 1024,
    }


def _exchange(
    pid: int, stdin: int, text: bytes, readers: Sequence[int], time_s: float, output_bytes: int
) -> tuple[list[bytearray], str]:
    """Writes the input and reads the outputs until the child ends, writes too much, or its time is over."""
    outputs = [bytearray() for _ in readers]
    child = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(child, select.POLLIN)
    poll.register(stdin, select.POLLOUT)
    for number in (stdin, *readers):
        os.set_blocking(number, False)
    for number in readers:
        poll.register(number, select.POLLIN)
    deadline, why, is_running, is_fed = time.monotonic() + time_s, "", True, False
    while is_running and not why:
        left = deadline - time.monotonic()
        if left <= 0:
            why = "time"
        for number, _ in poll.poll(max(left, 0) * 1000):
            if number == child:
                is_running = False
            elif number == stdin:
                text = _write(stdin, text)
                if not text:
                    poll.unregister(stdin)
                    os.close(stdin)
                    is_fed = True
            else:
                data = _read(number)
                if data:
                    outputs[readers.index(number)] += data
                elif data is not None:
                    poll.unregister(number)
                if sum(map(len, outputs)) > output_bytes:
                    why = "output"
    os.close(child)
    if not is_fed:
        os.close(stdin)
    return outputs, why


def _write(number: int, text: bytes) -> bytes:
    """Writes, and returns the rest; nothing where the reader has gone."""
    try:
        return text[os.write(number, text[:_CHUNK]) :]
    except BlockingIOError:
        return text
    except BrokenPipeError:
        return b""


def _read(number: int) -> bytes | None:
    """Returns the bytes that are there; empty at the end, None where there are none yet."""
    try:
        return os.read(number, _CHUNK)
    except BlockingIOError:
        return None


def _close_from(number: int) -> None:
    os.closerange(number, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _end_all(pid: int) -> tuple[int, Any]:
    """Kills every descendant until none is left, daemons included; returns the case's exit status and resource usage."""
    ended = None
    while True:
        for descendant in _descendants(os.getpid()):
            try:
                os.kill(descendant, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            child, status, used = os.wait4(-1, 0)
        except ChildProcessError:
            break
        if child == pid:
            ended = status, used
    assert ended is not None, "the case was a child of this process"
    return ended


def _descendants(pid: int) -> list[int]:
    descendants = []
    for task in _listed(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children = [int(child) for child in file.read().split()]
        except OSError:
            continue
        for child in children:
            descendants += [child, *_descendants(child)]
    return descendants


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _become_the_program(
    header: dict[str, Any], request: dict[str, Any], prelude: dict[str, Any], pipes: tuple[int, ...]
) -> None:
    """Runs the program in the child, behind standard streams and limits of its own. Never returns."""
    code, module = _ERROR, ModuleType("solution" if header["fn_name"] else "__main__")
    try:
        os.setsid()
        for stream, number in enumerate([fcntl.fcntl(number, fcntl.F_DUPFD, 64) for number in pipes]):
            os.dup2(number, stream)
        _close_from(len(pipes))
        begun = len(pipes) - 1
        os.chdir(header["scratch"])
        _open_the_streams()
        sys.argv = ["program.py"]
        _limit(header)
        os.write(begun, b".")
        os.close(begun)
        atexit._clear()
        code = _execute(header, request, prelude, module)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - whatever a program raises is its exit code
        frames = error.__traceback__.tb_next.tb_next if error.__traceback__ and error.__traceback__.tb_next else None
        traceback.print_exception(type(error), error, frames, limit=-8)
    finally:
        try:
            asked = _end(module.__dict__)
            code = code or asked
        finally:
            os._exit(code & 0xFF)


def _open_the_streams() -> None:
    """Opens the standard streams under both of their names, as the interpreter does: closing one leaves its descriptor open."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        mode = "w" if number else "r"
        raw = io.FileIO(number, mode, closefd=False)
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw) if number else io.BufferedReader(raw),  # type: ignore[arg-type]
            encoding="utf-8",
            errors="replace",
        )
        stream.mode = mode  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _end(scope: dict[str, Any]) -> int:
    """Does what the interpreter does at its end: waits for threads, calls what `atexit` knows, writes what buffers hold.

    Returns the exit code that it asks for, 0 where it succeeds.
    """
    code = 0
    try:
        threading = sys.modules.get("threading")
        if threading is not None:
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - these are the program's
        code = _ERROR
    if not all([_is_written(stream) for stream in (sys.stdout, sys.stderr) if stream is not None]):
        code = _ERROR
    for held in (sys.__stdout__, sys.__stderr__, *scope.values()):
        if issubclass(type(held), io.IOBase):
            _is_written(held)  # the interpreter, too, ends as it would without a file that it cannot write
    return code


def _is_written(stream: Any) -> bool:
    """Writes what the buffers of an open stream hold; returns whether that succeeded."""
    try:
        if not getattr(stream, "closed", False):
            stream.flush()
    except BaseException:  # noqa: BLE001 - a program may have put anything in place of its streams
        return False
    return True


def _limit(header: dict[str, Any]) -> None:
    for what, limit in (
        (resource.RLIMIT_CPU, int(header["time_s"]) + 1),
        (resource.RLIMIT_AS, header["memory_bytes"]),
        (resource.RLIMIT_STACK, min(_STACK_BYTES, header["memory_bytes"] // 2)),
        (resource.RLIMIT_FSIZE, header["file_bytes"]),
        (resource.RLIMIT_NOFILE, header["open_files"]),
        (resource.RLIMIT_NPROC, header["processes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_SIGPENDING, 256),
    ):
        highest = resource.getrlimit(what)[1]
        value = limit if highest == resource.RLIM_INFINITY else min(limit, highest)
        resource.setrlimit(what, (value, value))
    sys.setrecursionlimit(600_000)
    if header["landlock"]:
        _confine(header["readable"], header["scratch"], bytes.fromhex(header["seccomp"]))


def _execute(header: dict[str, Any], request: dict[str, Any], prelude: dict[str, Any], module: ModuleType) -> int:
    try:
        # Otherwise this file's `annotations` would hold for the program: names in its annotations would not be looked up.
        program = compile(header["code"].removeprefix("\ufeff"), "program.py", "exec", dont_inherit=True)
    except BaseException:  # noqa: BLE001 - SyntaxError, ValueError, RecursionError, MemoryError, SystemError ...
        traceback.print_exc(limit=0)
        return _COMPILE_ERROR
    sys.modules[module.__name__] = module
    scope = module.__dict__
    if prelude:
        # Behind the program's own names: `merge` is then its own, or that of its Solution, and never heapq's.
        scope["__builtins__"] = {**vars(builtins), **prelude}
    exec(program, scope)
    if header["fn_name"]:
        function = _function(scope, header["fn_name"])
        positional, named = _arguments(function, request["input"], request.get("names", ()), header["min_arguments"])
        returned = function(*positional, **named)
        if returned is None and header["is_in_place"]:
            returned = next(iter((*positional, *named.values())), None)
        answer = json.dumps(_plain(returned))
        with os.fdopen(3, "w") as value:
            value.write(answer)
    return 0


def _function(scope: dict[str, Any], name: str) -> Any:
    solution = scope.get("Solution")
    if name in scope:
        return scope[name]
    if isinstance(solution, type) and hasattr(solution, name):
        return getattr(solution(), name)
    raise NameError(f"the program defines neither {name} nor Solution.{name}")


def _arguments(
    function: Any, arguments: list[Any], names: Sequence[str], at_least: int
) -> tuple[list[Any], dict[str, Any]]:
    """Returns the positional and the named arguments of a call.

    Arguments with names go to parameters of these names, and by place to a function that has others. A single list is spread
    over several parameters, and a single object over parameters of its names, or over as many of other names. Arguments after
    the first `at_least` are passed only where the function takes them.
    """
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return arguments, {}
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p.name for p in by_place if p.default is p.empty]
    takes = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if names and set(needed) <= set(names) <= takes:
        return [], dict(zip(names, arguments, strict=True))
    single = arguments[0] if len(arguments) == 1 else None
    if isinstance(single, list) and len(needed) > 1:
        return single, {}
    if isinstance(single, dict) and single:
        if set(needed) <= single.keys() <= {p.name for p in parameters}:
            return [], single
        if len(single) == len(needed) > 1:
            return list(single.values()), {}
    if at_least and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return arguments[: max(at_least, len(needed))], {}
    return arguments, {}


def _plain(answer: Any) -> Any:
    """Turns sets into sorted lists, because JSON has no sets."""
    if isinstance(answer, (list, tuple)):
        return [_plain(item) for item in answer]
    if isinstance(answer, (set, frozenset)):
        items = [_plain(item) for item in answer]
        try:
            return sorted(items)
        except TypeError:  # of several types
            return sorted(items, key=repr)
    if isinstance(answer, dict):
        return {key: _plain(item) for key, item in answer.items()}
    return answer


def _prctl(option: int, value: int, pointer: Any = 0) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


class _RulesetAttr(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read file, read directory
_ALL = (1 << 16) - 1
"""All rights to files of version 5 (linux/landlock.h)."""
_LEAST_VERSION = 6
"""The first version that confines signals."""


def landlock_version() -> int:
    """Returns the version of the kernel's Landlock interface; 0 where it has none."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, 0, 1))


def check_landlock(version: int) -> None:
    """Raises OSError where the kernel's Landlock is too old to be a wall."""
    if version < _LEAST_VERSION:
        raise OSError(
            f"Landlock {version} of this kernel lets signals out: version {_LEAST_VERSION} is needed (Linux 6.12)"
        )


def _confine(readable: Sequence[str], scratch: str, seccomp: bytes) -> None:
    """Confines this process and its children: they read `readable`, write `scratch`, and reach no network and no
    process outside."""
    check_landlock(landlock_version())
    attr = _RulesetAttr(_ALL, 3, 3)
    ruleset = _libc.syscall(_CREATE_RULESET, ctypes.byref(attr), ctypes.sizeof(attr), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    for path, access in (*((p, _READ) for p in readable), (scratch, _ALL), ("/dev/null", 1 << 1 | 1 << 2)):
        number = os.open(path, os.O_PATH)
        rule = _PathBeneath(access, number)
        if _libc.syscall(_ADD_RULE, ruleset, 1, ctypes.byref(rule), 0) != 0:
            raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
        os.close(number)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if _libc.syscall(_RESTRICT_SELF, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)
    filters = ctypes.create_string_buffer(seccomp, len(seccomp))
    program = struct.pack("HxxxxxxP", len(seccomp) // 8, ctypes.addressof(filters))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.create_string_buffer(program, len(program)))


if __name__ == "__main__":
    main()

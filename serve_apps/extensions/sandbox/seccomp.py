"""seccomp: the system calls that a sandboxed program may not make -> a BPF program, as bubblewrap and prctl take it.

Every call that a judged program needs is allowed. The calls below are refused with an error number, not with a kill, so that
a program that probes for a feature goes on without it: namespaces, mounts and keys; sockets of every family, except connected
pairs; other processes' memory, limits and priority; kernel objects that no limit counts or that outlive a program; modes,
owners, times and attributes of files, which Landlock does not restrict, and `flock`.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Sequence

_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _AND, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24
"""Offsets in `struct seccomp_data`; the low half of an argument comes first on little-endian machines."""

_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME."""
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPES = 1, 1, 0xF
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_X32 = 0x40000000

_APART = "clone 56 220, clone3 435 435, socket 41 198, socketpair 53 199, prlimit64 302 261, ioctl 16 29, flock 73 32"
"""Told apart by their arguments, or refused in a way of their own: system calls with their numbers on x86-64 and on aarch64
(asm/unistd.h)."""
_REFUSED = {
    "namespaces, mounts, quotas": (
        "unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, "
        "open_tree 428 428, open_tree_attr 467 467, move_mount 429 429, mount_setattr 442 442, fsopen 430 430, "
        "fsconfig 431 431, fsmount 432 432, fspick 433 433, quotactl 179 60, quotactl_fd 443 443"
    ),
    "sockets": "bind 49 200, connect 42 203, setsockopt 54 208",
    "other processes": (
        "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, "
        "process_mrelease 448 448, pidfd_getfd 438 438, kcmp 312 272, migrate_pages 256 238, move_pages 279 239, "
        "setpriority 141 140, ioprio_set 251 30, sched_setparam 142 118, sched_setscheduler 144 119, "
        "sched_setattr 314 274, sched_setaffinity 203 122"
    ),
    "objects that no limit counts, or that outlive a program": (
        "add_key 248 217, request_key 249 218, keyctl 250 219, shmget 29 194, shmat 30 196, shmctl 31 195, "
        "semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192, msgget 68 186, msgsnd 69 189, "
        "msgrcv 70 188, msgctl 71 187, mq_open 240 180, mq_unlink 241 181, memfd_create 319 279, "
        "memfd_secret 447 447, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, "
        "inotify_add_watch 254 27, fanotify_init 300 262, userfaultfd 323 282, perf_event_open 298 241, "
        "bpf 321 280"
    ),
    "files": (
        "chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -, "
        "fchownat 260 54, mknod 133 -, mknodat 259 33, utime 132 -, utimes 235 -, futimesat 261 -, "
        "utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, setxattrat 463 463, "
        "removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, removexattrat 466 466, "
        "file_setattr 469 469, name_to_handle_at 303 264, open_by_handle_at 304 265, lookup_dcookie 212 18"
    ),
    "the machine": (
        "reboot 169 142, kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273, "
        "delete_module 176 106, acct 163 89, syslog 103 116, vhangup 153 58, personality 135 92, modify_ldt 154 -, "
        "iopl 172 -, ioperm 173 -, swapon 167 224, swapoff 168 225, sethostname 170 161, setdomainname 171 162, "
        "settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171"
    ),
}
"""The same, by what they are about; -: there is none."""
_MACHINES = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}
"""AUDIT_ARCH (linux/audit.h), and the column of the numbers."""


def seccomp_program(machine: str = "") -> bytes | None:
    """Returns the filter as an array of `struct sock_filter`; None on a machine whose numbers are not known here."""
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    arch, column = known
    numbers = _numbers(_APART, column)
    program = [
        (_LOAD, 0, 0, _ARCH),
        *_unless(_JUMP_EQ, arch, [(_RETURN, 0, 0, _KILL)]),
        (_LOAD, 0, 0, _NUMBER),
        *_if(_JUMP_GE, _X32, [(_RETURN, 0, 0, _KILL)]),
        *_if(_JUMP_EQ, numbers["clone3"], [_refuse(_ENOSYS)]),  # its flags lie in memory: glibc falls back to clone
        *_if(
            _JUMP_EQ,
            numbers["clone"],
            [(_LOAD, 0, 0, _ARG0), *_if(_JUMP_SET, _NEW_NAMESPACES, [_refuse(_EPERM)]), (_RETURN, 0, 0, _ALLOW)],
        ),
        *_if(_JUMP_EQ, numbers["socket"], [_refuse(_EAFNOSUPPORT)]),
        *_if(
            _JUMP_EQ,
            numbers["socketpair"],
            [
                (_LOAD, 0, 0, _ARG0),
                *_unless(_JUMP_EQ, _AF_UNIX, [_refuse(_EAFNOSUPPORT)]),
                (_LOAD, 0, 0, _ARG1),
                (_AND, 0, 0, _SOCK_TYPES),
                *_unless(_JUMP_EQ, _SOCK_STREAM, [_refuse(_EAFNOSUPPORT)]),  # a datagram can be sent to any address
                (_RETURN, 0, 0, _ALLOW),
            ],
        ),
        *_if(
            _JUMP_EQ,
            numbers["prlimit64"],
            [(_LOAD, 0, 0, _ARG0), *_unless(_JUMP_EQ, 0, [_refuse(_EPERM)]), (_RETURN, 0, 0, _ALLOW)],
        ),
        *_if(
            _JUMP_EQ,
            numbers["ioctl"],
            [
                (_LOAD, 0, 0, _ARG1),
                *_if(_JUMP_EQ, _TIOCSTI, [_refuse(_EPERM)]),
                *_if(_JUMP_EQ, _TIOCLINUX, [_refuse(_EPERM)]),
                (_RETURN, 0, 0, _ALLOW),
            ],
        ),
    ]
    # Whoever may read a file could hold up those who lock it outside. Libraries that are told ENOSYS take another lock.
    program += _if(_JUMP_EQ, numbers["flock"], [_refuse(_ENOSYS)])
    for number in _numbers(", ".join(_REFUSED.values()), column).values():
        program += _if(_JUMP_EQ, number, [_refuse(_EPERM)])
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _numbers(calls: str, column: int) -> dict[str, int]:
    rows = [call.split() for call in calls.split(", ")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


Instruction = tuple[int, int, int, int]


def _refuse(errno: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | errno)


def _if(jump: int, value: int, then: Sequence[Instruction]) -> list[Instruction]:
    return [(jump, 0, len(then), value), *then]


def _unless(jump: int, value: int, then: Sequence[Instruction]) -> list[Instruction]:
    return [(jump, len(then), 0, value), *then]

"""seccomp: the system calls that a sandboxed program may not make -> a BPF program, as bubblewrap and prctl take it.

Every call that a judged program needs is allowed. The calls below are refused with an error number, not with a kill, so that
a program that probes for a feature goes on without it: namespaces, mounts and keys; sockets of every family, except connected
pairs; other processes' memory, limits and priority; kernel objects that no limit counts or that outlive a program; modes,
owners, times and attributes of files, which Landlock does not restrict.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Mapping, Sequence

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

_SINCE_5_1 = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "clone3": 435,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
    "process_mrelease": 448,
    "fchmodat2": 452,
    "setxattrat": 463,
    "removexattrat": 466,
    "open_tree_attr": 467,
    "file_setattr": 469,
}
"""The same numbers on every architecture."""

_X86_64 = {
    **_SINCE_5_1,
    "ioctl": 16,
    "shmget": 29,
    "shmat": 30,
    "shmctl": 31,
    "socket": 41,
    "connect": 42,
    "bind": 49,
    "socketpair": 53,
    "clone": 56,
    "semget": 64,
    "semop": 65,
    "semctl": 66,
    "msgget": 68,
    "msgsnd": 69,
    "msgrcv": 70,
    "msgctl": 71,
    "chmod": 90,
    "fchmod": 91,
    "chown": 92,
    "fchown": 93,
    "lchown": 94,
    "ptrace": 101,
    "syslog": 103,
    "utime": 132,
    "mknod": 133,
    "personality": 135,
    "setpriority": 141,
    "sched_setparam": 142,
    "sched_setscheduler": 144,
    "vhangup": 153,
    "modify_ldt": 154,
    "pivot_root": 155,
    "adjtimex": 159,
    "chroot": 161,
    "acct": 163,
    "settimeofday": 164,
    "mount": 165,
    "umount2": 166,
    "swapon": 167,
    "swapoff": 168,
    "reboot": 169,
    "sethostname": 170,
    "setdomainname": 171,
    "iopl": 172,
    "ioperm": 173,
    "init_module": 175,
    "delete_module": 176,
    "quotactl": 179,
    "setxattr": 188,
    "lsetxattr": 189,
    "fsetxattr": 190,
    "removexattr": 197,
    "lremovexattr": 198,
    "fremovexattr": 199,
    "sched_setaffinity": 203,
    "lookup_dcookie": 212,
    "semtimedop": 220,
    "clock_settime": 227,
    "utimes": 235,
    "mq_open": 240,
    "mq_unlink": 241,
    "kexec_load": 246,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "ioprio_set": 251,
    "inotify_add_watch": 254,
    "migrate_pages": 256,
    "mknodat": 259,
    "fchownat": 260,
    "futimesat": 261,
    "fchmodat": 268,
    "unshare": 272,
    "move_pages": 279,
    "utimensat": 280,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "prlimit64": 302,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "clock_adjtime": 305,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "finit_module": 313,
    "sched_setattr": 314,
    "memfd_create": 319,
    "kexec_file_load": 320,
    "bpf": 321,
    "userfaultfd": 323,
}
_AARCH64 = {
    **_SINCE_5_1,
    "setxattr": 5,
    "lsetxattr": 6,
    "fsetxattr": 7,
    "removexattr": 14,
    "lremovexattr": 15,
    "fremovexattr": 16,
    "lookup_dcookie": 18,
    "inotify_add_watch": 27,
    "ioctl": 29,
    "ioprio_set": 30,
    "mknodat": 33,
    "umount2": 39,
    "mount": 40,
    "pivot_root": 41,
    "chroot": 51,
    "fchmod": 52,
    "fchmodat": 53,
    "fchownat": 54,
    "fchown": 55,
    "vhangup": 58,
    "quotactl": 60,
    "utimensat": 88,
    "acct": 89,
    "personality": 92,
    "unshare": 97,
    "kexec_load": 104,
    "init_module": 105,
    "delete_module": 106,
    "clock_settime": 112,
    "syslog": 116,
    "ptrace": 117,
    "sched_setparam": 118,
    "sched_setscheduler": 119,
    "sched_setaffinity": 122,
    "setpriority": 140,
    "reboot": 142,
    "sethostname": 161,
    "setdomainname": 162,
    "settimeofday": 170,
    "adjtimex": 171,
    "mq_open": 180,
    "mq_unlink": 181,
    "msgget": 186,
    "msgctl": 187,
    "msgrcv": 188,
    "msgsnd": 189,
    "semget": 190,
    "semctl": 191,
    "semtimedop": 192,
    "semop": 193,
    "shmget": 194,
    "shmctl": 195,
    "shmat": 196,
    "socket": 198,
    "socketpair": 199,
    "bind": 200,
    "connect": 203,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "clone": 220,
    "swapon": 224,
    "swapoff": 225,
    "migrate_pages": 238,
    "move_pages": 239,
    "perf_event_open": 241,
    "prlimit64": 261,
    "fanotify_init": 262,
    "name_to_handle_at": 264,
    "open_by_handle_at": 265,
    "clock_adjtime": 266,
    "setns": 268,
    "process_vm_readv": 270,
    "process_vm_writev": 271,
    "kcmp": 272,
    "finit_module": 273,
    "sched_setattr": 274,
    "memfd_create": 279,
    "bpf": 280,
    "userfaultfd": 282,
    "kexec_file_load": 294,
}
_MACHINES: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "x86_64": (0xC000003E, _X86_64),
    "aarch64": (0xC00000B7, _AARCH64),
}
"""AUDIT_ARCH and system call numbers (linux/audit.h, asm/unistd.h)."""
_APART = ("clone", "clone3", "socket", "socketpair", "prlimit64", "ioctl")


def seccomp_program(machine: str = "") -> bytes | None:
    """Returns the filter as an array of `struct sock_filter`; None on a machine whose numbers are not known here."""
    machine_numbers = _MACHINES.get(machine or platform.machine())
    if machine_numbers is None:
        return None
    arch, numbers = machine_numbers
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
    for name, number in numbers.items():
        if name not in _APART:
            program += _if(_JUMP_EQ, number, [_refuse(_EPERM)])
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


Instruction = tuple[int, int, int, int]


def _refuse(errno: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | errno)


def _if(jump: int, value: int, then: Sequence[Instruction]) -> list[Instruction]:
    return [(jump, 0, len(then), value), *then]


def _unless(jump: int, value: int, then: Sequence[Instruction]) -> list[Instruction]:
    return [(jump, len(then), 0, value), *then]

"""A filter of system calls, as the kernel's classic BPF: what a sandboxed program has no business with is refused.

Refused are ways out (namespaces, mounts, other processes' memory, keyrings, typing into a terminal, sockets that no
network namespace bounds), memory that no limit of ours counts (anonymous files, System V's, queues of file events,
larger buffers of pipes), and reaching for the limits and priorities of the process that enforces them. A larger buffer
of a socket is asked for in vain, as where the kernel's own limit is low. All else is allowed, so that ordinary programs
run. Programs of agents may also watch files, whose queues the kernel bounds by user, and list network interfaces.
"""

import platform
import struct

from agentrl.errors import UserError

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _MACHINE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 24, 32
"""Offsets in struct seccomp_data, of the low word."""
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW*: mount, cgroup, uts, ipc, user, pid, net, time
_SET_PIPE_SIZE, _SOCKET_LEVEL = 1031, 1
_TYPES_FOR_US = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: what they write into a terminal, its user seems to have typed
_BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and both FORCE
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: those that a network namespace bounds
_NETLINK = 16  # whose protocol 0 lists interfaces and routes

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of the numbers below, and AUDIT_ARCH_*."""

_REFUSED = {
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268),
    "unshare": (272, 97), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "quotactl": (179, 60), "acct": (163, 89),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "kcmp": (312, 272), "process_madvise": (440, 440),
    "inotify_init1": (294, 26), "vmsplice": (278, 75),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "syslog": (103, 116), "personality": (135, 92), "sethostname": (170, 161), "setdomainname": (171, 162),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
}  # fmt: skip
_WATCH = "inotify_init1"
_X86_ONLY = {"inotify_init": 253, "iopl": 172, "ioperm": 173, "modify_ldt": 154}
_ON_ITSELF = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
              "sched_setparam": (142, 118), "sched_setattr": (314, 274)}  # fmt: skip
"""Allowed for the calling process alone, which is process 0."""
_CLONE, _CLONE3, _SOCKET, _SETPRIORITY = (56, 220), (435, 435), (41, 198), (141, 140)
_FCNTL, _SETSOCKOPT, _IOCTL = (72, 25), (54, 208), (16, 29)

Step = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def filter_program(machine: str | None = None, *, watching: bool = False) -> bytes:
    """The filter as bubblewrap's `--seccomp` reads it. watching: allow to watch files and list interfaces.
    Raises UserError on a machine whose numbers are not known."""
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise UserError(
            f"the sandbox has no filter of system calls for {machine}; it has one for {', '.join(_MACHINES)}"
        )
    column, code = _MACHINES[machine]
    refuse = _return(_ERRNO | _EPERM)
    steps = [_load(_MACHINE), (_EQUAL, 1, 0, code), refuse, _load(_NUMBER)]
    refused = [numbers[column] for name, numbers in _REFUSED.items() if not (watching and name == _WATCH)]
    if column == 0:
        steps += [(_AT_LEAST, 0, 1, _X32), refuse]
        refused += [number for name, number in _X86_ONLY.items() if not (watching and name == _WATCH[:-1])]
    for number in refused:
        steps += [(_EQUAL, 0, 1, number), refuse]
    steps += [(_EQUAL, 0, 1, _CLONE3[column]), _return(_ERRNO | _ENOSYS)]  # the C library falls back to clone
    steps += _where(_CLONE[column], [(_ANY_BIT, 0, 1, _NEW_NAMESPACES), refuse])
    others: list[Step] = [_return(_ERRNO | _EAFNOSUPPORT)]
    if watching:
        others = [(_EQUAL, 0, 2, _NETLINK), _load(_THIRD_ARGUMENT), (_EQUAL, 1, 0, 0), *others]
    families: list[Step] = [
        (_EQUAL, len(_FAMILIES) - 1 - n + len(others), 0, family) for n, family in enumerate(_FAMILIES)
    ]
    steps += _where(_SOCKET[column], [*families, *others])
    own = [(_EQUAL, 0, 2, 0), _load(_SECOND_ARGUMENT), (_EQUAL, 1, 0, 0), refuse]  # PRIO_PROCESS, and nobody else's
    steps += _where(_SETPRIORITY[column], own)
    steps += _where(_FCNTL[column], [_load(_SECOND_ARGUMENT), (_EQUAL, 0, 1, _SET_PIPE_SIZE), refuse])
    typed: list[Step] = [(_EQUAL, len(_TYPES_FOR_US) - n, 0, request) for n, request in enumerate(_TYPES_FOR_US)]
    steps += _where(_IOCTL[column], [_load(_SECOND_ARGUMENT), *typed, _return(_ALLOW), refuse])
    sizes: list[Step] = [(_EQUAL, len(_BUFFER_SIZES) - n, 0, size) for n, size in enumerate(_BUFFER_SIZES)]
    ignored = [_load(_SECOND_ARGUMENT), (_EQUAL, 0, len(sizes) + 3, _SOCKET_LEVEL), _load(_THIRD_ARGUMENT), *sizes]
    steps += _where(_SETSOCKOPT[column], [*ignored, _return(_ALLOW), _return(_ERRNO)])  # as if the kernel had cut it
    for numbers in _ON_ITSELF.values():
        steps += _where(numbers[column], [(_EQUAL, 1, 0, 0), refuse])
    steps.append(_return(_ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _where(number: int, judge: list[Step]) -> list[Step]:
    """Make the steps for the call `number`: `judge` its first argument; what that lets through is allowed."""
    return [(_EQUAL, 0, len(judge) + 2, number), _load(_FIRST_ARGUMENT), *judge, _return(_ALLOW)]


def _load(offset: int) -> Step:
    return (_LOAD, 0, 0, offset)


def _return(value: int) -> Step:
    return (_RETURN, 0, 0, value)

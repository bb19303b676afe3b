"""The system calls that programs in a sandbox do not get: a filter for the kernel, in bytes.

What is denied reaches beyond the sandbox's own namespaces (kernel keys, clocks, modules), is a wide
and often broken door into the kernel (bpf, io_uring, userfaultfd, namespaces, file systems), lets
processes of one user into each other (ptrace), or takes memory that counts for no process
(memfd, System V). See seccomp(2), and linux/filter.h for the form.
"""

import platform
import struct
from collections.abc import Iterator

_EPERM, _EAFNOSUPPORT = 1, 97
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
# Where seccomp_data has the number, the architecture and the first argument (low half).
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
# The x32 calls of x86-64 are the same ones by other numbers.
_X32 = 0x40000000
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10

# By name: the numbers on x86-64 and on arm64; None: there is none (asm/unistd_64.h,
# asm-generic/unistd.h).
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_SOCKET = (41, 198)
# Machine: its AUDIT_ARCH (linux/audit.h), and its column above.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}


def denying_filter(machine: str = "") -> bytes:
    """Return the filter for a machine; empty where its numbers are not known here.

    Sockets are of Unix and of the Internet only, which has no way out of its namespace.

    Args:
        machine: As `platform.machine`; empty: this one.
    """
    known = _MACHINES.get(machine or platform.machine())
    if known is None:
        return b""
    return b"".join(struct.pack("<HBBI", *each) for each in _instructions(*known))


def _instructions(architecture: int, column: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (operation, jump if true, jump if false, operand)."""
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _EQUAL, 1, 0, architecture
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    yield _AT_LEAST, 0, 1, _X32
    yield _RETURN, 0, 0, _FAIL | _EPERM
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            yield _EQUAL, 0, 1, number
            yield _RETURN, 0, 0, _FAIL | _EPERM
    yield _EQUAL, 0, 5, _SOCKET[column]
    yield _LOAD, 0, 0, _ARGUMENT
    for family, to_end in ((_AF_UNIX, 3), (_AF_INET, 2), (_AF_INET6, 1)):
        yield _EQUAL, to_end, 0, family
    yield _RETURN, 0, 0, _FAIL | _EAFNOSUPPORT
    yield _RETURN, 0, 0, _ALLOW

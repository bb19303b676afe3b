"""The supervisor: runs one program within limits, and kills all that comes of it.

A script of its own, of the standard library alone: `python -I -S supervisor.py LIMITS FOLDER
COMMAND...`. The folder gets `stdout` and `stderr`. It ends when the program does, at a limit, or
when its standard input is closed (its owner is gone, or wants it to end), and writes one line of
JSON that says which it was. Where the owner is gone, the folder goes, too.

Where the kernel lets it, the program lives in a PID namespace (when its first process dies, the
kernel kills all others in the same instant, however fast they fork) and in a control group, under
RLIMIT_NPROC or, as root without a control group, under a pid_max of the namespace's own: they bound
how many there are at all. In any case it adopts every orphan
(PR_SET_CHILD_SUBREAPER), runs before all of them, and kills until there is nobody left. Elsewhere
than on Linux it bounds time and files, and kills the program's process group.
"""

import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_IS_LINUX = sys.platform == "linux"
_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
_MS_REC_PRIVATE = 0x4000 | 0x40000
# Between two looks at a program: with a hard bound on its processes, and without one.
_LOOK_S, _LOOK_OFTEN_S = 0.25, 0.02
# For which the kernel is waited for, that lets go of who died.
_LEAVING_S = 1.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_NOT_STARTED = 127
# Linux in which each PID namespace has a pid_max of its own, and the least that it can be.
_OWN_PID_MAX_SINCE, _LEAST_PID_MAX = (6, 14), 301
# Of the hard bound: threads count there, and the first process.
_TASKS_PER_PROCESS, _MORE_TASKS = 16, 64


class ProgramLimits(NamedTuple):
    """What a program may take.

    Attributes:
        time_s: Seconds; None: as long as it likes.
        memory_mb: MiB of private memory: of each process, and resident of all together.
        processes: At once, threads not counted.
        output_mb: MiB of any file that it writes.
    """

    time_s: float | None
    memory_mb: int
    processes: int
    output_mb: int = 64


def main() -> None:
    """Run the program, then say what became of it."""
    limits, folder, owner = ProgramLimits(*json.loads(sys.argv[1])), sys.argv[2], os.getppid()
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, _ignore)
    signal.signal(signal.SIGTERM, _hang_up)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    group = None
    if _IS_LINUX:
        first, group = _started_on_linux(limits, folder, sys.argv[3:])
    elif (first := os.fork()) == 0:
        _exec(limits, folder, sys.argv[3:])
    why, status = _watch(first, limits, wakes, _LOOK_OFTEN_S if group is None else _LOOK_S)
    _kill_all(first)
    if group is not None:
        _remove_group(group)
    # Whoever started it may be gone, and does not remove its temporary folder.
    if os.getppid() != owner:
        import shutil  # noqa: PLC0415 - for this alone

        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps({"why": why, "code": status}).encode() + b"\n")


def _started_on_linux(
    limits: ProgramLimits, folder: str, command: list[str]
) -> tuple[int, Path | None]:
    """Start the program; return its first process, and its control group if it has one."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        runs_first = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, runs_first, os.sched_param(1))
    # A namespace shows none of those; kernels before 5.14 count them there, too.
    others = _own_task_count() if os.geteuid() else 0
    has_namespace = _enter_namespace(libc)
    most_tasks = limits.processes * _TASKS_PER_PROCESS + _MORE_TASKS
    group = _made_group(most_tasks)
    first = os.fork()
    if first == 0:
        if os.geteuid():
            _limit(resource.RLIMIT_NPROC, others + most_tasks)
        if group is not None:
            (group / "cgroup.procs").write_text("0", encoding="ascii")
        elif has_namespace:
            _bound_namespace(most_tasks)
        _be_first(libc, limits, folder, command, has_namespace=has_namespace)
    return first, group


def _enter_namespace(libc: Any) -> bool:
    """Let children live in a PID namespace of their own; False where that is not allowed."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        return libc.unshare(_CLONE_NEWPID) == 0
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWPID):
        return False
    with contextlib.suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    return True


def _made_group(task_count: int) -> Path | None:
    """Make a control group that has room for so many tasks; None where that is not allowed."""
    known = Path("/proc/self/cgroup")
    # A kernel may have been built without them.
    for line in known.read_text(encoding="ascii").splitlines() if known.exists() else ():
        _, kinds, place = line.split(":", 2)
        if kinds not in ("pids", ""):
            continue
        group = Path(f"/sys/fs/cgroup/{kinds}{place}/astraflow-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / "pids.max").write_text(str(task_count), encoding="ascii")
        except OSError:
            group.rmdir()
            continue
        return group
    return None


def _remove_group(group: Path) -> None:
    """Remove a control group: the kernel holds it until the last that died is out of it."""
    deadline = time.monotonic() + _LEAVING_S
    while time.monotonic() < deadline:
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.002)
        else:
            return


def _bound_namespace(task_count: int) -> None:
    """Let this process's PID namespace have so many tasks, where the kernel can do that."""
    numbers = re.findall(r"\d+", os.uname().release)[:2]
    if tuple(map(int, numbers)) >= _OWN_PID_MAX_SINCE:
        with contextlib.suppress(OSError):
            most = max(task_count, _LEAST_PID_MAX)
            Path("/proc/sys/kernel/pid_max").write_text(str(most), encoding="ascii")


def _ignore(*_: object) -> None:
    """Do nothing; the signal has woken the watch."""


def _hang_up(*_: object) -> None:
    """End as if the owner were gone."""
    os.close(0)


def _be_first(
    libc: Any, limits: ProgramLimits, folder: str, command: list[str], *, has_namespace: bool
) -> None:
    """Be the first process: start the program, bury whoever dies, end with the program's code."""
    signal.set_wakeup_fd(-1)
    os.setsid()
    outside = _mount_namespace()
    # Where it is taken and nothing comes of it (gVisor), /proc would be another one for everybody.
    if has_namespace and libc.unshare(_CLONE_NEWNS) == 0 and _mount_namespace() != outside:
        libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None)
        libc.mount(b"proc", b"/proc", b"proc", 0, None)
    program = os.fork()
    if program == 0:
        _exec(limits, folder, command)
    while True:
        pid, status = os.wait()
        if pid == program:
            os._exit(_shell_code(status))


def _mount_namespace() -> Path | None:
    """Return what names this process's mount namespace; None where nothing does."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/ns/mnt").readlink()
    return None


def _exec(limits: ProgramLimits, folder: str, command: list[str]) -> None:
    """Become the program."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _limit(resource.RLIMIT_DATA, limits.memory_mb * 2**20)
    _limit(resource.RLIMIT_FSIZE, limits.output_mb * 2**20)
    _limit(resource.RLIMIT_CORE, 0)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, path in ((0, os.devnull), (1, f"{folder}/stdout"), (2, f"{folder}/stderr")):
        opened = os.open(path, flags if number else os.O_RDONLY, 0o600)
        os.dup2(opened, number)
    try:
        os.execvp(command[0], command)  # noqa: S606 - it is what the recipe names
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(_NOT_STARTED)


def _own_task_count() -> int:
    """Return how many threads this user has: a bound of what a user has counts all of them."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # It may end while it is looked at.
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == os.geteuid():
                    count += len(list((entry / "task").iterdir()))
    return count


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (value, value))


def _watch(first: int, limits: ProgramLimits, wakes: int, look_s: float) -> tuple[str, int]:
    """Return why the program ended, and its code; -1: it was killed."""
    deadline = time.monotonic() + limits.time_s if limits.time_s else float("inf")
    while True:
        ended, status = os.waitpid(first, os.WNOHANG)
        if ended:
            return "exited", _shell_code(status)
        if time.monotonic() >= deadline:
            return "time", -1
        pids = list(_below(os.getpid()))
        # The first process is the supervisor's own.
        if len(pids) - 1 > limits.processes:
            return "processes", -1
        if sum(map(_resident_nbytes, pids)) > limits.memory_mb * 2**20:
            return "memory", -1
        try:
            pause_s = min(look_s, max(0.0, deadline - time.monotonic()))
            ready, _, _ = select.select([0, wakes], [], [], pause_s)
        except OSError:
            return "stopped", -1
        if 0 in ready:
            return "stopped", -1
        if wakes in ready:
            os.read(wakes, 4096)


def _kill_all(first: int) -> None:
    """Kill until nobody is left."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(first, signal.SIGKILL)
    if not _IS_LINUX:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(first, signal.SIGKILL)
    while True:
        pids = list(_below(os.getpid()))
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _below(pid: int) -> Iterator[int]:
    """Yield all descendants of a process."""
    children_of = _listed_children
    if _IS_LINUX and not Path(f"/proc/{pid}/task/{pid}/children").exists():
        children_of = _children_by_parent().get
    waiting = [pid]
    while waiting:
        children = children_of(waiting.pop()) or []
        waiting += children
        yield from children


def _listed_children(pid: int) -> list[int]:
    children: list[int] = []
    # Each may end while it is looked at.
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            listing = (task / "children").read_text(encoding="ascii")
            children += map(int, listing.split())
    return children


def _children_by_parent() -> dict[int, list[int]]:
    """Return the children of all processes, for kernels that do not list them (gVisor)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        # Each may end while it is looked at.
        with contextlib.suppress(OSError, IndexError):
            if entry.name.isdigit():
                status = (entry / "stat").read_text(encoding="ascii", errors="replace")
                # The name, which may hold anything, is in brackets.
                parent = int(status.rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    return children


def _resident_nbytes(pid: int) -> int:
    """Return the private resident memory of a process; shared pages count for nobody."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * _PAGE


def _shell_code(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


if __name__ == "__main__":
    main()

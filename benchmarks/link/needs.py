"""What a machine must have for an emulated link."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

UNAVAILABLE_EXIT_CODE: Final = 69
"""EX_UNAVAILABLE of sysexits.h."""

_TUN: Final = Path("/dev/net/tun")
_TRIAL: Final = "aflink-trial-{}"


class LinkUnavailableError(Exception):
    """This machine cannot have an emulated link; the message says what is missing."""


@cache
def has_netem() -> bool:
    """Whether the kernel delays packets itself (root only)."""
    space = _TRIAL.format(os.getpid())
    try:
        ip("netns", "add", space)
        done = subprocess.run(
            ["ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "lo", "root", "netem"],
            capture_output=True,
            check=False,
        )
    finally:
        subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
    return done.returncode == 0


def missing() -> str | None:
    """Return what this machine lacks, None: nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root: run this as root, or with sudo"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are not installed (Debian: apt install iproute2)"
    if _forbidden():
        return "this container may not make network namespaces (it needs CAP_SYS_ADMIN)"
    return None if has_netem() else _missing_for_emulator()


def require_link() -> None:
    """Return when links can be made.

    Raises:
        LinkUnavailableError: Naming what is missing.
    """
    why = missing()
    if why is not None:
        raise LinkUnavailableError(why)


def exit_without_link() -> None:
    """Leave the process with code 69 and a message when there can be no link."""
    why = missing()
    if why is not None:
        print(f"no emulated link on this machine: {why}", file=sys.stderr)
        raise SystemExit(UNAVAILABLE_EXIT_CODE)


def ip(*arguments: str) -> str:
    """Run `ip` and return what it printed.

    Raises:
        LinkUnavailableError: With what it complained of.
    """
    return command("ip", *arguments)


def command(*words: str) -> str:
    """Run a command of the system and return what it printed.

    Raises:
        LinkUnavailableError: With what it complained of.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkUnavailableError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def _forbidden() -> bool:
    space = _TRIAL.format(os.getpid())
    try:
        ip("netns", "add", space)
        ip("netns", "del", space)
    except LinkUnavailableError:
        return True
    return False


def _missing_for_emulator() -> str | None:
    if not _TUN.exists():
        return f"the kernel has no netem, and there is no {_TUN} for the emulator either"
    if shutil.which("cc") is None:
        return "the kernel has no netem, and the emulator needs a C compiler (apt install gcc)"
    return None

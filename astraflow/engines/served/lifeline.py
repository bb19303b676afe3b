"""A server's keeper: runs a command in a session of its own, which ends when standard input does.

The node holds the other end of that pipe. However the node ends, the pipe closes, and the keeper
ends all processes of the server: they are asked first and killed `GRACE_S` later. The same when
the server ends by itself and leaves processes behind; the keeper's exit code is the server's.

Run as a script, so that starting it costs no import of astraflow.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Run a command until it ends or nobody wants it any more."""
    server = subprocess.Popen(  # noqa: S603  the recipe's command
        argv,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_die_with_parent,  # noqa: PLW1509  no threads yet
    )
    threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    code = server.wait()
    _signal(server, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _die_with_parent() -> None:
    """Have the kernel kill the server with the keeper."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _end_with_input(server: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 1):
        pass
    _signal(server, signal.SIGTERM)
    # One that was stopped hears of it only then.
    _signal(server, signal.SIGCONT)
    time.sleep(GRACE_S)
    _signal(server, signal.SIGKILL)


def _signal(server: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(server.pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

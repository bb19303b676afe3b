"""End: a process at one end of a link that is told what to do, line by line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer
from typing import Any, Final, Self

from link.hosts import Host

_BENCHMARKS: Final = Path(__file__).parent.parent


class End:
    """Runs a module of the benchmarks; answers are lines of JSON. The end of its stdin ends it."""

    def __init__(self, host: Host, module: str, *arguments: str) -> None:
        """Start it.

        Args:
            host: Where.
            module: Such as `wan_ends.source`.
            arguments: Of its command line.
        """
        places = os.pathsep.join([str(_BENCHMARKS), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": places, "PYTHONWARNINGS": "ignore"}
        self._module = module
        self._process = host.popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until it has ended."""
        self._process.communicate()

    def kill(self) -> None:
        """End it as the kernel does when memory runs out: it gets to do nothing more."""
        self._process.kill()

    def pause(self) -> None:
        """Stop it where it is: its connections stay open, and nothing comes."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        self._process.send_signal(signal.SIGCONT)

    def tell(self, line: str) -> None:
        """Send a line."""
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self, *, timeout_s: float = 300.0) -> Any:
        """Return what it says next.

        Raises:
            RuntimeError: It has stopped, or said nothing for so long and was killed; what it
                complained of is on stderr.
        """
        assert self._process.stdout
        patience = Timer(timeout_s, self._process.kill)
        patience.start()
        line = self._process.stdout.readline()
        patience.cancel()
        if not line:
            raise RuntimeError(f"{self._module} stopped with code {self._process.wait()}")
        return json.loads(line)

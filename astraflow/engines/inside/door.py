"""Doors: how a node reaches a desk in a server whose routes all wait for its turn.

A door is a Unix socket in the exchange folder. A caller writes the path of an exchange file, ends
its side, and reads one JSON object when the file is staged:

    {"error": "", "is_quick": true}

with what was wrong, and whether the version goes live when it is told; see `sglang_plugin`.
"""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

from .desk import Desk


class Door(threading.Thread):
    """Has files staged that are named at a socket, one after the other."""

    def __init__(self, path: Path, desk: Desk, *, is_hooked: bool) -> None:
        """Open it.

        Args:
            path: Of the socket.
            desk: Stages.
            is_hooked: Whether the server writes what is staged when a version is told.

        Raises:
            OSError: A path that no socket can have.
        """
        super().__init__(name="astraflow-door", daemon=True)
        self._desk = desk
        self._is_hooked = is_hooked
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()

    def run(self) -> None:
        """Serve callers until the process ends."""
        while True:
            caller, _ = self._socket.accept()
            with caller, caller.makefile("rwb") as stream:
                stream.write(json.dumps(self._answer(stream.read().decode())).encode())

    def _answer(self, path: str) -> dict[str, Any]:
        error = self._desk.staged(path)
        return {"error": error, "is_quick": self._is_hooked and self._desk.ready is not None}

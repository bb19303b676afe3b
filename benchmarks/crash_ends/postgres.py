"""A PostgreSQL server of its own, started from the binaries that Debian installs."""

import os
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

# Below those that Linux and macOS give by themselves (ip_local_port_range).
_PORTS: Final = (20_000, 32_768)


def postgres_binaries() -> Path | None:
    """Return the folder of the newest server; None: there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if found:
        return found[-1].parent
    here = shutil.which("initdb")
    return Path(here).parent if here else None


def free_port() -> int:
    """Return a port that nobody has now, and that no socket gets which asks for any."""
    while True:
        port = random.randrange(*_PORTS)
        with suppress(OSError), socket.create_server(("", port)):
            return port


@contextmanager
def postgres_server(host: str = "") -> Generator[str]:
    """Start a server in a temporary folder; yield the URL of its database.

    Args:
        host: IP to listen on, which lets everybody in; empty: a socket in the folder.

    Raises:
        FileNotFoundError: None is installed.
    """
    binaries = postgres_binaries()
    if binaries is None:
        raise FileNotFoundError("PostgreSQL is missing: scripts/install_postgres.sh")
    # Short: a socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="afpg") as root:
        data = Path(root, "data")
        # The server refuses to run as root.
        user = {"user": "nobody", "group": "nogroup", "extra_groups": []} if not os.getuid() else {}
        if user:
            shutil.chown(root, "nobody", "nogroup")
        make = [binaries / "initdb", "-D", data, "-U", "astra", "-A", "trust", "--no-locale", "-N"]
        subprocess.run([*make, "-E", "UTF8"], check=True, stdout=subprocess.DEVNULL, **user)
        if host:
            with (data / "pg_hba.conf").open("a") as file:
                file.write("host all all 0.0.0.0/0 trust\n")
        command = [binaries / "postgres", "-D", data, "-k", root]
        port = free_port()
        command += ["-p", str(port), "-c", f"listen_addresses={host}", "-c", "shared_buffers=64MB"]
        with Path(root, "log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, **user)
        try:
            ready = [binaries / "pg_isready", "-q", "-h", root, "-p", str(port), "-U", "astra"]
            while subprocess.run(ready, check=False).returncode:
                if process.poll() is not None:
                    raise RuntimeError(Path(root, "log").read_text())
            yield f"host={host or root} port={port} dbname=postgres user=astra"
        finally:
            # Not SIGTERM, which waits for clients.
            process.send_signal(2)
            process.wait()

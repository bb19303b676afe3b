"""The processes of a server that a test has started."""

import psutil


def processes_below() -> set[psutil.Process]:
    """Return all processes that descend from this one."""
    return set(psutil.Process().children(recursive=True))


def what_computes(server: set[psutil.Process]) -> psutil.Process:
    """Return the largest process of a server."""
    return max(server, key=lambda process: process.memory_info().rss)

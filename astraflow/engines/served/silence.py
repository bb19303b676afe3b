"""Silence: a server that no longer answers is looked after, though no call fails."""

import asyncio
from collections.abc import Callable

from astraflow.engines.served.meter import Meter
from astraflow.engines.served.server import Server

_SILENT_S = 60.0


async def end_silence(
    server: Server,
    meter: Meter,
    *,
    is_changing: Callable[[], bool],
    silent_s: float = _SILENT_S,
) -> None:
    """Look whether a server still generates when nothing came of what runs, until cancelled.

    Args:
        server: Started again when it does not.
        meter: Counts what comes.
        is_changing: Whether its version changes: it generates nothing then.
        silent_s: Seconds without a token.
    """
    heard = meter.progress
    while True:
        await asyncio.sleep(silent_s)
        if meter.running_count and meter.progress == heard and not is_changing():
            await server.look()
        heard = meter.progress

"""What processes of the gateway have in common."""

import asyncio
import os
import signal
import sys

from astraflow.config.http import Http
from astraflow.gateway.edge.bodies import BodyRules
from astraflow.gateway.edge.peers import DialRules
from astraflow.rpc.tls import Tls
from astraflow.telemetry.garbage import keep_for_good, look_rarely

# A thread that reads a large body gives the interpreter back so often: 5 ms, and a small request
# that needs it ten times waits for 50.
_SWITCH_S = 0.0005


def stop_event() -> asyncio.Event:
    """Return what is set once the process is told to end; keep its pauses short until then."""
    sys.setswitchinterval(_SWITCH_S)
    keep_for_good()
    look_rarely()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped


def rules_of(http: Http) -> BodyRules:
    """Return what a recipe says of bodies."""
    return BodyRules(
        reads_pickles=http.legacy_pickle,
        max_nbytes=http.max_body_nbytes,
        timeout_s=http.body_timeout_s,
    )


def dial_of(http: Http) -> DialRules:
    """Return what a recipe says of peers that are dialled."""
    memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DialRules(
        hosts=http.dial,
        max_answer_nbytes=http.max_answer_nbytes,
        max_weights_nbytes=http.max_weights_nbytes or memory_nbytes,
    )


def tls_of(http: Http) -> Tls | None:
    """Return what a recipe says of TLS on the endpoints; None: plain text.

    Raises:
        AstraflowError: INVALID_FIELD for a certificate without its key.
    """
    tls = Tls(certificate=http.tls.certificate, key=http.tls.key, ca=http.tls.ca)
    return None if tls.is_plain else tls

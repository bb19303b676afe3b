"""`astraflow bench link`: both of its ends, for people and machines."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.util import find_spec

from rich.console import Console
from rich.table import Table

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.versions import LaneKind
from astraflow.launch.bench.link import LaneRate, measure_link
from astraflow.launch.bench.link_source import LinkSource, serve_link
from astraflow.launch.processes import LIFELINE, hold_lifeline
from astraflow.launch.weights import print_json
from astraflow.telemetry.logging import configure_logging

_LANES = (LaneKind.SHM, LaneKind.TCP, LaneKind.UCX, LaneKind.GRPC)


def serve(nbytes: int, *, listen: str, advertise: str | None, as_json: bool) -> None:
    """Be the end that serves, until interrupted.

    Raises:
        AstraflowError: INVALID_FIELD when it cannot listen there.
    """
    configure_logging("bench")
    hold_lifeline(first=signal.SIGINT)
    with serve_link(nbytes, listen=listen, advertise=advertise, lanes=_hosted()) as source:
        if as_json:
            print_json(asdict(source))
        else:
            command = f"astraflow bench link --from {source.endpoint} --token {source.token}"
            print(f"serving {nbytes / 1e6:,.0f} MB; run on the other machine:\n  {command}")  # noqa: T201
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


def pull_there(
    endpoint: str, token: str, *, lanes: Sequence[LaneKind] | None, rounds: int, as_json: bool
) -> None:
    """Be the end that pulls, and print what each lane carried.

    Raises:
        AstraflowError: See `measure_link`; INVALID_FIELD without a token.
    """
    if not token:
        raise AstraflowError(Reason.INVALID_FIELD, "give --token, which the serving end printed")
    configure_logging("bench")
    source = LinkSource(endpoint=endpoint, token=token)
    rates = asyncio.run(measure_link(source, lanes or _possible(), rounds=rounds))
    if as_json:
        print_json([asdict(rate) for rate in rates])
    else:
        Console().print(_table(rates))


def pull_here(nbytes: int, *, lanes: Sequence[LaneKind] | None, rounds: int, as_json: bool) -> None:
    """Start the serving end as a process of this machine, and pull from it.

    Raises:
        AstraflowError: See `measure_link`.
    """
    with _served_here(nbytes) as source:
        pull_there(source.endpoint, source.token, lanes=lanes, rounds=rounds, as_json=as_json)


@contextmanager
def _served_here(nbytes: int) -> Generator[LinkSource]:
    """Run the serving end as a process, which ends with this one."""
    lifeline, held = os.pipe()
    arguments = ("bench", "link", "--listen", "127.0.0.1:0", "--mb", str(nbytes // 1_000_000))
    with subprocess.Popen(  # noqa: S603 - this very program
        [sys.executable, "-m", "astraflow", *arguments, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, LIFELINE: str(lifeline)},
        pass_fds=(lifeline,),
    ) as process:
        os.close(lifeline)
        try:
            yield _announced(process)
        finally:
            os.close(held)


def _announced(process: "subprocess.Popen[str]") -> LinkSource:
    """Return where the serving end is, once it says so; its log goes before."""
    for line in process.stdout or ():
        with suppress(ValueError, TypeError):
            return LinkSource(**json.loads(line))
    raise AstraflowError(Reason.NOT_READY, "the serving end did not start: see what it printed")


def _possible() -> list[LaneKind]:
    return [lane for lane in _LANES if lane is not LaneKind.UCX or _has_ucx()]


def _hosted() -> list[LaneKind]:
    return [lane for lane in _possible() if lane is not LaneKind.GRPC]


def _has_ucx() -> bool:
    return any(find_spec(name) for name in ("ucxx", "ucp"))


def _table(rates: Sequence[LaneRate]) -> Table:
    table = Table("lane", "first pull", "then", "best", "first byte", "CPU of this end")
    for rate in rates:
        speeds = (rate.first_gb_per_s, rate.gb_per_s, rate.best_gb_per_s)
        table.add_row(
            rate.lane,
            *(f"{each * 8:.2f} Gbit/s" for each in speeds),
            f"{rate.first_byte_s * 1e3:.0f} ms",
            f"{rate.cpu_s_per_gb:.2f} s/GB",
        )
    return table

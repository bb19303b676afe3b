"""The hub's process: tokens, signals and exit codes around `serve_hub`."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import structlog

from astraflow.config.recipe import Recipe
from astraflow.config.run_dir import HubEndpoint, RunDir
from astraflow.core.errors import TEMPORARY_EXIT, AstraflowError, Reason
from astraflow.core.events import RunStopped
from astraflow.core.frozen import fill
from astraflow.core.rollouts import is_sound
from astraflow.core.status import RunState, RunStatus, StopMode
from astraflow.dataflow.hub import Hub
from astraflow.dataflow.journals import is_begun
from astraflow.dataflow.server import serve_hub
from astraflow.rpc.access import HubTokens
from astraflow.rpc.address import join_address, split_address
from astraflow.rpc.concurrency import switch_threads_soon
from astraflow.storage.fault_points import FaultPoint, arm, hit
from astraflow.telemetry.garbage import collect_rarely, keep_for_good, reuse_memory
from astraflow.wire.rollout import split

log = structlog.get_logger(__name__)

JOIN_TOKEN = "ASTRAFLOW_JOIN_TOKEN"  # noqa: S105 - the name of a variable
OPERATOR_TOKEN = "ASTRAFLOW_OPERATOR_TOKEN"  # noqa: S105

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main_serve(recipe: Recipe, *, run_dir: Path, reopens: bool = False) -> int:
    """Serve a run to its end; the first SIGINT or SIGTERM drains it, the second cancels it.

    Tokens come from the environment, or are made; with the address they lie in `hub.json` until
    the run is over. A hub that finds its run's journal in the folder goes on with it, on the same
    address and with the same tokens, so that members find it again.

    Returns:
        Exit code: 0 for a run that is done, 1 for one that failed, TEMPORARY_EXIT when the
        database of its journal was away for too long.

    Raises:
        AstraflowError: The hub could not start.
    """
    arm()
    if None in (fill, is_sound, split):
        log.warning("rollouts are read slowly: install a C compiler and astraflow again")
    run = RunDir(run_dir)
    before = _before(recipe, run)
    _must_share_tokens(recipe, before)
    tokens = tokens_from(os.environ, before)
    listen = _same_port(recipe.hub.listen, before)
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            status = runner.run(_serve(recipe, run, tokens, listen, reopens=reopens))
    except AstraflowError as error:
        if error.exit_code != TEMPORARY_EXIT:
            raise
        log.error("the hub ends", reason=error.reason, message=error.message)  # noqa: TRY400
        return TEMPORARY_EXIT
    _forget(run)
    if status.state is RunState.FAILED:
        why = status.failure
        log.error("run failed", reason=why and why.reason, message=why and why.message)
        return 1
    return 0


def new_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of a hub: uvloop has one that takes less of its core."""
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # noqa: PLC0415 - not on Windows

    return uvloop.new_event_loop()


def tokens_from(environment: Mapping[str, str], before: HubEndpoint | None = None) -> HubTokens:
    """Return the tokens that the environment names, else those before; what is left is made."""
    fresh = HubTokens.generate()
    return HubTokens(
        join=environment.get(JOIN_TOKEN) or (before and before.join_token) or fresh.join,
        operator=environment.get(OPERATOR_TOKEN)
        or (before and before.operator_token)
        or fresh.operator,
    )


def _before(recipe: Recipe, run: RunDir) -> HubEndpoint | None:
    """Return where the hub of this run was that died here."""
    if is_begun(recipe, run):
        with suppress(AstraflowError):
            return run.read_endpoint()
    return None


def _must_share_tokens(recipe: Recipe, before: HubEndpoint | None) -> None:
    """Refuse a standby that members could not enter.

    Raises:
        AstraflowError: INVALID_FIELD.
    """
    if recipe.hub.journal.standby and before is None:
        for name in (JOIN_TOKEN, OPERATOR_TOKEN):
            if not os.environ.get(name):
                raise AstraflowError(
                    Reason.INVALID_FIELD,
                    f"a standby needs the tokens of the hub that serves now: set {name} for both",
                )


def _same_port(listen: str, before: HubEndpoint | None) -> str:
    """Return what to listen on: with port 0 the port from before, where there was one."""
    host, port = split_address(listen, "hub.listen")
    if port or before is None:
        return listen
    return join_address(host, split_address(before.address)[1])


async def _serve(
    recipe: Recipe, run: RunDir, tokens: HubTokens, listen: str, *, reopens: bool
) -> RunStatus:
    def on_ready(hub: Hub, address: str) -> None:
        stop = _Stopper(hub)
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stop)
        endpoint = HubEndpoint(
            address=address,
            pid=os.getpid(),
            start_time_s=psutil.Process().create_time(),
            operator_token=tokens.operator,
            join_token=tokens.join,
            metrics_address=hub.metrics_address,
            tls=recipe.hub.tls.to_dial(),
        )
        keep_for_good()
        collect_rarely()
        reuse_memory()
        run.write_endpoint(endpoint)
        hit(FaultPoint.RECOVERY_SERVING)

    _take_turns()
    ends = partial(_end_before_it_serves, signal.SIGTERM)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ends)
    return await serve_hub(
        recipe,
        run_dir=run.root,
        tokens=tokens,
        listen=listen,
        on_ready=on_ready,
        reopens=reopens,
    )


def _end_before_it_serves(number: signal.Signals) -> None:
    """End as the signal does by itself: nothing was acknowledged, and nobody drains such a hub."""
    log.info("the hub ends before it serves; its run is as it was", signal=number.name)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _take_turns() -> None:
    """Have the threads of this process run on when another is woken, where the system can.

    A stream's every message wakes a thread of gRPC's, which then takes the core of the one that
    decides, thousands of times a second. Threads that are made later do as their maker.

    A commit of the journal needs the interpreter a dozen times, and every ack waits for one.
    """
    switch_threads_soon()
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class _Stopper:
    """Drains a run when it is first called, and cancels it from then on.

    The hub of one that is over ends, whoever has not left.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._mode = StopMode.DRAIN

    def __call__(self) -> None:
        log.info("stopping", mode=self._mode)
        self._hub.is_hurried = self._hub.status().state.is_final
        with suppress(AstraflowError):
            self._hub.apply(RunStopped(mode=self._mode))
        self._mode = StopMode.CANCEL


def _forget(run: RunDir) -> None:
    """Remove the endpoint that this process left, so that nobody dials a hub that is gone."""
    with suppress(AstraflowError):
        if run.read_endpoint().pid == os.getpid():
            run.endpoint.unlink(missing_ok=True)

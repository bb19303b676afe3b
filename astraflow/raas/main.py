"""The process of a node: engines from model directories, then one node until it leaves."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import structlog

from astraflow import __version__
from astraflow.config.model_dirs import checked_model_dir
from astraflow.config.recipe import Recipe
from astraflow.core.errors import AstraflowError, Failure, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.members import Resources
from astraflow.core.versions import SourceKind
from astraflow.engines.devices import Machine, place_engines, whole_memory
from astraflow.engines.models import first_model
from astraflow.raas.failures import LoopWatch, report_unawaited
from astraflow.raas.node import NodeDeparture, NodeSettings, RaasNode
from astraflow.raas.policies import ServedModel, load_models, policies_by_engine
from astraflow.raas.updater import Puller, VersionFollower
from astraflow.rpc.address import is_loopback, split_addresses
from astraflow.rpc.concurrency import reserve_threads
from astraflow.rpc.tls import Tls
from astraflow.telemetry.garbage import keep_for_good
from astraflow.telemetry.logging import configure_logging
from astraflow.telemetry.metrics import MetricsServer, loop_read
from astraflow.telemetry.tracebacks import place_of
from astraflow.transport.hosts import chosen_lanes
from astraflow.weights.disk.copy import DiskCopy
from astraflow.weights.fetch.lanes import AnyLane
from astraflow.weights.fetch.puller import WeightPuller
from astraflow.weights.serve.server import RelayServer
from astraflow.workflows.building import recipe_codes

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

# A loop that stands still for so long in one line is blocked, on a busy machine too.
_BLOCKED_S = 5.0


def main_join(
    recipe: Recipe,
    *,
    hub: str,
    token: str,
    name: str | None = None,
    region: str = "",
    models: Mapping[str, Path] | None = None,
    tls: Tls | None = None,
) -> int:
    """Join the pool of a run and serve it until it is over.

    SIGTERM and SIGINT drain; the second one stops at once.

    Args:
        recipe: Of the run: names policies, workflows and engines.
        hub: host:port.
        token: The run's join token.
        name: Unique in the pool; None: from host and process.
        region: Where the node stands.
        models: Model directory by policy; a policy left out: the recipe's.
        tls: None: plain text.

    Returns:
        The exit code: 0 when the run is over or the node was drained, 1 when it failed, 78
        (CONFIGURATION_EXIT) when it would fail again; the log says why.
    """
    configure_logging("raas")
    settings = NodeSettings(
        hub=hub,
        token=token,
        name=name or f"{socket.gethostname()}-{os.getpid()}",
        capacity=recipe.raas.capacity,
        eval_extra=recipe.raas.eval_place_count,
        codes=recipe_codes(recipe),
        resources=Resources(
            core_count=os.cpu_count() or 0,
            memory_nbytes=whole_memory(),
        ),
        region=region,
        software=f"astraflow/{__version__}",
        tls=tls,
        patience_s=recipe.hub.patience_s,
        kinds=frozenset({SourceKind.OBJECT_STORE}) if recipe.raas.sources == "store" else None,
        ask_every=ask_every(recipe),
        agents=recipe.raas.agents,
    )
    try:
        departure = asyncio.run(_join(recipe, settings, models or {}))
    except AstraflowError as error:
        place = place_of(error)
        # The line of the user's code, where there is one.
        at = {"exception": place.traceback} if place.is_users else {}
        log.error("the node failed", reason=error.reason, why=error.message, **at)  # noqa: TRY400
        return error.exit_code
    log.info("the node has left", departure=departure)
    return 0


def ask_every(recipe: Recipe) -> dict[PolicyId, int]:
    """Return after how many tasks a node asks for a newer version; policies left out: never."""
    return {
        PolicyId(name): policy.trainer.sync.every
        for name, policy in recipe.policies.items()
        if policy.trainer.sync.style == "asked"
    }


async def _join(
    recipe: Recipe, settings: NodeSettings, directories: Mapping[str, Path]
) -> NodeDeparture:
    # Code of a workflow hands to threads what blocks, and versions are decoded in such, too.
    reserve_threads(settings.capacity + settings.eval_extra)
    # Every mistake in the arguments shows before the first model is loaded.
    paths = model_directories(recipe, directories)
    async with AsyncExitStack() as exits:
        models = await exits.enter_async_context(serving_models(recipe, paths))
        relays = await _relays(recipe, settings, models)
        if relays is not None:
            exits.push_async_callback(relays.close)

        cache = recipe.raas.cache
        copies = {} if cache is None else {each: DiskCopy.open(cache / each) for each in models}
        puller = partial(_puller, recipe, settings, relays, copies)
        node = RaasNode(settings, models=models, puller=puller, relays=relays)
        read = loop_read(node.runner.families, iter)
        metrics = await exits.enter_async_context(MetricsServer(recipe.metrics.listen, read))
        node.metrics_address = metrics.address
        keep_for_good()
        with watching(recipe, node.report, node.report_from_thread), _signals(node):
            return await node.run()


def model_directories(recipe: Recipe, given: Mapping[str, Path]) -> dict[PolicyId, Path]:
    """Return where the model of each policy lies.

    Raises:
        AstraflowError: INVALID_FIELD for a model that a warm-up is to make, or that is none;
            POLICY_UNKNOWN for one of a policy that the recipe does not have.
    """
    for name in given.keys() - recipe.policies.keys():
        known = ", ".join(recipe.policies)
        raise AstraflowError(Reason.POLICY_UNKNOWN, f"--model {name}: the recipe has {known}")
    found: dict[PolicyId, Path] = {}
    for name, policy in recipe.policies.items():
        report = partial(log.info, policy=name)
        directory = given.get(name) or first_model(policy.model, report=report)
        if directory is None:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"policy {name} starts from a warm-up model; make it with"
                f" `astraflow trainer warm-up` and give --model {name}=DIR; where nobody can, as"
                f" in a Deployment, begin the run with that: policies.{name}.model={{path: DIR}}",
            )
        found[PolicyId(name)] = checked_model_dir(name, directory)
    return found


@asynccontextmanager
async def serving_models(
    recipe: Recipe, paths: Mapping[PolicyId, Path]
) -> AsyncGenerator[dict[PolicyId, ServedModel]]:
    """Load the engines of a node, and yield what it has for each policy; they are closed after it.

    Raises:
        AstraflowError: INVALID_FIELD when a model or its settings do not fit.
    """
    sharing = policies_by_engine(recipe, paths)
    settled = place_engines(
        recipe.raas.engine, [paths[first] for first, *_ in sharing], Machine.here()
    )
    async with AsyncExitStack() as engines:
        models: dict[PolicyId, ServedModel] = {}
        for policies, engine in zip(sharing, settled, strict=True):
            loaded = load_models(recipe, policies, paths[policies[0]], engine)
            for policy_id, model in loaded.items():
                engines.push_async_callback(model.engine.close)
                models[policy_id] = model
        yield models


@contextmanager
def watching(
    recipe: Recipe, report: Callable[[Failure], None], report_from_thread: Callable[[Failure], None]
) -> Generator[None]:
    """Tell what code of a user raises where nobody awaits it, or blocks the running loop.

    Of what blocks it `report_from_thread` is told, in a thread of its own.
    """
    report_unawaited(asyncio.get_running_loop(), report)
    watch = LoopWatch(
        report_from_thread,
        ends_after_s=recipe.rollouts.timeout_s,
        # What it reports is heard as long as the session lives, which the loop keeps alive.
        blocked_s=min(_BLOCKED_S, recipe.hub.session_ttl_s / 2),
    )
    watch.start()
    try:
        yield
    finally:
        watch.close()


def _puller(
    recipe: Recipe,
    settings: NodeSettings,
    relays: RelayServer | None,
    copies: Mapping[PolicyId, DiskCopy],
    policy_id: PolicyId,
) -> Puller:
    """Return what gets the weights of a policy: by broadcast, where there is one, or pulled."""
    if recipe.raas.engine.kind == "none":
        return VersionFollower(policy_id)
    lane = AnyLane(
        tls=settings.tls,
        lanes=chosen_lanes(recipe.raas.lanes),
        encrypts=recipe.raas.encrypt_lanes,
    )
    pulling = partial(
        WeightPuller,
        policy_id,
        relay=None if relays is None else relays.relays[policy_id],
        kinds=settings.kinds,
        copy=copies.get(policy_id),
    )
    broadcast = recipe.policies[policy_id].trainer.broadcast
    if broadcast is None:
        return pulling(lane=lane)
    from astraflow.weights.broadcast import BroadcastPuller  # noqa: PLC0415 - loads torch

    return BroadcastPuller(broadcast, lane, pulling)


async def _relays(
    recipe: Recipe, settings: NodeSettings, policy_ids: Iterable[PolicyId]
) -> RelayServer | None:
    """Serve to others what is pulled, if it is, where they can dial it."""
    if recipe.raas.engine.kind == "none":
        return None
    listen = recipe.raas.relay.listen
    if listen is None and all(is_loopback(host) for host, _ in split_addresses(settings.hub)):
        # All on one host: there others can dial it too.
        listen = "127.0.0.1:0"
    if recipe.raas.relay.mode == "off" or listen is None:
        return None
    if settings.tls is not None and settings.tls.certificate is None:
        log.warning("no weights are relayed: the node has no certificate to serve with")
        return None
    relays = RelayServer(
        policy_ids,
        lanes=chosen_lanes(recipe.raas.lanes),
        encrypts=recipe.raas.encrypt_lanes,
    )
    await relays.start(listen=listen, advertise=recipe.raas.relay.advertise, tls=settings.tls)
    log.info("relaying weights", endpoint=relays.endpoint)
    return relays


@contextmanager
def _signals(node: RaasNode) -> Generator[None]:
    """Drain at the first signal and stop at the second."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def on_signal(number: int) -> None:
        log.info("asked to leave", signal=signal.Signals(number).name, at_once=bool(seen))
        (node.stop if seen else node.drain)()
        seen.append(number)

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)

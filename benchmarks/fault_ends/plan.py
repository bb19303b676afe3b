"""The parts of a run: which injections, how many, in which process."""

import asyncio
import multiprocessing
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Final

from fault_ends.damage import CLASSES
from fault_ends.disks import fill_disks
from fault_ends.inline import run_inline
from fault_ends.killed_pullers import kill_pullers
from fault_ends.kills import kill_sources
from fault_ends.messages import MessageFaults
from fault_ends.processes import quiet
from fault_ends.relays import lie_to_receivers
from fault_ends.states import StateFaults
from fault_ends.streams import damage_streams
from fault_ends.trial import Counts

# Scales of the layout: a state of 4, 15 and 110 KB; most injections meet the small ones.
_SCALES = (1, 4, 1, 32)
_PART = 500

WITHOUT_COPY: Final = (
    *CLASSES,
    *("spoiled_stream", "lying_relay", "killed_source", "killed_puller", "cancelled"),
    *("full_store_disk", "full_node_disk"),
)
"""Classes of which 99.9 % must be recovered from without a full copy.

In the others the base itself is lost, or what the run says of a version is a lie and refused.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """How many injections there are: per class of message and state faults, and in all.

    Attributes:
        messages: Per class.
        states: Per class.
        streams: Over a TCP lane.
        relays: Relays that lie.
        kills: Sources, and as many pullers that follow, and that join.
        disks: Disks that run full: of an object store, and as many of nodes.
    """

    messages: int = 20_000
    states: int = 2_000
    streams: int = 2_000
    relays: int = 200
    kills: int = 50
    disks: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of one process.

    Attributes:
        kind: messages, states, streams, relays, sources, pullers or disks.
        quota: Of this part.
        seed: Decides everything.
        scale: Of the layout.
    """

    kind: str
    quota: int
    seed: int
    scale: int = 1


def parts(quotas: Quotas, seed: int) -> Iterator[Part]:
    """Yield the parts, those that take longest first."""
    sizes = {
        "relays": (quotas.relays, 20),
        "sources": (quotas.kills, 10),
        "pullers": (quotas.kills, 10),
        "disks": (quotas.disks, 10),
        "streams": (quotas.streams, 200),
        "messages": (quotas.messages, _PART),
        "states": (quotas.states, _PART),
    }
    number = 0
    for kind, (quota, most) in sizes.items():
        for first in range(0, quota, most):
            scale = _SCALES[number % len(_SCALES)]
            size = min(most, quota - first)
            yield Part(kind=kind, quota=size, seed=seed + 10_000 * number, scale=scale)
            number += 1


def run_all(quotas: Quotas, *, seed: int, processes: int, tell: bool = False) -> dict[str, Counts]:
    """Run all parts and return the counts by class."""
    counts: dict[str, Counts] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        running = [pool.submit(run_part, part) for part in parts(quotas, seed)]
        for done, each in enumerate(as_completed(running), 1):
            merge(counts, each.result())
            if tell:
                print(f"{done} of {len(running)} parts done", flush=True)
    return counts


def run_part(part: Part) -> dict[str, Counts]:
    """Run one part in this process."""
    quiet()
    match part.kind:
        case "sources":
            return kill_sources(quota=part.quota, seed=part.seed)
        case "pullers":
            return kill_pullers(quota=part.quota, seed=part.seed)
        case "disks":
            return asyncio.run(fill_disks(quota=part.quota, seed=part.seed))
        case "streams":
            return asyncio.run(damage_streams(quota=part.quota, seed=part.seed))
        case "relays":
            return asyncio.run(lie_to_receivers(quota=part.quota, seed=part.seed))
        case _:
            return asyncio.run(_in_process(part))


async def _in_process(part: Part) -> dict[str, Counts]:
    # Every fourth part hands work to real threads.
    if part.seed // 10_000 % 4:
        run_inline()
    of_kind = MessageFaults if part.kind == "messages" else StateFaults
    return await of_kind(quota=part.quota, seed=part.seed, scale=part.scale).run()


def merge(counts: dict[str, Counts], more: Mapping[str, Counts]) -> None:
    """Add the counts of a part."""
    for name, each in more.items():
        counts.setdefault(name, Counts()).add(each)

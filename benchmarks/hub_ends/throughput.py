"""Rollouts in and batches out, as many as there can be, or at a rate."""

import asyncio
import time
from collections import deque
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

from astraflow.core.errors import AstraflowError
from astraflow.rpc.channel import dial
from astraflow_proto.dataflow.v1 import raas_service_pb2 as raas_pb
from hub_ends.members import Members, Node
from hub_ends.process import GROUP_SIZE, HubProcess

Row = dict[str, Any]

ITEM_COUNT: Final = 64
_WARM_UP_S: Final = 2.0
# Of a callback.
_MOST_S: Final = 0.05


@dataclass
class Load:
    """What nodes and a trainer do at once.

    Attributes:
        members: Who they are.
        rate: Items that are sent per second and node; 0: as many as the hub takes.
        item_count: Items of a message.
        credit: Of each node.
        acks: Seconds from the write of an item to its ack, with the time of the ack.
        accepted: Rollouts that were acknowledged.
        trained: Rollouts in batches that were acknowledged.
        sent_nbytes: Of rollouts, on their way to the hub.
        received_nbytes: Of batches, from the hub.
    """

    members: Members
    rate: float
    item_count: int = ITEM_COUNT
    credit: int = 1 << 16
    acks: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    accepted: int = 0
    trained: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0

    async def run(self) -> None:
        """Drive the hub until cancelled."""
        await self.members.join(capacity=self.credit)
        async with asyncio.TaskGroup() as group:
            for node in self.members.nodes:
                items: asyncio.Queue[raas_pb.RolloutItem] = asyncio.Queue()
                group.create_task(self.take_tasks(node, items))
                group.create_task(self.send(node, items))
            group.create_task(self.train())
            group.create_task(self.members.keep_alive())

    async def take_tasks(self, node: Node, items: "asyncio.Queue[raas_pb.RolloutItem]") -> None:
        """Have an answer to every task."""
        async for message in await node.open_tasks(self.credit):
            if message.HasField("task"):
                for item in node.answers(message.task, self.members.version):
                    items.put_nowait(item)

    async def send(self, node: Node, items: "asyncio.Queue[raas_pb.RolloutItem]") -> None:
        """Send the answers in messages of so many items."""
        stream = node.open_rollouts()
        sent = deque[float]()

        async def read() -> None:
            async for message in stream:
                now = time.perf_counter()
                self.acks += [(now - sent.popleft(), now) for _ in message.acks]
                self.accepted += sum("/" in ack.item_id for ack in message.acks)

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            due = time.perf_counter()
            while True:
                request = raas_pb.StreamRolloutsRequest(items=[await items.get()])
                # What was late is not made up for: a burst would measure itself.
                due = max(due, time.perf_counter() - 0.05)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                while len(request.items) < self.item_count and not items.empty():
                    request.items.append(items.get_nowait())
                if self.item_count < GROUP_SIZE and not items.empty():
                    # The result of a task comes with its last rollout.
                    following = items.get_nowait()
                    if following.HasField("result"):
                        request.items.append(following)
                    else:
                        items._queue.appendleft(following)  # noqa: SLF001
                due += len(request.items) / self.rate if self.rate else 0.0
                sent.extend([time.perf_counter()] * len(request.items))
                self.sent_nbytes += request.ByteSize()
                await stream.write(request)

    async def train(self) -> None:
        """Settle every batch as soon as all of it is here."""
        header: Any = None
        left = 0
        async for message in self.members.open_batches(2):
            self.received_nbytes += message.ByteSize()
            if message.HasField("header"):
                header, left = message.header, message.header.part_count
            elif message.HasField("part"):
                left -= 1
            if header is not None and not left:
                await self.members.settle(header.batch_id)
                self.trained += header.row_count
                header = None


async def measure_throughput(
    hub: HubProcess,
    *,
    seconds: float,
    token_count: int,
    rate: float,
    node_count: int = 1,
    item_count: int = ITEM_COUNT,
    has_payloads: bool = False,
) -> Row:
    """Return what a hub does under load."""
    async with AsyncExitStack() as stack:
        channel, *more = [
            await stack.enter_async_context(dial(hub.address)) for _ in range(node_count)
        ]
        # A pool of many reports a version so many times: it comes every few batches.
        every = min(4, max(1, node_count // 16))
        members = Members(
            channel, token_count, more=more, publish_every=every, has_payloads=has_payloads
        )
        credit = (1 << 16) if node_count == 1 else max(GROUP_SIZE, 4096 // node_count)
        load = Load(members, rate / node_count, item_count=item_count, credit=credit)
        driving = asyncio.create_task(load.run())
        await asyncio.wait([driving], timeout=_WARM_UP_S)
        before = _look(hub, load)
        await asyncio.wait([driving], timeout=seconds)
        if driving.done():
            await driving
        after = _look(hub, load)
        driving.cancel()
        with suppress(asyncio.CancelledError, AstraflowError, BaseExceptionGroup):
            await driving
    took = {name: after[name] - before[name] for name in after}
    wall_s = took["time"]
    spans = sorted(span for span, moment in load.acks if moment >= before["time"])
    return {
        "in_per_s": took["accepted"] / wall_s,
        "out_per_s": took["trained"] / wall_s,
        "ack_p50_ms": 1e3 * spans[len(spans) // 2],
        "ack_p99_ms": 1e3 * spans[int(len(spans) * 0.99)],
        "hub_cpu_fraction": took["cpu_s"] / wall_s,
        "hub_cpu_us_per_rollout": 1e6 * took["cpu_s"] / max(1, took["accepted"]),
        "snapshot_cpu_us_per_rollout": 1e6 * took["snapshot_cpu_s"] / max(1, took["accepted"]),
        "hub_core_wait_fraction": took["core_wait_s"] / wall_s,
        "load_cpu_fraction": took["load_cpu_s"] / wall_s,
        "disk_mb_per_s": took["written"] / wall_s / 1e6,
        "through_hub_mb_per_s": (took["sent_nbytes"] + took["received_nbytes"]) / wall_s / 1e6,
        "sent_bytes_per_rollout": took["sent_nbytes"] / max(1, took["accepted"]),
        "received_bytes_per_rollout": took["received_nbytes"] / max(1, took["trained"]),
        "rss_peak_mb": hub.rss_peak_nbytes / 1e6,
    }


async def measure_callbacks(hub: HubProcess, *, seconds: float, **load: Any) -> Row:
    """Return how long callbacks of a hub's event loop take under a load of `measure_throughput`."""
    # What it does before it serves keeps nobody waiting.
    started = time.perf_counter()
    row = await measure_throughput(hub, seconds=seconds, **load)
    slow = [each for each in hub.long_callbacks if each["time"] > started]
    longest = max(slow, key=itemgetter("cpu_s"), default={"cpu_s": 0.0, "name": ""})
    return {
        "in_per_s": row["in_per_s"],
        "callback_max_ms": 1e3 * longest["cpu_s"],
        "callback_max_name": longest["name"],
        "callbacks_over_50_ms": sum(each["cpu_s"] > _MOST_S for each in slow),
        "callbacks_over_5_ms_per_s": len(slow) / (seconds + _WARM_UP_S),
    }


def _look(hub: HubProcess, load: Load) -> dict[str, float]:
    return {
        "time": time.perf_counter(),
        "accepted": load.accepted,
        "trained": load.trained,
        "cpu_s": hub.cpu_s,
        "snapshot_cpu_s": hub.snapshot_cpu_s,
        "core_wait_s": hub.core_wait_s,
        "load_cpu_s": time.process_time(),
        "written": hub.written_nbytes,
        "sent_nbytes": load.sent_nbytes,
        "received_nbytes": load.received_nbytes,
    }

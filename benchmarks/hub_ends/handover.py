"""How long a whole batch takes from the last row of it to the trainer."""

import time
from typing import Any, Final

from astraflow.core.packing import laid_out
from astraflow.rpc.channel import dial
from astraflow.wire.rollout import decode_batch_header, decode_batch_part
from astraflow_proto.dataflow.v1 import raas_service_pb2 as raas_pb
from hub_ends.members import Members
from hub_ends.process import GROUP_SIZE, GROUPS_PER_BATCH, HubProcess
from hub_ends.throughput import ITEM_COUNT, Row

# No batch is asked for ahead: the next one waits for the ack.
MAX_OUTSTANDING: Final = 1


async def measure_handover(hub: HubProcess, *, token_count: int, batch_count: int) -> Row:
    """Return how long batches took from the write of their last row until they were parsed.

    That contains the way of the row to the hub, its journal, and the way back: the span is longer
    than the one from its acceptance, which `from_ack` begins with the ack of.
    """
    async with dial(hub.address) as channel:
        members = Members(channel, token_count)
        await members.join()
        tasks, rollouts = await members.open_tasks(), members.open_rollouts()
        batches = members.open_batches(MAX_OUTSTANDING)
        spans: list[tuple[float, float]] = []
        for _ in range(batch_count + 1):
            last = await _send_all_but_one(members, tasks, rollouts)
            spans.append(await _hand_over(members, rollouts, batches, last))
        for stream in (tasks, rollouts, batches):
            stream.cancel()
    # The first one warms up.
    sent, acked = ([1e3 * span for span in sorted(each)] for each in zip(*spans[1:], strict=True))
    return {
        "handover_p50_ms": sent[len(sent) // 2],
        "handover_p90_ms": sent[int(len(sent) * 0.9)],
        "from_ack_p50_ms": acked[len(acked) // 2],
        "rows": GROUPS_PER_BATCH * GROUP_SIZE,
        "batches": batch_count,
    }


async def _send_all_but_one(members: Members, tasks: Any, rollouts: Any) -> Any:
    """Answer a batch's worth of tasks, but for one rollout; return it."""
    items: list[raas_pb.RolloutItem] = []
    count = 0
    while count < GROUPS_PER_BATCH:
        message = await tasks.read()
        if message.HasField("task"):
            items += members.answers(message.task)
            count += 1
    *items, last, closing = items
    for start in range(0, len(items), ITEM_COUNT):
        lot = items[start : start + ITEM_COUNT]
        await rollouts.write(raas_pb.StreamRolloutsRequest(items=lot))
        await rollouts.read()
    return raas_pb.StreamRolloutsRequest(items=[last, closing])


async def _hand_over(
    members: Members, rollouts: Any, batches: Any, last: Any
) -> tuple[float, float]:
    started = time.perf_counter()
    await rollouts.write(last)
    await rollouts.read()
    acked = time.perf_counter()
    message = await batches.read()
    while not message.HasField("header"):
        message = await batches.read()
    header = decode_batch_header(message.header)
    parts = [
        laid_out(decode_batch_part((await batches.read()).part), header.policy_ids)
        for _ in range(header.part_count)
    ]
    ended = time.perf_counter()
    assert sum(part.row_count for part in parts) == GROUPS_PER_BATCH * GROUP_SIZE
    await members.settle(header.batch_id)
    return ended - started, ended - acked

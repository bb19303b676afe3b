"""A trainer without a model: its weights count the steps."""

import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from astraflow.client.loop_thread import LoopThread
from astraflow.client.trainer import TrainerBatch, TrainerClient
from astraflow.core.batches import BatchOutcome, EndOfData
from astraflow.core.dtype import Dtype
from astraflow.core.ids import PolicyId
from astraflow.core.layout import Layout
from astraflow.core.members import Contract, RegisterTrainer
from astraflow.core.versions import WeightEndpoint
from astraflow.weights.object_writer import ObjectWriter
from astraflow.weights.publisher import WeightPublisher
from astraflow.weights.server import WeightServer

_SIZE = 100


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """What a trainer got.

    Attributes:
        batches: In order, one per step.
        end: Why no more followed; None: the run asked it to leave.
    """

    batches: tuple[TrainerBatch, ...]
    end: EndOfData | None


def train_counter(
    hub: str,
    *,
    token: str,
    policy_id: str = "solver",
    groups_per_batch: int = 2,
    prefetch: int = 1,
    loop: LoopThread | None = None,
    store: str | None = None,
    step_s: float = 0.0,
) -> Trained:
    """Take batches until the data ends; version n is the tensor `w`, f32[100], filled with n.

    Args:
        hub: host:port.
        token: The run's join token.
        policy_id: Which policy.
        groups_per_batch: As the recipe has it.
        prefetch: Batches unsettled at once.
        loop: To share; None: one of its own.
        store: URL of an object store to which versions also go; None: to none.
        step_s: Seconds that a step takes.

    Raises:
        AstraflowError: What registering, publishing and acknowledging raise.
    """
    layout = Layout.of([("w", Dtype.F32, (_SIZE,))])
    publisher = WeightPublisher(PolicyId(policy_id), layout)
    batches: list[TrainerBatch] = []
    with WeightServer(publisher, loop=loop) as server:
        register = RegisterTrainer(
            policy_id=PolicyId(policy_id),
            name=f"trainer-{policy_id}",
            contract=Contract(),
            groups_per_batch=groups_per_batch,
            weight_endpoints=(WeightEndpoint(rank=0, endpoint=server.endpoint),),
        )
        with TrainerClient(
            hub=hub, token=token, register=register, patience_s=5.0, loop=loop
        ) as client:
            client.on_transfer_token(server.set_transfer_token)
            with ExitStack() as stack:
                writer = None
                if store is not None:
                    writer = stack.enter_context(
                        ObjectWriter(publisher, store, client.publish_version)
                    )

                def publish(step: int) -> None:
                    client.publish_version(publisher.publish(step, _weights(step), step=step))
                    if writer is not None:
                        writer.wake()

                publish(0)
                for step, batch in enumerate(client.batches(prefetch=prefetch), start=1):
                    batches.append(batch)
                    began = time.perf_counter()
                    time.sleep(step_s)
                    publish(step)
                    client.ack(
                        batch.header.batch_id,
                        BatchOutcome.CONSUMED,
                        step=step,
                        wait_s=batch.wait_s,
                        train_s=time.perf_counter() - began,
                    )
            return Trained(batches=tuple(batches), end=client.end_of_data)


def _weights(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full(_SIZE, step, np.float32).view(np.uint32)}

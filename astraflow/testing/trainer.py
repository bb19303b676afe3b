"""A trainer without a model: its weights count the steps."""

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from astraflow.client.loop_thread import LoopThread
from astraflow.client.trainer import TrainerBatch, TrainerClient
from astraflow.core.batches import BatchOutcome, EndOfData
from astraflow.core.ids import PolicyId
from astraflow.core.members import Contract, RegisterTrainer
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import WeightEndpoint
from astraflow.weights.publish.object_store import ObjectWriter
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import WeightServer

_SIZE = 100


VersionWeights: TypeAlias = tuple[Layout, Callable[[int], Mapping[str, np.ndarray]]]
"""The layout of a model, and what makes the tensors of a version, as bits by name."""


def counting() -> VersionWeights:
    """Return weights whose version n is the tensor `w`, f32[100], filled with n."""
    layout = Layout.of([("w", Dtype.F32, (_SIZE,))])
    return layout, lambda version: {"w": np.full(_SIZE, version, np.float32).view(np.uint32)}


def flickering(layout: Layout, tensors: Mapping[str, np.ndarray]) -> VersionWeights:
    """Return a model's own tensors; in odd versions the lowest bit of one element differs."""
    name, old = next(iter(tensors.items()))

    def make(version: int) -> Mapping[str, np.ndarray]:
        new = old.copy()
        new.reshape(-1)[:1] ^= version % 2
        return {**tensors, name: new}

    return layout, make


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
    weights: VersionWeights | None = None,
) -> Trained:
    """Take batches until the data ends, and publish a version after each.

    Args:
        hub: host:port.
        token: The run's join token.
        policy_id: Which policy.
        groups_per_batch: As the recipe has it.
        prefetch: Batches unsettled at once.
        loop: To share; None: one of its own.
        store: URL of an object store to which versions also go; None: to none.
        step_s: Seconds that a step takes.
        weights: Of its versions; None: `counting`.

    Raises:
        AstraflowError: What registering, publishing and acknowledging raise.
    """
    name = PolicyId(policy_id)
    layout, make = weights or counting()
    publisher = WeightPublisher(name, layout)
    with (
        WeightServer(publisher, loop=loop) as server,
        TrainerClient(
            hub=hub,
            token=token,
            register=_registration(name, groups_per_batch, server.endpoint),
            patience_s=5.0,
            loop=loop,
        ) as client,
        _writing(publisher, client, store) as writer,
    ):
        client.on_transfer_token(server.set_transfer_token)
        publisher.sign_with(client.registration.signing_seed)
        batches: list[TrainerBatch] = []

        def publish(step: int) -> None:
            client.publish_version(publisher.publish(step, make(step), step=step))
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
        end = client.end_of_data
        if end is not None:
            client.stay()
        return Trained(batches=tuple(batches), end=end)


def _registration(policy_id: PolicyId, groups_per_batch: int, endpoint: str) -> RegisterTrainer:
    return RegisterTrainer(
        policy_id=policy_id,
        name=f"trainer-{policy_id}",
        contract=Contract(),
        groups_per_batch=groups_per_batch,
        weight_endpoints=(WeightEndpoint(rank=0, endpoint=endpoint),),
    )


@contextmanager
def _writing(
    publisher: WeightPublisher, client: TrainerClient, store: str | None
) -> Generator[ObjectWriter | None]:
    """Write versions to an object store, where there is one."""
    if store is None:
        yield None
        return
    with ObjectWriter(publisher, store, client.publish_version) as writer:
        yield writer

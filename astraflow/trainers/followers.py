"""Followers: what goes on beside training once a version was announced."""

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import cast

import structlog

from astraflow.client.trainer import TrainerClient
from astraflow.config.recipe import Broadcast, Trainer
from astraflow.rpc.address import split_address
from astraflow.trainers.joining import TrainerPlace
from astraflow.trainers.origin import Followers
from astraflow.weights.publish.background import ExtraPatches, Scrub
from astraflow.weights.publish.object_store import ObjectWriter
from astraflow.weights.publish.publisher import WeightPublisher

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@contextmanager
def followed(
    publisher: WeightPublisher, client: TrainerClient, settings: Trainer, place: TrainerPlace
) -> Generator[tuple[Followers, ...]]:
    """Let versions gain patches beside training, be looked after, and go other ways too."""
    with ExitStack() as followers:
        scrub = followers.enter_context(Scrub(publisher, damaged=client.order_publish))
        client.on_damage_report(scrub.check_now)
        others: tuple[Followers, ...] = (scrub,)
        if settings.broadcast is not None:
            others = (followers.enter_context(_broadcaster(publisher, settings, place)), *others)
        look = None
        url = store_url(settings, client.registration.run_id)
        if url is not None:
            writer = followers.enter_context(ObjectWriter(publisher, url, client.publish_version))
            log.info("versions also go to an object store", url=url)
            others, look = (*others, writer), writer.note_patches
        if publisher.history.shard_layout.shard.count == 1:
            # Of shards a patch is of use once all ranks have it: none speaks for the others.
            gains = ExtraPatches(publisher, client.publish_version, then=look)
            others = (*others, followers.enter_context(gains))
        yield others


def store_url(settings: Trainer, run_id: str) -> str | None:
    """Return the folder of a run in the object store of a trainer; None: it has none."""
    return None if settings.store is None else f"{settings.store.rstrip('/')}/{run_id}"


def _broadcaster(
    publisher: WeightPublisher, settings: Trainer, place: TrainerPlace
) -> AbstractContextManager[Followers]:
    from astraflow.weights.publish.broadcast import (  # noqa: PLC0415 - loads torch
        Broadcaster,
        rendezvous,
    )

    where = rendezvous(cast("Broadcast", settings.broadcast), host=split_address(place.listen)[0])
    return Broadcaster(publisher, where)

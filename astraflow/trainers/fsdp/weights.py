"""The weights of a sharded model, published: every rank encodes and serves its own rows."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Layout
from astraflow.core.versions import VersionInfo
from astraflow.trainers.fsdp.ranks import Ranks
from astraflow.weights.patches.layouts import Shard
from astraflow.weights.patches.patch import make_patch
from astraflow.weights.publish.publisher import WeightPublisher, combined


def shard_publisher(policy_id: PolicyId, layout: Layout, ranks: Ranks) -> WeightPublisher:
    shard = Shard(rank=ranks.shard_rank, count=ranks.shard_count)
    return WeightPublisher(policy_id, layout, shard=shard)


def published_rows(parameters: Iterable[tuple[str, Tensor]], ranks: Ranks) -> dict[str, Tensor]:
    """Return this rank's rows of what is published, by name; every rank calls it."""
    return {name: ranks.rows_of(each) for name, each in parameters}


def publish_shard(
    publisher: WeightPublisher,
    tensors: Mapping[str, Any],
    ranks: Ranks,
    *,
    version: int,
    step: int,
    restored_from: int | None = None,
) -> VersionInfo:
    """Publish the rows of this rank with those of all others; every rank calls it.

    Nothing is gathered but digests. A version is returned once all ranks can serve it, so what is
    announced is whole. Nobody reads of a rank whose rows another one publishes.

    Returns:
        What the run is told, the same on every rank.

    Raises:
        AstraflowError: What publishing raises, on every rank that of the lowest one.
    """
    if ranks.all_reduce_max(int(publisher.is_damaged)):
        publisher.is_damaged = True
    info, problem = None, None
    try:
        info = publisher.publish(version, tensors, step=step, restored_from=restored_from)
    except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
        problem = error
    ranks.agree(problem)

    def told(own: VersionInfo | None) -> list[VersionInfo]:
        """Return what the ranks whose rows are published have, by rank."""
        found = ranks.all_gather_object(own if ranks.publishes else None)
        return [each for each in found if each is not None]

    infos = told(info)
    are_whole = [any(patch.base_version is None for patch in each.patches) for each in infos]
    if any(are_whole) and not all(are_whole):
        # Each rank chooses by itself, by what its rows changed and by who reads them, and shards
        # belong together when all come from one base: what is to be had from nothing of one rank
        # is so of all, also where it is the only way to the version.
        if info is not None and all(patch.base_version is not None for patch in info.patches):
            patch = make_patch(publisher.history, None, info.version)
            publisher.store.offer([patch])
            info = replace(info, patches=(*info.patches, patch.info))
        infos = told(info)
    return combined(infos)

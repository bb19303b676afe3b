"""The ranks of one trainer: process groups, mesh, collectives, and what fails on one alone."""

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any, Final, Literal, Self, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from astraflow.config.policies import Fsdp
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.modules import device_of
from astraflow.trainers.context_parallel import ContextParallel, RowGroup
from astraflow.trainers.expert_parallel import ExpertParallel
from astraflow.trainers.peers import Peers
from astraflow.trainers.tensor_parallel import TensorParallel
from astraflow.trainers.tensors import local, whole

Result = TypeVar("Result")

# While a trainer waits for a batch its other ranks wait for it. A rank that dies closes its
# connections, which the others notice at once.
_WAIT = timedelta(days=14)

# Dimensions of meshes.
_REPLICATE, _SHARD, _EXPERT, _TENSOR = "replicate", "shard", "expert", "tensor"
_DATA, _CONTEXT = "data", "context"


class Ranks(Peers):
    """This process among the ranks of its trainer.

    Every method is called by all ranks in the same order.

    Attributes:
        rank: 0 .. count - 1.
        group: Over which they tell each other.
        context: Those that have the same rows as this rank, a part of each; None: nobody.
        tensor: Those that have the same rows, and a part of every matrix each; None: nobody.
        experts: Those that have some of a layer's experts each; None: nobody.
    """

    def __init__(self, *, device: torch.device, fsdp: Fsdp) -> None:
        """Join the other ranks; the default process group is there.

        Raises:
            AstraflowError: INVALID_FIELD when the ranks cannot be shared out so.
        """
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        replicas, context, tensor = fsdp.replicas, fsdp.context_parallel, fsdp.tensor_parallel
        expert = fsdp.expert_parallel
        if self.count % (replicas * context * tensor) or self.count % (replicas * expert):
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"{self.count} ranks make no {replicas} replicas of {context} x {tensor} ranks, or "
                f"of {expert} with a part of the experts; take a trainer.fsdp.replicas, "
                "context_parallel and tensor_parallel whose product divides trainer.ranks, as that "
                "of replicas and expert_parallel does",
            )
        self.device = device
        make = partial(init_device_mesh, device.type)
        # A parameter is cut over the second dimension; one of a block, or of experts, over two
        # where these are.
        self._mesh: DeviceMesh = make(
            (replicas, self.count // replicas), mesh_dim_names=(_REPLICATE, _SHARD)
        )
        self._block_mesh = self._expert_mesh = self._mesh
        self.context: ContextParallel | None = None
        self.tensor: TensorParallel | None = None
        self.experts: ExpertParallel | None = None
        self._sharing_count = context * tensor
        if tensor > 1:
            shape = (replicas, self.count // replicas // tensor, tensor)
            self._block_mesh = make(shape, mesh_dim_names=(_REPLICATE, _SHARD, _TENSOR))
            self.tensor = TensorParallel(self._block_mesh[_TENSOR])
        if expert > 1:
            shape = (replicas, self.count // replicas // expert, expert, 1)
            names = (_REPLICATE, _SHARD, _EXPERT, _TENSOR)
            self._expert_mesh = make(shape, mesh_dim_names=names)
            self.experts = ExpertParallel(self._expert_mesh[_EXPERT], self._expert_mesh[_TENSOR])
        if context > 1:
            shape = (self.count // self._sharing_count, context, tensor)
            rows = make(shape, mesh_dim_names=(_DATA, _CONTEXT, _TENSOR))
            self.context = ContextParallel(rows.get_group(_CONTEXT))
        self._row_group: dist.ProcessGroup | None = None
        if self._sharing_count > 1:
            # Those that share this rank's rows.
            starts = range(0, self.count, self._sharing_count)
            groups = [_host_group([*range(at, at + self._sharing_count)]) for at in starts]
            self._row_group = groups[self.data_rank]
        # What is told beside the weights stays on the host, and may be waited for for long.
        self.group = _host_group()

    def beside(self) -> Self:
        """Return the same ranks for another thread of each, which speak among themselves."""
        others = copy(self)
        others.group = _host_group()
        return others

    @property
    def data_rank(self) -> int:
        """Which share of every batch this rank has."""
        return self.rank // self._sharing_count

    @property
    def data_count(self) -> int:
        return self.count // self._sharing_count

    @property
    def reads_batches(self) -> bool:
        return self.rank % self._sharing_count == 0

    def shared_rows(self, rows: Result | None) -> Result:
        """Return what the rank that reads has, on all that share its rows."""
        if self._row_group is None:
            return cast("Result", rows)
        box = [rows]
        first = self.data_rank * self._sharing_count
        dist.broadcast_object_list(box, src=first, group=self._row_group)
        return cast("Result", box[0])

    @property
    def row_groups(self) -> Sequence[RowGroup]:
        """Those that have the same rows as this rank."""
        return [each for each in (self.context, self.tensor) if each is not None]

    def shard_mesh(self, of: Literal["model", "block", "experts"]) -> DeviceMesh:
        """Return what `fully_shard` takes for the model, one of its blocks, or experts of these."""
        meshes = {"model": self._mesh, "block": self._block_mesh, "experts": self._expert_mesh}
        mesh = meshes[of]
        return mesh[_REPLICATE, _SHARD] if mesh.size(0) > 1 else mesh[_SHARD]

    @property
    def shard_rank(self) -> int:
        return self._mesh.get_local_rank(_SHARD)

    @property
    def shard_count(self) -> int:
        return self._mesh.size(1)

    @property
    def publishes(self) -> bool:
        """Whether this rank's shard is the one that is published and saved."""
        return self._mesh.get_local_rank(_REPLICATE) == 0

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a tensor: `shard_count` shards, as `torch.chunk` cuts them.

        Those of blocks are gathered where blocks are cut otherwise: all ranks call this together.
        """
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is None or {_TENSOR, _EXPERT}.isdisjoint(mesh.mesh_dim_names):
            return local(tensor)
        all_rows = whole(tensor.detach())
        share = -(-len(all_rows) // self.shard_count)
        return all_rows[share * self.shard_rank :][:share].clone()

    def broadcast(self, said: object = None) -> Any:
        """Return what rank 0 says."""
        box = [said]
        with naming_lost_ranks():
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def all_gather_object(self, said: Result) -> list[Result]:
        heard: list[Any] = [None] * self.count
        with naming_lost_ranks():
            cast("Any", dist).all_gather_object(heard, said, group=self.group)
        return heard

    def wait(self) -> None:
        """Wait until all ranks have come here."""
        self.all_gather_object(None)

    def agree(self, problem: Exception | None) -> None:
        """Raise on every rank what went wrong on one of them: the lowest one's.

        Raises:
            AstraflowError: That.
        """
        said: tuple[str, str, Mapping[str, str]] | None = None
        if isinstance(problem, AstraflowError):
            said = str(problem.reason), problem.message, problem.metadata
        elif problem is not None:
            said = str(Reason.INTERNAL), repr(problem), {}
        for rank, each in enumerate(self.all_gather_object(said)):
            if each is not None:
                reason, message, metadata = each
                raise AstraflowError(
                    Reason(reason), f"rank {rank}: {message}", metadata=metadata
                ) from problem

    def all_reduce_max(self, count: int) -> int:
        return max(self.all_gather_object(count))

    def all_reduce_sum(self, value: float) -> float:
        """Return the sum over all ranks; the same bits on each."""
        return float(sum(self._by_share(value)))

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        return np.concatenate(self._by_share(values))

    def merged(self, metrics: Mapping[str, float], *, weight: float) -> Mapping[str, float]:
        """Return means of all ranks' metrics, by weight; of a name that ends with max the most.

        A rank without a name does not count for its mean.
        """
        said = self._by_share((dict(metrics), weight))
        names = dict.fromkeys(name for each, _ in said for name in each)
        return {name: _mean(name, [(m[name], w) for m, w in said if name in m]) for name in names}

    def _by_share(self, said: Result) -> list[Result]:
        """Return what the ranks say, once of those that share rows and so say the same."""
        return self.all_gather_object(said)[:: self._sharing_count]


def _host_group(ranks: list[int] | None = None) -> dist.ProcessGroup:
    """Return a group of ranks that speak over the host, for whatever waits for long; None: all."""
    return cast("Any", dist).new_group(ranks, backend="gloo", timeout=_WAIT)


def _mean(name: str, found: Sequence[tuple[float, float]]) -> float:
    if name.endswith("max"):
        return max(value for value, _ in found)
    weight = sum(each for _, each in found)
    return sum(value * each for value, each in found) / weight if weight else found[0][0]


@contextmanager
def naming_lost_ranks() -> Generator[None]:
    """Say of a collective that fails that a rank is gone.

    Raises:
        AstraflowError: MEMBER_LOST.
    """
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        # gloo has no type of its own for a connection that broke.
        words = ("gloo", "connection", "peer", "timed out", "nccl")
        is_named = any(each in str(error).lower() for each in words)
        if not (is_named or isinstance(error, dist.DistError)):
            raise
        raise AstraflowError(
            Reason.MEMBER_LOST,
            f"rank {os.environ.get('RANK', '?')} lost another rank of its trainer, whose log says "
            f"why; the trainer goes on from its last checkpoint once it is started again ({error})",
        ) from error


@contextmanager
def joined_ranks(*, device: str, fsdp: Fsdp) -> Generator[Ranks]:
    """Join the ranks that torchrun started; `cuda` is the device of the local rank.

    Raises:
        AstraflowError: INVALID_FIELD; MEMBER_LOST when a rank did not come.
    """
    here = local_device(device)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    with naming_lost_ranks():
        dist.init_process_group("nccl" if here.type == "cuda" else "gloo")
    try:
        with naming_lost_ranks():
            ranks = Ranks(device=here, fsdp=fsdp)
        yield ranks
    finally:
        dist.destroy_process_group()


def local_device(name: str) -> torch.device:
    """Return the device of this rank: of cuda without a number the one of its local rank."""
    device = device_of(name, key="trainer.device")
    if name in ("auto", "cuda") and device.type == "cuda":
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


_ALONE: Final = frozenset({Reason.MEMBER_LOST, Reason.MEMORY_EXCEEDED})


class RanksApartError(Exception):
    """A rank failed alone: the others wait in a collective for what never comes.

    Unlike a batch that all ranks refuse it ends the trainer, whatever the recipe says of failed
    steps.
    """

    def __init__(self, error: AstraflowError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def together() -> Generator[None]:
    """Tell errors that all ranks have from those of one.

    Raises:
        RanksApartError: For what happens to one rank alone.
        AstraflowError: For what all ranks agreed on, or found in the same numbers.
    """
    try:
        yield
    except AstraflowError as error:
        if error.reason in _ALONE:
            raise RanksApartError(error) from error
        raise

"""GPUs: which process of a run computes on which of them, and what part of each it may take.

`plan_gpus` is pure: demands in, a plan or a refusal with its arithmetic out. The processes of a
plan never see a GPU that is not theirs.
"""

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

from astraflow.config.recipe import Gpus, PolicyConfig, Recipe
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.devices import VISIBLE, Machine

_GIB: Final = 1 << 30

# Of a GPU; the rest is for what drivers and libraries take beside their allocators.
_USABLE: Final = 0.9

# f32 master weights, their gradient, and two moments of AdamW.
_TRAINER_NBYTES: Final = 16

_SERVED_NBYTES: Final = {"auto": 2, "bf16": 2, "f32": 4}

_ALLOCATOR: Final = "PYTORCH_CUDA_ALLOC_CONF"

_FRACTION: Final = "per_process_memory_fraction"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDemand:
    """What one process computes on.

    Attributes:
        name: Of the process.
        is_trainer: Whether its parts are ranks; else they are servers.
        part_count: Ranks, each on a GPU of its own, or servers.
        width: GPUs of each part.
        first: Number of the GPU that the recipe names; None: any.
        memory: Part of each of its GPUs that a server takes; None: what is left.
        nbytes: That a part holds on each of its GPUs at least; 0: not known.
    """

    name: str
    is_trainer: bool = False
    part_count: int = 1
    width: int = 1
    first: int | None = None
    memory: float | None = None
    nbytes: int = 0

    @property
    def gpu_count(self) -> int:
        """GPUs that it fills alone."""
        return self.width if self.first is not None else self.part_count * self.width

    def __str__(self) -> str:
        """Say how many GPUs it takes, as in a sum."""
        parts = f"{self.part_count} x " if self.part_count > 1 and not self.is_trainer else ""
        each = self.part_count if self.is_trainer else self.width
        return f"{self.name} {parts}{each}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShare:
    """What one process of a plan has.

    Attributes:
        name: Of the process.
        machine: On which it is to be, from 0: that of the launcher.
        gpus: Numbers on its machine; servers are dealt over them in this order.
        memory: Part of each GPU that one rank or server may take; None: as if it were alone.
        is_named: Whether the recipe names the GPU, so that the process has to see all of them.
    """

    name: str
    machine: int
    gpus: tuple[int, ...]
    memory: float | None = None
    is_named: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """Who computes where.

    Attributes:
        layout: apart: no GPU has two processes.
        names: Of the GPUs of a machine, as `CUDA_VISIBLE_DEVICES` has them.
        machine_count: Machines, each with so many.
        shares: Of the processes that compute on GPUs.
    """

    layout: Literal["apart", "colocated"]
    names: tuple[str, ...]
    machine_count: int
    shares: tuple[GpuShare, ...]

    def share(self, name: str) -> GpuShare | None:
        """Return what a process has; None: it computes on no GPU."""
        return next((each for each in self.shares if each.name == name), None)

    def free(self, machine: int = 0) -> Sequence[int]:
        """Return the GPUs of a machine that no process has."""
        held = {gpu for each in self.shares if each.machine == machine for gpu in each.gpus}
        return [gpu for gpu in range(len(self.names)) if gpu not in held]

    def visible(self, gpus: Sequence[int]) -> str:
        """Return GPUs as `CUDA_VISIBLE_DEVICES` has them."""
        return ",".join(self.names[gpu] for gpu in gpus)

    def lines(self) -> Sequence[str]:
        """Return the plan for people."""
        total, idle = len(self.names) * self.machine_count, sum(map(len, self._free()))
        where = "" if self.machine_count == 1 else f" on {self.machine_count} machines"
        text = [f"GPUs: {total}{where}, {self.layout}, {idle} idle"]
        for each in self.shares:
            at = "" if self.machine_count == 1 else f"machine {each.machine}, "
            memory = "" if each.memory is None else f", {each.memory:g} of the memory per part"
            text.append(f"  {each.name}: {at}{self.visible(each.gpus)}{memory}")
        return text

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {**asdict(self), "free": self._free()}

    def _free(self) -> Sequence[Sequence[int]]:
        return [self.free(machine) for machine in range(self.machine_count)]


def plan_gpus(
    demands: Sequence[GpuDemand], settings: Gpus, *, names: Sequence[str], gpu_nbytes: int = 0
) -> GpuPlan:
    """Give every process its GPUs, and a part of their memory where it shares them.

    Trainers come first, then nodes, in their order. Apart, each rank and each server has GPUs of
    its own. Colocated, each takes those with the fewest processes; on a GPU that trainers share
    with servers, trainers have `trainer_memory`, and servers share what is left of .9.

    Args:
        demands: Of the processes.
        settings: Of the recipe; `count` is that of `names` already.
        names: GPUs of one machine, as `CUDA_VISIBLE_DEVICES` has them.
        gpu_nbytes: Memory of a GPU; 0: not known.

    Raises:
        AstraflowError: INVALID_FIELD or MEMORY_EXCEEDED, with the arithmetic.

    Example:
        A trainer of 2 ranks and two servers of 2 GPUs each are 6. On 8 they are apart: 0 and 1, 2
        and 3, 4 and 5. On 4 they are colocated: the trainer on 0 and 1 and the servers on 2 and 3
        and on 0 and 1, where the trainer has .45 of the memory and the server .45.
    """
    demands = sorted(demands, key=lambda each: not each.is_trainer)
    _require_width(demands, len(names))
    layouts = ("apart", "colocated") if settings.layout == "auto" else (settings.layout,)
    refusals: list[AstraflowError] = []
    for layout in layouts:
        try:
            lay_out = _apart if layout == "apart" else _colocated
            shares = lay_out(demands, len(names), settings.machines)
            shares = _with_memory(demands, shares, settings, gpu_nbytes)
        except AstraflowError as refused:
            refusals.append(refused)
            continue
        by_name = {each.name: each for each in shares}
        return GpuPlan(
            layout=layout,
            names=tuple(names),
            machine_count=settings.machines,
            shares=tuple(by_name[each.name] for each in demands),
        )
    whys = [each.message.removeprefix("gpus: ") for each in refusals]
    raise AstraflowError(refusals[-1].reason, f"gpus: {'. Colocated: '.join(whys)}")


def _require_width(demands: Sequence[GpuDemand], gpu_count: int) -> None:
    """Reject what no layout can hold, as it has to be on one machine."""
    for each in demands:
        if each.is_trainer and each.part_count > gpu_count:
            _refuse(
                f"{each.name} has {each.part_count} ranks, each needs a GPU of its own, and a"
                f" machine has {gpu_count}; docs/ranks.md has ranks on several machines"
            )
        if not each.is_trainer and each.width > gpu_count:
            _refuse(
                f"{each.name} has servers of tensor_parallel {each.width}, and a machine has"
                f" {gpu_count}"
            )
        if each.first is None:
            continue
        if each.is_trainer and each.part_count > 1:
            _refuse(f"{each.name} names one GPU for {each.part_count} ranks: leave device out")
        if each.first + each.width > gpu_count:
            last = each.first + each.width - 1
            _refuse(f"{each.name} needs GPU {last}, and the last one is {gpu_count - 1}")


def _apart(demands: Sequence[GpuDemand], gpu_count: int, machine_count: int) -> Sequence[GpuShare]:
    needed, there = sum(each.gpu_count for each in demands), gpu_count * machine_count
    if needed > there:
        text = " + ".join(map(str, demands))
        _refuse(f"apart needs {needed} GPUs, and there are {there}: {text} = {needed}")
    free = [list(range(gpu_count)) for _ in range(machine_count)]
    shares: list[GpuShare] = []
    # The largest first where several machines have to be filled.
    others = [each for each in demands if each.first is None]
    if machine_count > 1:
        others.sort(key=lambda each: -each.gpu_count)
    for each in [each for each in demands if each.first is not None]:
        share = _named(each)
        if not set(share.gpus) <= set(free[0]):
            _refuse(f"{each.name} names GPU {each.first}, which another process has")
        free[0] = [gpu for gpu in free[0] if gpu not in share.gpus]
        shares.append(share)
    for each in others:
        machine = next((i for i, left in enumerate(free) if len(left) >= each.gpu_count), None)
        if machine is None:
            left = " + ".join(str(len(gpus)) for gpus in free)
            _refuse(f"apart, {each.name} needs {each.gpu_count} GPUs of one machine; left: {left}")
        gpus, free[machine] = free[machine][: each.gpu_count], free[machine][each.gpu_count :]
        shares.append(GpuShare(name=each.name, machine=machine, gpus=tuple(gpus)))
    return shares


def _named(demand: GpuDemand) -> GpuShare:
    first = demand.first or 0
    gpus = tuple(range(first, first + demand.width))
    return GpuShare(name=demand.name, machine=0, gpus=gpus, is_named=True)


def _colocated(
    demands: Sequence[GpuDemand], gpu_count: int, machine_count: int
) -> Sequence[GpuShare]:
    load: Counter[tuple[int, int]] = Counter()
    shares: list[GpuShare] = []
    for each in sorted(demands, key=lambda each: each.first is None):
        share = _named(each)
        if each.first is None:
            options = [_least(each, load, machine, gpu_count) for machine in range(machine_count)]
            share = min(options, key=lambda one: sum(load[one.machine, gpu] for gpu in one.gpus))
        load.update(_loads(each, share))
        shares.append(share)
    return shares


def _least(
    demand: GpuDemand, load: Mapping[tuple[int, int], int], machine: int, gpu_count: int
) -> GpuShare:
    """Return the GPUs of a machine that do least, in groups of the width of a part."""
    width = demand.width
    groups = [range(first, first + width) for first in range(0, gpu_count - width + 1, width)]
    groups.sort(key=lambda group: sum(load.get((machine, gpu), 0) for gpu in group))
    chosen = sorted(groups[: demand.part_count], key=lambda group: group.start)
    gpus = tuple(gpu for group in chosen for gpu in group)
    return GpuShare(name=demand.name, machine=machine, gpus=gpus)


def _loads(demand: GpuDemand, share: GpuShare) -> Counter[tuple[int, int]]:
    """Return how many parts of a process are on each of its GPUs; parts are dealt in turn."""
    groups = len(share.gpus) // demand.width
    counts: Counter[tuple[int, int]] = Counter()
    for part in range(demand.part_count):
        first = part % groups * demand.width
        counts.update((share.machine, gpu) for gpu in share.gpus[first : first + demand.width])
    return counts


def _with_memory(
    demands: Sequence[GpuDemand], shares: Sequence[GpuShare], settings: Gpus, gpu_nbytes: int
) -> Sequence[GpuShare]:
    """Return the shares with what each part may take of a GPU's memory."""
    by_name = {each.name: each for each in demands}
    ranks: Counter[tuple[int, int]] = Counter()
    servers: Counter[tuple[int, int]] = Counter()
    for share in shares:
        demand = by_name[share.name]
        (ranks if demand.is_trainer else servers).update(_loads(demand, share))
    known = next((each.memory for each in demands if each.memory is not None), None)
    done: list[GpuShare] = []
    for share in shares:
        demand = by_name[share.name]
        parts = [
            _part(demand, ranks[at], servers[at], settings, known, where=f"GPU {at[1]}")
            for at in ((share.machine, gpu) for gpu in share.gpus)
        ]
        memory = min((each for each in parts if each is not None), default=None)
        there = gpu_nbytes * (1.0 if memory is None else memory)
        if gpu_nbytes and demand.nbytes > there:
            raise AstraflowError(
                Reason.MEMORY_EXCEEDED,
                f"gpus: {demand.name} needs {demand.nbytes / _GIB:.1f} GiB of each of its GPUs at"
                f" least, and has {1.0 if memory is None else memory:g} of"
                f" {gpu_nbytes / _GIB:.1f} = {there / _GIB:.1f}",
            )
        done.append(replace(share, memory=memory))
    return done


def _part(
    demand: GpuDemand,
    rank_count: int,
    server_count: int,
    settings: Gpus,
    known: float | None,
    *,
    where: str,
) -> float | None:
    """Return what one rank or server may take of one GPU; None: it is alone there.

    Args:
        demand: Of its process.
        rank_count: On the GPU.
        server_count: On the GPU.
        settings: Of the recipe.
        known: What the recipe gives every server; None: nothing.
        where: The GPU, for people.
    """
    if rank_count + server_count == 1:
        return None if demand.is_trainer else known
    trainers = 0.0
    if rank_count:
        trainers = settings.trainer_memory or 0.0
        if not trainers and server_count:
            trainers = _USABLE / 2 if known is None else _USABLE - server_count * known
        trainers = trainers if server_count else _USABLE
    servers = _USABLE - trainers if known is None else server_count * known
    if not server_count:
        servers = 0.0
    is_empty = (rank_count and trainers <= 0) or (server_count and servers <= 0)
    if is_empty or trainers + servers > 1 + 1e-9:
        _refuse(
            f"the memory of {where} does not suffice: {rank_count} ranks {trainers:.2f} +"
            f" {server_count} servers {servers:.2f} = {trainers + servers:.2f}, and each needs some"
            " of 1 (gpus.trainer_memory, raas.engine.memory)"
        )
    part = trainers / rank_count if demand.is_trainer else servers / server_count
    # Rounded down: shares that were rounded up would not add up.
    return int(part * 1000 + 1e-6) / 1000


def _refuse(message: str) -> NoReturn:
    raise AstraflowError(Reason.INVALID_FIELD, f"gpus: {message}")


def trainer_nbytes(policy: PolicyConfig, parameter_count: int) -> int:
    """Return what all ranks of a trainer hold at least of its model, gradients and optimizer."""
    if policy.model.lora is not None:
        return 4 * parameter_count
    return _TRAINER_NBYTES * parameter_count * (2 if policy.trainer.critic else 1)


def machines_of(policy: PolicyConfig, ranks_per_node: int | None) -> int:
    """Return on how many machines a trainer's ranks are.

    Raises:
        AstraflowError: INVALID_FIELD when they cannot be shared out equally.
    """
    ranks = policy.trainer.ranks
    if ranks_per_node is None or ranks <= ranks_per_node:
        return 1
    if ranks % ranks_per_node:
        _refuse(
            f"{ranks} ranks cannot be shared out equally, {ranks_per_node} to a machine; take a"
            " multiple of that (trainer.ranks)"
        )
    return ranks // ranks_per_node


def gpu_demands(
    recipe: Recipe, sizes: Mapping[str, int], *, ranks_per_node: int | None = None
) -> Sequence[GpuDemand]:
    """Return what the processes of a recipe compute on.

    Args:
        recipe: Resolved.
        sizes: Parameters of the model of each policy; those left out are not known.
        ranks_per_node: A trainer with more of them is a process `trainer-NAME.0`, `.1` and so on
            on each of its machines; None: it is on one machine.
    """
    demands: list[GpuDemand] = []
    for name, policy in recipe.policies.items():
        if name in recipe.http.trainers or policy.trainer.device == "cpu":
            continue
        ranks, machines = policy.trainer.ranks, machines_of(policy, ranks_per_node)
        whole = trainer_nbytes(policy, sizes.get(name, 0)) * policy.trainer.fsdp.replicas
        demands += [
            GpuDemand(
                name=f"trainer-{name}" if machines == 1 else f"trainer-{name}.{place}",
                is_trainer=True,
                part_count=ranks // machines,
                first=_first(policy.trainer.device),
                nbytes=whole // ranks,
            )
            for place in range(machines)
        ]
    engine = recipe.raas.engine
    if engine.device == "cpu" or engine.url is not None or engine.kind == "none":
        return demands
    # One policy for each model that a node holds: adapters of one share it.
    models: dict[str, str] = {}
    for name, policy in recipe.policies.items():
        shared = policy.model.model_dump_json(exclude={"lora"})
        models.setdefault(name if policy.model.lora is None else shared, name)
    is_embedded = engine.kind == "embedded"
    nbytes = [_SERVED_NBYTES[engine.dtype] * sizes.get(each, 0) for each in models.values()]
    node = GpuDemand(
        name="",
        # A node has all its own engines on one GPU.
        part_count=1 if is_embedded else len(models),
        width=engine.tensor_parallel,
        first=_first(engine.device),
        memory=engine.memory,
        nbytes=sum(nbytes) if is_embedded else max(nbytes) // engine.tensor_parallel,
    )
    return [*demands, *(replace(node, name=f"raas-{i}") for i in range(recipe.raas.count))]


def _first(device: str) -> int | None:
    kind, _, number = device.partition(":")
    return int(number) if kind == "cuda" and number.isdecimal() else None


def plan_recipe(
    recipe: Recipe,
    machine: Machine,
    sizes: Mapping[str, int] | None = None,
    *,
    ranks_per_node: int | None = None,
) -> GpuPlan | None:
    """Return the plan of a recipe; None: there are no GPUs to plan, or they are not to be planned.

    Args:
        recipe: Resolved.
        machine: That of the launcher.
        sizes: Parameters of the model of each policy; those left out are not known.
        ranks_per_node: As for `gpu_demands`.

    Raises:
        AstraflowError: What `plan_gpus` raises; INVALID_FIELD for more GPUs than there are.
    """
    found = machine.gpus if machine.has_gpus else ()
    count = len(found) if recipe.gpus.count is None else recipe.gpus.count
    if not count:
        return None
    if found and count > len(found):
        _refuse(f"count is {count}, and this machine has {len(found)}: {', '.join(found)}")
    names = found[:count] or tuple(map(str, range(count)))
    demands = gpu_demands(recipe, sizes or {}, ranks_per_node=ranks_per_node)
    return plan_gpus(demands, recipe.gpus, names=names, gpu_nbytes=machine.gpu_nbytes)


def node_demand(recipe: Recipe) -> GpuDemand | None:
    """Return what one node computes on; None: on no GPU."""
    raas = recipe.raas.model_copy(update={"count": 1})
    demand = gpu_demands(recipe.model_copy(update={"raas": raas}), {})[-1:]
    return None if not demand or demand[0].is_trainer else demand[0]


def spare_share(
    recipe: Recipe, plan: GpuPlan, held: Collection[tuple[int, int]]
) -> GpuShare | None:
    """Return what a node gets that joins later; None: nodes compute on no GPU.

    Args:
        recipe: Resolved.
        plan: Of its processes.
        held: Machines and GPUs of other nodes that joined later.

    Raises:
        AstraflowError: NOT_READY when too few are free.
    """
    demand = node_demand(recipe)
    if demand is None:
        return None
    most = 0
    for machine in range(plan.machine_count):
        free = tuple(gpu for gpu in plan.free(machine) if (machine, gpu) not in held)
        most = max(most, len(free))
        if len(free) >= demand.gpu_count:
            gpus = free[: demand.gpu_count]
            return GpuShare(name="", machine=machine, gpus=gpus, memory=demand.memory)
    raise AstraflowError(
        Reason.NOT_READY,
        f"a node takes {demand.gpu_count} GPUs, and of {len(plan.names)} {most} are free",
    )


def gpu_environment(
    plan: GpuPlan | None, share: GpuShare | None, *, is_torch: bool = False
) -> Mapping[str, str]:
    """Return what the environment of a process says of GPUs.

    Args:
        plan: Of the run; None: nothing is said.
        share: Of the process; without one it sees no GPU.
        is_torch: Whether torch computes in the process, and is to keep to its part of the memory.
    """
    if plan is None:
        return {}
    if share is None:
        return {VISIBLE: ""}
    gpus = range(len(plan.names)) if share.is_named else share.gpus
    said = {VISIBLE: plan.visible(gpus)}
    spec = find_spec("torch") if is_torch and share.memory is not None else None
    if spec is not None and spec.origin is not None:
        # A torch that does not know the option would end with an error.
        header = Path(spec.origin).parent / "include" / "c10" / "cuda" / "CUDAAllocatorConfig.h"
        if header.is_file() and _FRACTION in header.read_text(errors="replace"):
            options = [os.environ.get(_ALLOCATOR, ""), f"{_FRACTION}:{share.memory}"]
            said[_ALLOCATOR] = ",".join(filter(None, options))
    return said

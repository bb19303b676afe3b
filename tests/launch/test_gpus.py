"""Who computes on which GPU: layouts that are planned without overlap, and refused with why."""

import itertools
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import pytest

from astraflow.config.loader import load_recipe
from astraflow.config.recipe import Gpus, Recipe
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.devices import Machine
from astraflow.launch.gpus import (
    GpuDemand,
    GpuPlan,
    gpu_demands,
    gpu_environment,
    plan_gpus,
    plan_recipe,
    spare_share,
)

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A recipe in short: GPUs, layout, ranks of each policy, nodes and their servers' width."""

    gpus: int
    layout: str
    ranks: tuple[int, ...]
    nodes: int
    tp: int = 1
    memory: float | None = None
    trainer_memory: float | None = None
    machines: int = 1
    first: int | None = None
    plan: dict[str, str] | None = None
    refusal: str = ""

    @property
    def demands(self) -> list[GpuDemand]:
        trainers = [
            GpuDemand(name=f"trainer-{name}", is_trainer=True, part_count=count)
            for name, count in zip("abc", self.ranks, strict=False)
        ]
        nodes = [
            GpuDemand(
                name=f"raas-{index}",
                part_count=len(self.ranks),
                width=self.tp,
                memory=self.memory,
                first=self.first,
            )
            for index in range(self.nodes)
        ]
        return [*trainers, *nodes]

    def planned(self) -> GpuPlan:
        settings = Gpus(
            layout=self.layout,  # pyright: ignore[reportArgumentType]
            machines=self.machines,
            trainer_memory=self.trainer_memory,
        )
        return plan_gpus(self.demands, settings, names=[str(each) for each in range(self.gpus)])


def apart(gpus: int, ranks: tuple[int, ...], nodes: int, **more: object) -> Layout:
    return Layout(gpus=gpus, layout="apart", ranks=ranks, nodes=nodes, **more)  # pyright: ignore[reportArgumentType]


def colocated(gpus: int, ranks: tuple[int, ...], nodes: int, **more: object) -> Layout:
    return Layout(gpus=gpus, layout="colocated", ranks=ranks, nodes=nodes, **more)  # pyright: ignore[reportArgumentType]


def auto(gpus: int, ranks: tuple[int, ...], nodes: int, **more: object) -> Layout:
    return Layout(gpus=gpus, layout="auto", ranks=ranks, nodes=nodes, **more)  # pyright: ignore[reportArgumentType]


# A process, its GPUs, and the part of their memory of each of its ranks or servers.
LAYOUTS = (
    apart(2, (1,), 1, plan={"trainer-a": "0", "raas-0": "1"}),
    apart(4, (1,), 2, plan={"trainer-a": "0", "raas-0": "1", "raas-1": "2"}),
    apart(4, (2,), 1, tp=2, plan={"trainer-a": "0,1", "raas-0": "2,3"}),
    apart(8, (4,), 1, tp=4, plan={"trainer-a": "0,1,2,3", "raas-0": "4,5,6,7"}),
    apart(8, (4,), 4, memory=0.8, plan={"trainer-a": "0,1,2,3", "raas-3": "7 .8"}),
    apart(8, (2, 2), 1, tp=2, plan={"trainer-b": "2,3", "raas-0": "4,5,6,7"}),
    apart(6, (1, 1), 2, plan={"trainer-b": "1", "raas-0": "2,3", "raas-1": "4,5"}),
    apart(6, (1, 1, 1), 1, plan={"trainer-c": "2", "raas-0": "3,4,5"}),
    apart(8, (4,), 1, tp=4, first=0, plan={"trainer-a": "4,5,6,7", "raas-0": "0,1,2,3"}),
    apart(3, (1, 2), 0, plan={"trainer-a": "0", "trainer-b": "1,2"}),
    apart(4, (1, 4), 0, machines=2, plan={"trainer-b": "0,1,2,3", "trainer-a": "1:0"}),
    apart(8, (8,), 4, tp=2, machines=2, plan={"trainer-a": "0,1,2,3,4,5,6,7", "raas-0": "1:0,1"}),
    apart(1, (1,), 1, refusal="apart needs 2 GPUs, and there are 1: trainer-a 1 + raas-0 1 = 2"),
    apart(5, (1, 1), 2, refusal="needs 6 GPUs, and there are 5 ... raas-1 2 x 1 = 6"),
    apart(8, (4, 2), 1, tp=2, refusal="trainer-a 4 + trainer-b 2 + raas-0 2 x 2 = 10"),
    apart(2, (3,), 1, refusal="trainer-a has 3 ranks, each needs a GPU ... has 2"),
    apart(3, (1,), 1, tp=4, refusal="tensor_parallel 4, and a machine has 3"),
    apart(
        3, (1, 1), 1, tp=2, machines=2, refusal="raas-0 needs 4 GPUs of one machine; left: 3 + 3"
    ),
    apart(4, (1,), 2, first=1, refusal="names GPU 1, which another process has"),
    apart(4, (1,), 1, tp=2, first=3, refusal="raas-0 needs GPU 4, and the last one is 3"),
    colocated(1, (1,), 1, plan={"trainer-a": "0 .45", "raas-0": "0 .45"}),
    colocated(1, (1,), 2, plan={"trainer-a": "0 .45", "raas-0": "0 .225", "raas-1": "0 .225"}),
    colocated(8, (8,), 8, plan={"trainer-a": "0,1,2,3,4,5,6,7 .45", "raas-7": "7 .45"}),
    colocated(4, (4,), 1, tp=4, plan={"trainer-a": "0,1,2,3 .45", "raas-0": "0,1,2,3 .45"}),
    colocated(2, (2,), 1, memory=0.3, plan={"trainer-a": "0,1 .6", "raas-0": "0 .3"}),
    colocated(1, (1, 1, 1), 1, plan={"trainer-c": "0 .15", "raas-0": "0 .15"}),
    colocated(2, (1, 1), 1, trainer_memory=0.6, plan={"trainer-b": "1 .6", "raas-0": "0,1 .3"}),
    colocated(
        1, (1,), 1, memory=0.5, trainer_memory=0.6, refusal="1 ranks 0.60 + 1 servers 0.50 = 1.10"
    ),
    colocated(1, (1,), 2, memory=0.5, refusal="1 ranks -0.10 + 2 servers 1.00"),
    colocated(2, (4,), 1, refusal="4 ranks, each needs a GPU of its own"),
    colocated(2, (1,), 1, tp=4, refusal="tensor_parallel 4, and a machine has 2"),
    auto(2, (1,), 1, plan={"trainer-a": "0", "raas-0": "1"}),
    auto(2, (1,), 2, plan={"trainer-a": "0 .45", "raas-0": "1", "raas-1": "0 .45"}),
    auto(4, (2,), 2, tp=2, plan={"trainer-a": "0,1 .45", "raas-0": "2,3", "raas-1": "0,1 .45"}),
    auto(3, (1, 1), 1, plan={"trainer-b": "1", "raas-0": "0,2 .45"}),
    auto(2, (1,), 1, memory=0.95, first=0, plan={"trainer-a": "1", "raas-0": "0 .95"}),
    auto(1, (1,), 1, memory=0.95, refusal="apart needs 2 ... Colocated: the memory of GPU 0"),
)


def test_the_table_is_as_wide_as_it_says():
    assert len(LAYOUTS) >= 30
    assert {each.gpus for each in LAYOUTS} >= {1, 2, 3, 4, 5, 6, 8}
    assert {len(each.ranks) for each in LAYOUTS} == {1, 2, 3}
    assert {each.tp for each in LAYOUTS} == {1, 2, 4}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_is_planned_without_overlap_or_refused_with_the_arithmetic(layout: Layout):
    if layout.plan is None:
        with pytest.raises(AstraflowError) as caught:
            layout.planned()
        assert caught.value.reason is Reason.INVALID_FIELD
        for part in layout.refusal.split(" ... "):
            assert part in caught.value.message
        return
    plan = layout.planned()
    found = {each.name: _said(each.machine, each.gpus, each.memory) for each in plan.shares}
    assert found.items() >= layout.plan.items()
    assert list(found) == [each.name for each in layout.demands]
    _must_hold(layout, plan)


def _said(machine: int, gpus: tuple[int, ...], memory: float | None) -> str:
    where = f"{machine}:" if machine else ""
    part = "" if memory is None else f" {memory:g}".replace("0.", ".")
    return where + ",".join(map(str, gpus)) + part


def _must_hold(layout: Layout, plan: GpuPlan) -> None:
    """Whatever the plan: ranks are on different GPUs, servers are whole, memory adds up."""
    memory: Counter[tuple[int, int]] = Counter()
    count: Counter[tuple[int, int]] = Counter()
    for demand in layout.demands:
        share = plan.share(demand.name)
        assert share is not None
        assert set(share.gpus) <= set(range(layout.gpus))
        assert len(set(share.gpus)) == len(share.gpus)
        assert not len(share.gpus) % demand.width
        assert not demand.is_trainer or len(share.gpus) == demand.part_count
        groups = len(share.gpus) // demand.width
        for part in range(demand.part_count):
            first = part % groups * demand.width
            for gpu in share.gpus[first : first + demand.width]:
                count[share.machine, gpu] += 1
                memory[share.machine, gpu] += 1.0 if share.memory is None else share.memory
    assert max(memory.values()) <= 1
    if plan.layout == "apart":
        assert set(count.values()) == {1}


def test_every_small_layout_is_planned_or_refused_and_a_plan_holds():
    ways = itertools.product(
        range(1, 9),
        ("apart", "colocated", "auto"),
        ((1,), (2,), (4,), (1, 2), (2, 2), (1, 1, 1), (1, 2, 4)),
        (0, 1, 2, 5),
        (1, 2, 3, 4),
    )
    cases = [
        Layout(gpus=gpus, layout=layout, ranks=ranks, nodes=nodes, tp=tp)
        for gpus, layout, ranks, nodes, tp in ways
    ]
    planned = 0
    for case in cases:
        with suppress(AstraflowError):
            _must_hold(case, case.planned())
            planned += 1
    assert planned > len(cases) / 2


def recipe(*overrides: str) -> Recipe:
    return load_recipe("recipes/sort.yaml", overrides)


ONE = Machine(gpus=("6",), has_gpus=True, gpu_nbytes=80 * GIB)
FOUR = Machine(gpus=("4", "5", "GPU-x", "7"), has_gpus=True)


def test_a_recipe_says_who_computes_on_a_gpu():
    names = [each.name for each in gpu_demands(recipe(), {})]
    assert names == ["trainer-solver", "raas-0", "raas-1"]
    assert gpu_demands(recipe("policies.solver.trainer.device=cpu", "raas.count=0"), {}) == []
    at = "http://127.0.0.1:8000"
    attached = gpu_demands(recipe(f"raas.engine={{kind: vllm, url: {at}}}"), {})
    assert [each.name for each in attached] == ["trainer-solver"]


def test_adapters_of_one_model_are_one_server_of_a_node():
    served = load_recipe("recipes/sort.yaml", ["raas.engine={kind: vllm}"])
    policy = served.policies["solver"].model_dump(mode="json", exclude_none=True)
    adapted = {**policy, "model": {**policy["model"], "lora": {"rank": 8}}}
    for kind, count in ((policy, 2), (adapted, 1)):
        both = served.model_copy(
            update={
                "policies": {name: type(served.policies["solver"])(**kind) for name in ("a", "b")}
            }
        )
        assert gpu_demands(both, {})[-1].part_count == count


def test_without_gpus_nothing_is_planned():
    assert plan_recipe(recipe(), Machine()) is None
    assert plan_recipe(recipe("gpus.count=0"), FOUR) is None
    assert gpu_environment(None, None) == {}


def test_gpus_keep_the_names_that_they_have():
    plan = plan_recipe(recipe(), FOUR)
    assert plan is not None
    said = {
        name: gpu_environment(plan, plan.share(name))["CUDA_VISIBLE_DEVICES"]
        for name in ("hub", "trainer-solver", "raas-0", "raas-1")
    }
    assert said == {"hub": "", "trainer-solver": "4", "raas-0": "5", "raas-1": "GPU-x"}


def test_who_shares_a_gpu_keeps_to_a_part_of_its_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    plan = plan_recipe(recipe(), ONE)
    assert plan is not None
    assert plan.layout == "colocated"
    said = gpu_environment(plan, plan.share("raas-0"), is_torch=True)
    assert said == {
        "CUDA_VISIBLE_DEVICES": "6",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,per_process_memory_fraction:0.225",
    }


def test_a_device_that_is_named_keeps_its_number():
    named = recipe("raas.count=1", "raas.engine.device=cuda:2")
    plan = plan_recipe(named, FOUR)
    assert plan is not None
    share = plan.share("raas-0")
    assert share is not None
    assert share.gpus == (2,)
    assert gpu_environment(plan, share) == {"CUDA_VISIBLE_DEVICES": "4,5,GPU-x,7"}
    assert plan.free() == [1, 3]


def test_more_gpus_than_there_are_and_models_that_do_not_fit_are_refused():
    with pytest.raises(AstraflowError, match="count is 8, and this machine has 4: 4, 5, GPU-x, 7"):
        plan_recipe(recipe("gpus.count=8"), FOUR)
    with pytest.raises(
        AstraflowError, match=r"solver needs 44\.7 GiB .* 0\.45 of 80\.0 = 36"
    ) as caught:
        plan_recipe(recipe(), ONE, {"solver": 3_000_000_000})
    assert caught.value.reason is Reason.MEMORY_EXCEEDED


def test_a_node_that_joins_later_gets_gpus_that_nobody_has():
    settings = recipe("raas.count=1")
    plan = plan_recipe(settings, FOUR)
    assert plan is not None
    first = spare_share(settings, plan, ())
    assert first is not None
    assert first.gpus == (2,)
    with pytest.raises(AstraflowError, match="a node takes 1 GPUs, and of 4 0 are free") as caught:
        spare_share(settings, plan, ((0, 2), (0, 3)))
    assert caught.value.reason is Reason.NOT_READY

"""What SGLang runs of ours: its loader, the answers beside the files, the door and the plugin."""

import asyncio
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, TensorSpec, TensorUpdate, WeightUpdate
from astraflow.engines.plugins.sglang_plugin import change, load, paused, stager_in
from astraflow.engines.served.exchange import write_update
from astraflow.engines.sglang.dialect import called


class Padded(torch.nn.Module):
    """Two rows of a checkpoint in a parameter of three, as servers pad."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.zeros(3, 4))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.rows.data[:2].copy_(tensor)
            self.rows.data[2:].zero_()


def written(path: Path, indices: list[int], values: list[float]) -> Path:
    spec = TensorSpec(name="rows", dtype=Dtype.F32, shape=(2, 4), offset=0)
    bits = np.array(values, np.float32).view(np.uint32)
    part = TensorUpdate(spec=spec, indices=np.array(indices), values=bits)
    update = WeightUpdate(policy_id=PolicyId("p"), version=1, base_version=0, tensors=(part,))
    write_update(path, update)
    return path


def answer_beside(path: Path) -> dict[str, Any]:
    (answer,) = path.parent.glob(f"{path.name}.*.answer")
    return json.loads(answer.read_text())


def test_what_changes_is_written_and_counted(tmp_path: Path):
    model = Padded()
    path = written(tmp_path / "1.update", [1, 6], [2.0, 3.0])
    load(model, [(str(path), None)])
    assert model.rows.detach().tolist() == [[0, 2, 0, 0], [0, 0, 3, 0], [0, 0, 0, 0]]
    answer = answer_beside(path)
    assert (answer["error"], answer["version"], answer["nbytes"]) == ("", 1, 8)


def test_a_file_that_cannot_be_read_is_an_answer_and_no_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "1.update"
    path.write_bytes(b"something else")
    load(Padded(), [(str(path), None)])
    assert "no update of astraflow" in answer_beside(path)["error"]
    assert "Traceback" in capsys.readouterr().err


async def test_the_next_file_is_staged_at_the_socket_and_applied_later(tmp_path: Path):
    model = Padded()
    load(model, [(str(written(tmp_path / "1.update", [0], [1.0])), None)])
    path = written(tmp_path / "2.update", [7], [5.0])
    async with asyncio.timeout(60):
        answer = await called(tmp_path / f"{os.getpid()}.socket", str(path))
    assert answer == {"error": "", "is_quick": False}
    assert model.rows[1, 3] == 0
    load(model, [(str(path), None)])
    assert model.rows[1, 3] == 5


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Any]:
    """What the plugin knows of SGLang's scheduler, of one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=Padded())),
        tp_group=SimpleNamespace(cpu_group=dist.group.WORLD),
        result_queue=deque(),
    )
    dist.destroy_process_group()


@pytest.mark.parametrize(("version", "written_value"), [("1", 5.0), ("2", 0.0)])
def test_only_what_is_staged_for_a_version_is_written_when_it_is_told(
    scheduler: Any, tmp_path: Path, version: str, written_value: float
):
    model = scheduler.tp_worker.model_runner.model
    path = written(tmp_path / "1.update", [7], [5.0])
    assert stager_in(model).staged(str(path)) == ""
    seen: list[float] = []

    def tell(_: Any, request: Any) -> str:
        seen.append(model.rows[1, 3].item())
        return request.new_version

    assert change(tell, scheduler, SimpleNamespace(new_version=version)) == version
    assert seen == [written_value]
    assert len(list(tmp_path.glob("*.answer"))) == (written_value > 0)


class Mode(Enum):
    DECODE = 1
    IDLE = 2


@dataclass
class Step:
    reqs: list[str]
    forward_mode: Mode = Mode.DECODE

    def copy(self) -> "Step":
        return replace(self)


def test_the_step_under_way_is_of_the_version_before(scheduler: Any):
    taken: list[tuple[list[str], Mode]] = []

    def take(step: Step, result: dict[str, int]) -> None:
        taken.append((step.reqs, step.forward_mode))

    def tell(scheduler: Any, request: Any) -> None:
        taken.append(([request.new_version], Mode.DECODE))

    scheduler.process_batch_result = take
    scheduler.result_queue.append((Step(["a", "b"]), {"tokens": 2}))
    paused(lambda scheduler, request: None, scheduler, None)
    change(tell, scheduler, SimpleNamespace(new_version="2"))
    assert taken == [(["a", "b"], Mode.DECODE), (["2"], Mode.DECODE)]
    # What the loop takes next, and would miss.
    take(*scheduler.result_queue.popleft())
    assert (taken[-1], scheduler.result_queue) == (([], Mode.IDLE), deque())

"""Patches go where a server's loader would have put the values, and nowhere else."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, TensorSpec, TensorUpdate, WeightUpdate
from astraflow.engines.plugins.exchange import read_update
from astraflow.engines.plugins.patching import Patcher, PatchError
from astraflow.engines.plugins.regions import Parameters
from astraflow.engines.plugins.stager import Stager
from astraflow.engines.served.exchange import write_update

SHAPES = {
    "q.weight": (6, 4),
    "k.weight": (2, 4),
    "down.weight": (4, 8),
    "norm.weight": (4,),
    "packed.weight": (3, 4),
}
RANK = 1


class Fused(torch.nn.Module):
    """Rank 1 of 2: its rows of q and k in one parameter, its columns of down turned round."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in {"qk": (4, 4), "down": (4, 4), "norm": (4,), "packed": (4, 3)}.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            match name:
                case "q.weight":
                    self.qk.data[:3].copy_(tensor.narrow(0, 3 * RANK, 3))
                case "k.weight":
                    self.qk.data.narrow(0, 3, 1).copy_(tensor[RANK : RANK + 1])
                case "down.weight":
                    self.down.data.t().copy_(tensor.narrow(1, 4 * RANK, 4))
                case "norm.weight":
                    self.norm.data[...] = tensor
                case _:
                    self.packed.data.copy_(tensor.t() * 2)


def state(seed: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)
    return {
        name: chance.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()
    }


def part(name: str, values: np.ndarray, indices: np.ndarray | None = None) -> TensorUpdate:
    spec = TensorSpec(name=name, dtype=Dtype.F32, shape=SHAPES[name], offset=0)
    return TensorUpdate(spec=spec, indices=indices, values=values.reshape(-1).view(np.uint32))


def written(path: Path, parts: Iterable[TensorUpdate], base: int | None) -> Path:
    update = WeightUpdate(
        policy_id=PolicyId("p"), version=1, base_version=base, tensors=tuple(parts)
    )
    write_update(path, update)
    return path


def loaded(weights: dict[str, np.ndarray], dtype: torch.dtype = torch.float32) -> Fused:
    model = Fused(dtype)
    model.load_weights((name, torch.from_numpy(array)) for name, array in weights.items())
    return model


def stager_of(model: Fused) -> Stager:
    def reload(update: Any) -> None:
        model.load_weights(
            (p.name, torch.from_numpy(p.values.view(np.float32).reshape(p.shape)))
            for p in update.parts
        )

    return Stager(model, reload)


def assert_same(one: Fused, other: Fused):
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


PLAIN = [name for name in SHAPES if name != "packed.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sparse_patch_is_what_loading_all_would_have_been(tmp_path: Path, dtype: torch.dtype):
    old, new = state(0), state(1)
    model = loaded(old, dtype)
    parts: list[TensorUpdate] = []
    for number, name in enumerate(PLAIN):
        indices = np.arange(number % 2, old[name].size, 3)
        values = new[name].reshape(-1)[indices]
        old[name].reshape(-1)[indices] = values
        parts.append(part(name, values, indices))
    stager = stager_of(model)
    report = stager.apply(str(written(tmp_path / "u", parts, 0)))
    assert_same(model, loaded(old, dtype))
    # Half of q, k and down lies on the other rank.
    assert report["nbytes"] < sum(p.values.nbytes for p in parts) * model.norm.itemsize / 4


def test_a_whole_update_is_written_in_place_when_all_is_plain(tmp_path: Path):
    model, new = loaded(state(0)), state(1)
    kept = model.packed.clone()
    memory = model.qk.data_ptr()
    stager_of(model).apply(str(written(tmp_path / "u", [part(n, new[n]) for n in PLAIN], None)))
    assert model.qk.data_ptr() == memory
    assert torch.equal(model.packed, kept)
    assert torch.equal(model.qk, loaded(new).qk)
    assert torch.equal(model.down, loaded(new).down)


def test_what_the_loader_computes_is_loaded_by_it_or_refused(tmp_path: Path):
    model, new = loaded(state(0)), state(1)
    stager = stager_of(model)
    stager.apply(str(written(tmp_path / "all", [part(n, new[n]) for n in SHAPES], None)))
    assert_same(model, loaded(new))
    sparse = part("packed.weight", new["packed.weight"].reshape(-1)[:2], np.array([0, 5]))
    with pytest.raises(PatchError, match=r"packed\.weight"):
        stager.apply(str(written(tmp_path / "some", [sparse], 0)))
    assert_same(model, loaded(new))


class Mixture(Fused):
    """A layer of a kind that is not known; it may keep its rows in an order of its own."""

    def __init__(self, *, is_packed: bool) -> None:
        super().__init__()
        self.quant_method = "a method of its own"
        self.is_packed = is_packed

    def finish(self) -> None:
        if self.is_packed:
            self.qk.data = self.qk.data.flip(0).contiguous()


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_layer_of_another_kind_is_patched_once_it_is_seen_to_hold_what_was_loaded(
    tmp_path: Path, *, is_packed: bool
):
    model, old, new = Mixture(is_packed=is_packed), state(0), state(1)
    stager = stager_of(model)
    stager.apply(str(written(tmp_path / "all", [part(n, old[n]) for n in SHAPES], None)))
    model.finish()
    kept, places = model.qk.clone(), np.array([13, 14, 20])
    sparse = part("q.weight", new["q.weight"].reshape(-1)[places], places)
    patch = str(written(tmp_path / "some", [sparse], 0))
    if is_packed:
        with pytest.raises(PatchError, match=r"q\.weight"):
            stager.apply(patch)
        assert torch.equal(model.qk, kept)
        return
    stager.apply(patch)
    old["q.weight"].reshape(-1)[places] = new["q.weight"].reshape(-1)[places]
    assert_same(model, loaded(old))


def test_to_look_where_things_lie_writes_nothing(tmp_path: Path):
    model = loaded(state(0))
    patcher = Patcher(Parameters(model.named_parameters()), model.load_weights)
    path = written(tmp_path / "u", [part(n, a) for n, a in state(1).items()], None)
    staged = patcher.stage(read_update(path))
    assert staged.unmapped == ("packed.weight",)
    assert_same(model, loaded(state(0)))


def test_a_parameter_that_is_packed_afterwards_has_no_places(tmp_path: Path):
    model = loaded(state(0))
    plain = [(name, p) for name, p in model.named_parameters() if name != "qk"]
    patcher = Patcher(Parameters(plain), model.load_weights)
    path = written(tmp_path / "u", [part(n, state(1)[n]) for n in PLAIN], None)
    assert set(patcher.stage(read_update(path)).unmapped) == {"q.weight", "k.weight"}
    assert_same(model, loaded(state(0)))


def test_values_that_are_no_numbers_keep_their_bits(tmp_path: Path):
    model = loaded(state(0))
    odd = np.array([0x7FC12345, 0xFF812345], np.uint32).view(np.float32)
    stager_of(model).apply(
        str(written(tmp_path / "u", [part("norm.weight", odd, np.array([1, 3]))], 0))
    )
    assert model.norm.detach().numpy().view(np.uint32)[[1, 3]].tolist() == [0x7FC12345, 0xFF812345]


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path):
    path = written(tmp_path / "u", [part(n, state(1)[n]) for n in PLAIN], None)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match="bytes"):
        read_update(path)
    (tmp_path / "other").write_bytes(b"nothing of ours, but long enough to look at")
    with pytest.raises(ValueError, match="no update"):
        read_update(tmp_path / "other")

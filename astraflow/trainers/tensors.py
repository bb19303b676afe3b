"""The few calls that torch leaves untyped, with types."""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor


def to_tensor(values: np.ndarray, device: torch.device | None = None) -> Tensor:
    """Return an array as a tensor; on the CPU it shares the array's memory."""
    tensor = cast("Tensor", cast("Any", torch).from_numpy(values))
    return tensor if device is None else tensor.to(device)


def backward(loss: Tensor) -> None:
    cast("Any", loss).backward()


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that may be shared out over ranks; then all of them call this."""
    return cast("Any", tensor).full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """Return what lies here of a tensor that may be shared out over ranks."""
    return cast("Any", tensor).to_local() if hasattr(tensor, "to_local") else tensor


def part_of(whole: Tensor, cut: Tensor) -> Tensor:
    """Return what lies here of a whole tensor that is to be cut over ranks as another one is.

    Over several dimensions of ranks it is cut from the last one on, as FSDP2 cuts what others have.
    """
    if not hasattr(cut, "placements"):
        return whole
    mesh, placements, part = cast("Any", cut).device_mesh, cast("Any", cut).placements, whole
    for axis in reversed(range(mesh.ndim)):
        if not placements[axis].is_replicate():
            dim: int = placements[axis].dim
            share = -(-part.shape[dim] // int(mesh.size(axis)))
            first = min(share * int(mesh.get_local_rank(axis)), part.shape[dim])
            part = part.narrow(dim, first, min(share, part.shape[dim] - first))
    return part


def step(optimizer: torch.optim.Optimizer) -> None:
    """Change the weights by their gradients, then forget these."""
    cast("Any", optimizer).step()
    optimizer.zero_grad(set_to_none=True)


def seed_everything(seed: int) -> None:
    cast("Any", torch).manual_seed(seed)

"""How far the sampler's log-probabilities are from those of a trainer with the same weights.

Off-policy lag moves log-probabilities too, so the mismatch of the whole batch says little of
a defect. This one compares equal weights: the bits that were published as a version are kept
until rows come that this version alone has sampled.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from astraflow.core.tensors import Dtype
from astraflow.engines.modules import TORCH_TYPES
from astraflow.trainers.causal_model import CausalModel
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.lora import trained_parameters
from astraflow.trainers.peers import ALONE, Peers
from astraflow.trainers.rows import TrainRows
from astraflow.trainers.tensors import local, to_tensor


@torch.no_grad()
def export_bits(module: nn.Module, dtype: Dtype) -> Mapping[str, np.ndarray]:
    """Return the weights by name, as bits of `dtype`, in memory of their own.

    bf16 is rounded to nearest, ties to even, from the f32 master weights.

    Args:
        module: In f32. A tied tensor is exported once, by its first name.
        dtype: BF16 or F32.

    Returns:
        u16 or u32 arrays in the shape of each tensor; of one that is sharded what lies here.
    """
    return {name: _bits(parameter, dtype) for name, parameter in trained_parameters(module).items()}


def _bits(parameter: Tensor, dtype: Dtype) -> np.ndarray:
    signed = torch.int16 if dtype.itemsize == 2 else torch.int32
    values = local(parameter).detach().to(device="cpu", dtype=TORCH_TYPES[dtype], copy=True)
    return values.contiguous().view(signed).numpy().view(dtype.bits)


@torch.no_grad()
def import_bits(module: nn.Module, bits: Mapping[str, np.ndarray], dtype: Dtype) -> None:
    for name, parameter in trained_parameters(module).items():
        values = to_tensor(bits[name].view(f"<i{dtype.itemsize}")).view(TORCH_TYPES[dtype])
        local(parameter).copy_(values)


# Enough tokens for a maximum that means something, few enough to cost nothing.
_MAX_ROWS = 16


class MismatchProbe:
    """Keeps one published version at a time, and looks at the first rows that it sampled."""

    def __init__(
        self,
        model: CausalModel,
        learner: PolicyLearner,
        *,
        dtype: Dtype,
        every: int | None = 10,
        peers: Peers = ALONE,
        before_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep nothing yet, then one of `every` versions; None: nothing is kept or compared."""
        self._model = model
        self._learner = learner
        self._dtype = dtype
        self._every = every
        self._peers = peers
        self._before_change = before_change
        self._version: int | None = None
        self._bits: Mapping[str, np.ndarray] = {}

    def keep(self, version: int) -> None:
        """Note that the model's weights are those of a version; they are kept when it is due."""
        if self._every is not None and version % self._every == 0:
            self._version = version
            self._bits = export_bits(self._model.module, self._dtype)

    def measure(self, rows: TrainRows) -> Mapping[str, float]:
        """Return the mismatch over rows of the kept version, which is then let go.

        Returns:
            Nothing when no row is of that version alone.
        """
        if self._every is None:
            return {}
        chosen = np.zeros(rows.row_count, np.bool_)
        if self._version is not None:
            is_kept = (rows.min_versions == self._version) & (rows.max_versions == self._version)
            chosen[np.flatnonzero(is_kept)[:_MAX_ROWS]] = True
        if not self._peers.all_reduce_max(int(chosen.any())):
            return {}
        with self._kept_weights():
            seen = self._learner.likelihoods(rows, chosen)
        at = chosen[rows.loss.rows]
        gap = self._peers.all_gather(
            np.abs(seen.logprobs[at].astype(np.float64) - rows.loss.sampler_logprobs[at])
        )
        version, self._version, self._bits = self._version, None, {}
        return {
            "mismatch/same_weights_abs_max": float(gap.max(initial=0.0)),
            "mismatch/same_weights_abs_mean": float(gap.mean()) if len(gap) else 0.0,
            "mismatch/same_weights_version": float(version or 0),
        }

    @contextmanager
    def _kept_weights(self) -> Generator[None]:
        # Where they are: on a GPU there is room, for there are no gradients between steps.
        trained = [*map(local, trained_parameters(self._model.module).values())]
        masters = [each.detach().clone() for each in trained]
        self._before_change()
        import_bits(self._model.module, self._bits, self._dtype)
        try:
            yield
        finally:
            with torch.no_grad():
                for each, master in zip(trained, masters, strict=True):
                    each.copy_(master)

"""What a step takes of a device, by arithmetic and by what torch allocates."""

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from astraflow.config.policies import Fsdp
from astraflow.config.recipe import Optimizer
from astraflow.trainers import fused_head
from astraflow.trainers.blocks import prepare_blocks, resolved
from astraflow.trainers.memory import ModelShape, StepMemory
from astraflow.trainers.optimizer import WeightOptimizer
from astraflow.trainers.packed_rows import PackedRows

GIB = 1 << 30
QWEN3 = {
    "num_hidden_layers": 28,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
SEVEN = {
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "tie_word_embeddings": False,
}


class Allocated(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is on, until they are let go."""

    def __init__(self, held):
        super().__init__()
        self.nbytes = self.peak_nbytes = 0
        self._known = set()
        for each in held:
            self.note(each)

    def note(self, tensor):
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.nbytes += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
            weakref.finalize(storage, self._drop, key, nbytes)

    def _drop(self, key, nbytes):
        self._known.discard(key)
        self.nbytes -= nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor):
                self.note(each)
        return found


def measured(model, fsdp, tokens, layout):
    """Return the peak of two steps, the second of which has gradients and moments beside it."""
    prepare_blocks(model.module, fsdp)
    optimizer = WeightOptimizer(model.module, Optimizer())
    targets = torch.zeros(tokens, dtype=torch.long)
    weight = model.module.get_output_embeddings().weight

    def read(hidden):
        head = fused_head.Head(
            weight=weight,
            bias=None,
            targets=targets,
            temperatures=None,
            banned=targets[:0],
            tiling=fused_head.Tiling(token_count=512, word_count=64),
            adds_up=True,
        )
        return fused_head.fused_logprobs(hidden, head)[0]

    with Allocated(model.module.parameters()) as allocated:
        for step in (1, 2):
            ids = torch.zeros(4, tokens // 4, dtype=torch.long)
            ids = ids if layout is None else ids.reshape(1, tokens)
            model.at_head(ids, torch.arange(tokens), read, layout=layout).sum().backward()
            optimizer.step(step)
    return allocated.peak_nbytes


GPU = torch.device("cuda")
PACKED = [900, 500, 500, 100, 48]


@pytest.mark.parametrize(
    ("lengths", "checkpointing", "compute"),
    [
        # Every two of the three are together in four of them; `make test-all` has all eight.
        pytest.param(
            lengths,
            checkpointing,
            compute,
            marks=pytest.mark.long if is_packed ^ checkpointing ^ (compute == "bf16") else (),
        )
        for is_packed, lengths in enumerate((None, PACKED))
        for checkpointing in (False, True)
        for compute in ("f32", "bf16")
    ],
)
def test_arithmetic_is_what_torch_allocates(make_model, compute, checkpointing, lengths):
    fsdp = Fsdp(compute=compute, checkpointing=checkpointing)
    fields = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6}
    model = make_model(vocab_size=512, num_attention_heads=4, num_key_value_heads=2, **fields)
    expected = StepMemory.of(ModelShape.of(model.module.config.to_dict()), fsdp, tokens=2048)
    head = expected.head - 3 * 2048 * 128 * 4
    assert not model.unpacked
    layout = None if lengths is None else PackedRows.of(np.array(lengths), torch.device("cpu"))
    found = measured(model, fsdp, 2048, layout)
    # The tiles here are smaller than those of a GPU.
    assert 0.85 * (expected.total - head) < found < 1.05 * (expected.total - head)


@pytest.mark.parametrize(
    ("config", "ranks", "most"), [(QWEN3, 1, 60), (SEVEN, 8, 40)], ids=["1.7b-on-1", "7b-on-8"]
)
def test_defaults_of_a_gpu_leave_room(config, ranks, most):
    fsdp = resolved(Fsdp(), GPU)
    found = StepMemory.of(ModelShape.of(config), fsdp, tokens=8192, ranks=ranks)
    assert found.total < most * GIB


def test_every_matrix_in_parts_takes_less_of_what_is_gathered_and_computed():
    shape = ModelShape.of(SEVEN)
    one, four = (
        StepMemory.of(shape, resolved(Fsdp(tensor_parallel=n), GPU), tokens=8192, ranks=8)
        for n in (1, 4)
    )
    assert four.weights == one.weights
    assert four.gathered < one.gathered
    assert four.block < one.block / 2


def test_what_is_not_cut_does_not_fit():
    plain = Fsdp(compute="f32", checkpointing=False)
    found = StepMemory.of(ModelShape.of(QWEN3), plain, tokens=8192)
    assert found.total > 60 * GIB


@pytest.mark.parametrize(("kept_tokens", "passes"), [(0, 2), (63, 2), (64, 1)])
def test_blocks_of_a_pass_that_fits_are_not_computed_again(make_model, kept_tokens, passes):
    model = make_model()
    calls = []
    for block in model.module.model.layers:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    settings = Fsdp(compute="f32", checkpointing=True)
    prepare_blocks(model.module, settings, kept_tokens=kept_tokens)
    tokens = torch.zeros(4, 16, dtype=torch.long)
    model.module(tokens, use_cache=False).logits.sum().backward()
    assert len(calls) == passes * len(model.module.model.layers)

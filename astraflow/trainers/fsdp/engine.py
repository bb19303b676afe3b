"""ShardedEngine: the built-in trainer on many ranks, its parameters cut block by block (FSDP2)."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from astraflow.client.trainer import TrainerBatch
from astraflow.config.policies import Fsdp
from astraflow.config.recipe import Lora, TrainerConfig
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.modules import TORCH_TYPES
from astraflow.trainers.blocks import blocks_of, compile_block, recompute, resolved
from astraflow.trainers.causal_model import CausalModel
from astraflow.trainers.checkpoints import OPTIMIZER_DIR
from astraflow.trainers.fsdp.model_file import write_sharded_weights
from astraflow.trainers.fsdp.ranks import Ranks, naming_lost_ranks
from astraflow.trainers.likelihood import PassTokens, log_softmax_of
from astraflow.trainers.model_files import write_description
from astraflow.trainers.peers import agreeing
from astraflow.trainers.tensors import local, part_of
from astraflow.trainers.torch_engine import TorchEngine


def shard_model(module: nn.Module, ranks: Ranks, settings: Fsdp) -> None:
    """Cut the parameters of a model, in f32 and whole on every rank, over the ranks, in place.

    Master weights stay f32. Blocks compute in `settings.compute`, as `resolved` returns it;
    embeddings, the last norm and the output layer in f32, because log-probabilities are made of
    what they say.

    Raises:
        AstraflowError: CAPABILITY_MISSING when it has no blocks that are known, or they cannot be
            shared out as the settings have it.
    """
    is_pinned = ranks.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=is_pinned) if settings.offload else OffloadPolicy()
    shard = partial(cast("Callable[..., FSDPModule]", fully_shard), offload_policy=offload)
    blocks = blocks_of(module)
    if ranks.tensor is not None:
        ranks.tensor.adopt(module, blocks)
    if ranks.context is not None:
        ranks.context.adopt(module, part_count=1 if ranks.tensor is None else ranks.tensor.count)
    if ranks.experts is not None:
        ranks.experts.adopt(module, blocks)
    for block in blocks:
        if ranks.tensor is not None:
            ranks.tensor.cut(block)
        precision = _precision(settings, is_last=block is blocks[-1])
        within = replace(precision, output_dtype=None, cast_forward_inputs=False)
        for each in [] if ranks.experts is None else ranks.experts.cut(block):
            shard(each, mesh=ranks.shard_mesh("experts"), mp_policy=within)
        if settings.compile:
            compile_block(block)
        if settings.checkpointing:
            recompute(block)
        shard(block, mesh=ranks.shard_mesh("block"), mp_policy=precision)
    shard(module, mesh=ranks.shard_mesh("model"))
    for each in module.modules():
        if isinstance(each, FSDPModule):
            # A loss is divided by what counts in the whole batch: gradients of ranks add up.
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(enable=True)


@torch.no_grad()
def scatter_weights(module: nn.Module, whole: dict[str, Tensor], ranks: Ranks) -> None:
    """Set the rows of every rank to those of rank 0's whole weights, f32, one tensor at a time.

    They are let go one by one.
    """
    for name, parameter in module.named_parameters():
        given = whole.pop(name)
        is_first = ranks.rank == 0
        full = given.to(ranks.device) if is_first else torch.empty_like(given, device=ranks.device)
        cast("Any", torch.distributed).broadcast(full, src=0)
        local(parameter).copy_(part_of(full, parameter))


def _precision(settings: Fsdp, *, is_last: bool) -> MixedPrecisionPolicy:
    if settings.compute == "f32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=TORCH_TYPES[settings.compute],
        reduce_dtype=torch.float32,
        output_dtype=torch.float32 if is_last else None,
    )


# Far above the rounding of bf16, far below what a trained model that is cut wrongly says.
_APART_NATS: Final = 0.3


class ShardedEngine(TorchEngine):
    """Trains a model that FSDP2 shares out over ranks; a `TrainEngine` on each of them.

    Every method is called by all ranks in the same order: most wait for all. A rank's batch is its
    own share, and its metrics are those of the whole batch.
    """

    def __init__(
        self, settings: TrainerConfig, *, model_dir: Path, ranks: Ranks, lora: Lora | None = None
    ) -> None:
        super().__init__(settings, model_dir=model_dir, lora=lora, peers=ranks)
        self._ranks = ranks
        # Written beside the steps, which have collectives of their own.
        self._savers = ranks.beside()

    def save(self, directory: Path) -> None:
        """Write a directory of Hugging Face or peft, each rank its rows; the optimizer follows.

        Raises:
            AstraflowError: What went wrong on one of the ranks.
        """
        if self._saving is not None:
            wait([self._saving])
        if self._ranks.rank == 0:
            write_description(self._model.module, directory, companions_of=self._model_dir)
        written = write_sharded_weights(self._model.module, directory, self._ranks)
        state, folder = self._learner.flat_state(), directory / OPTIMIZER_DIR
        dcp = cast("Any", torch.distributed.checkpoint)
        saving = dcp.async_save(state, checkpoint_id=folder, process_group=self._savers.group)
        self._saving = self._writer.submit(self._finish, written, saving)

    def _finish(self, written: Callable[[], Exception | None], saving: Future[Any]) -> None:
        self._savers.agree(cast("Exception | None", saving.exception()) or written())

    def train_step(self, batch: TrainerBatch | None) -> Mapping[str, float]:
        """Make a step on this rank's share of a batch; the metrics are those of all of it.

        Args:
            batch: None: another rank that shares its rows has read it.
        """
        with naming_lost_ranks():
            return super().train_step(self._ranks.shared_rows(batch))

    @property
    def _device(self) -> torch.device:
        return self._ranks.device

    def _read(self, directory: Path) -> CausalModel:
        """Load all of a model on the host of rank 0; the others have its names and shapes."""
        with agreeing(self._ranks):
            return self._loaded(directory, device="cpu", is_empty=self._ranks.rank > 0)

    def _shared_out(self, model: CausalModel) -> CausalModel:
        """Keep this rank's rows of a model, which all have from rank 0."""
        settings = resolved(self._settings.fsdp, self._ranks.device)
        is_asked = bool(self._ranks.row_groups or self._ranks.experts)
        said = self._said(model) if is_asked and self._ranks.rank == 0 else None
        model.row_groups = self._ranks.row_groups
        whole = {name: each.detach() for name, each in model.module.named_parameters()}
        shard_model(model.module, self._ranks, settings)
        scatter_weights(model.module, whole, self._ranks)
        model.compute_on(self._ranks.device)
        # Asks the model, which all ranks have to do together.
        _ = model.linear_head
        if is_asked:
            self._require_same(model, said)
        return model

    def _require_same(self, model: CausalModel, said: Tensor | None) -> None:
        """Refuse a model of which ranks that share rows or experts say something else than one.

        That is `said` on rank 0: f[k], log-probabilities of a few tokens.
        """
        found = self._said(model)
        with agreeing(self._ranks):
            # Also where it is no number.
            if said is not None and not float((found - said).abs().mean()) < _APART_NATS:
                raise AstraflowError(
                    Reason.CAPABILITY_MISSING,
                    f"{type(model.module).__name__} computes something else when ranks share its "
                    "rows or experts; take 1 for fsdp.tensor_parallel, fsdp.context_parallel and "
                    "fsdp.expert_parallel",
                )

    @torch.no_grad()
    def _said(self, model: CausalModel) -> Tensor:
        return log_softmax_of(model, PassTokens.of_few(model))[0].cpu()

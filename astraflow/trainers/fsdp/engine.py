"""ShardedEngine: the built-in trainer on many ranks; all of them make the same calls."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint

from astraflow.client.trainer import TrainerBatch
from astraflow.config.recipe import Lora, Trainer
from astraflow.trainers.causal_model import CausalModel, load_causal_model
from astraflow.trainers.fsdp.context import check_context_parallel
from astraflow.trainers.fsdp.model_file import write_sharded_weights
from astraflow.trainers.fsdp.ranks import Ranks, naming_lost_ranks
from astraflow.trainers.fsdp.sharding import shard_model
from astraflow.trainers.model_files import write_description
from astraflow.trainers.optimizer_files import OPTIMIZER_DIR
from astraflow.trainers.torch_engine import TorchEngine


class ShardedEngine(TorchEngine):
    """Trains a model that FSDP2 shares out over ranks; a `TrainEngine` on each of them.

    Every method is called by all ranks in the same order: most wait for all. A rank's batch is its
    own share, and its metrics are those of the whole batch.
    """

    def __init__(
        self, settings: Trainer, *, model_dir: Path, ranks: Ranks, lora: Lora | None = None
    ) -> None:
        """Load nothing yet; `prepare` does.

        Args:
            settings: Of the trainer.
            model_dir: The first weights, architecture and tokenizer.
            ranks: That share it.
            lora: Adapters that are trained in its place; None: all weights are.
        """
        super().__init__(settings, model_dir=model_dir, lora=lora, peers=ranks)
        check_context_parallel(settings.fsdp, ranks.device)
        self._ranks = ranks
        # Written beside the steps, which have collectives of their own.
        self._savers = ranks.beside()
        self._writer = ThreadPoolExecutor(1, "save")
        self._saving: Future[None] | None = None

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

    def wait_for_save(self) -> None:
        """Wait until what was saved last is whole on every rank; the other ranks need not call it.

        Raises:
            AstraflowError: What went wrong on one of the ranks.
        """
        if self._saving is not None:
            self._saving.result()

    def _finish(self, written: Callable[[], Exception | None], saving: Future[Any]) -> None:
        """Bring a save to its end, on all ranks."""
        self._savers.agree(cast("Exception | None", saving.exception()) or written())

    def train_step(self, batch: TrainerBatch) -> Mapping[str, float]:
        """Make a step on this rank's share of a batch; the metrics are those of all of it."""
        with naming_lost_ranks():
            return super().train_step(batch)

    def _read(self, directory: Path) -> CausalModel:
        """Load all of a model, on the host."""
        return load_causal_model(directory, device="cpu")

    def _shared_out(self, model: CausalModel) -> CausalModel:
        """Keep this rank's rows of a model."""
        shard_model(model.module, self._ranks, self._settings.fsdp)
        model.compute_on(self._ranks.device)
        # Asks the model, which all ranks have to do together.
        _ = model.linear_head
        return model

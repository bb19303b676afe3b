"""TorchEngine: the built-in trainer, a causal model of transformers in this process."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor

from astraflow.client.trainer import TrainerBatch
from astraflow.config.policies import RouterReplay
from astraflow.config.recipe import Lora, TrainerConfig
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import UNROUTED
from astraflow.core.tensors import Dtype
from astraflow.engines.modules import device_of, fuse_norms
from astraflow.trainers.blocks import can_compile, prepare_blocks, resolved
from astraflow.trainers.causal_model import (
    CausalModel,
    load_causal_model,
    naming_exhaustion,
    prepare_torch,
)
from astraflow.trainers.checkpoints import OPTIMIZER_FILE
from astraflow.trainers.critic import CriticLearner, valued
from astraflow.trainers.learner import PolicyLearner
from astraflow.trainers.lora import add_adapters, read_adapters, trained_parameters
from astraflow.trainers.losses import divisor_of
from astraflow.trainers.memory import ModelShape, StepMemory, usable_nbytes
from astraflow.trainers.mismatch import MismatchProbe
from astraflow.trainers.model_files import on_host, write_model
from astraflow.trainers.peers import ALONE, Peers, agreeing
from astraflow.trainers.rows import TrainRows

# Parameters.
_COMPILED_SIZE: Final = 64_000_000


def replayed(rows: TrainRows, model: CausalModel, choice: RouterReplay) -> TrainRows:
    """Return rows with the routes that training follows.

    Raises:
        AstraflowError: INVALID_FIELD when the model has no such experts, or when loss tokens have
            no route and the recipe requires them.
    """
    if choice == "never":
        return replace(rows, routed_experts=None)
    if model.routes.has_mixtures:
        model.require_replay()
    if rows.routed_experts is not None:
        model.routes.require(rows.routed_experts)
    missing = len(rows.loss) - _routed_count(rows)
    if choice == "required" and missing:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{missing} of {len(rows.loss)} loss tokens do not say which experts they went "
            "through; sample with an engine that tells, or set router_replay: told",
        )
    return rows


def replay_metrics(rows: TrainRows, model: CausalModel, peers: Peers) -> Mapping[str, float]:
    """Return which share of a batch's loss tokens takes the sampler's experts; dense: nothing."""
    if not model.routes.has_mixtures:
        return {}
    told, count = peers.all_reduce_sum(_routed_count(rows)), peers.all_reduce_sum(len(rows.loss))
    return {"mismatch/replayed_frac": told / max(1.0, count)}


def _routed_count(rows: TrainRows) -> int:
    """Count the loss tokens for which the token before them, which predicts them, has a route."""
    if rows.routed_experts is None:
        return 0
    routes = rows.routed_experts[rows.loss.positions - 1]
    return int(np.count_nonzero((routes != UNROUTED).all(axis=(1, 2))))


class TorchEngine:
    """Trains a Hugging Face model with the loss and the optimizer of a recipe; a `TrainEngine`.

    The same weights and the same batches give the same steps, bit for bit on one machine with one
    number of threads. It also compares its likelihoods with those of the sampler.
    """

    _model: CausalModel
    _learner: PolicyLearner
    _probe: MismatchProbe

    def __init__(
        self,
        settings: TrainerConfig,
        *,
        model_dir: Path,
        lora: Lora | None = None,
        peers: Peers = ALONE,
    ) -> None:
        """Load nothing yet; `prepare` does. With `lora` adapters are all that is trained."""
        self._lora = lora
        self._settings = settings
        self._model_dir = model_dir
        self._warn: Callable[[], None] = lambda: None
        self._peers = peers
        self._reference: CausalModel | None = None
        self._critic: CriticLearner | None = None
        self._writer = ThreadPoolExecutor(1, "save")
        self._saving: Future[None] | None = None

    @property
    def step_count(self) -> int:
        return self._learner.step_count

    @property
    def _device(self) -> torch.device:
        return device_of(self._settings.device, key="trainer.device")

    @property
    def replays_experts(self) -> bool:
        return self._model.routes.has_mixtures and self._settings.router_replay != "never"

    def prepare(self) -> None:
        """Load the first weights, and the reference and the critic of the recipe.

        Raises:
            AstraflowError: INVALID_FIELD for a model that cannot be loaded.
        """
        settings, device = self._settings, self._device
        is_fixed = settings.deterministic
        prepare_torch(
            thread_count=settings.thread_count,
            deterministic=device.type == "cpu" if is_fixed is None else is_fixed,
            fast_f32=resolved(settings.fsdp, device).compute == "bf16",
        )
        loss = settings.loss
        if loss.has_reference:
            # The first weights also after a resume.
            given = loss.kl.reference if loss.kl is not None else loss.pairs.reference
            self._reference = self._shared_out(self._read(given or self._model_dir))
            self._reference.module.requires_grad_(False)
        if settings.critic is not None:
            # Its weights are resumed with the optimizer's state.
            self._critic = CriticLearner(
                self._shared_out(valued(self._read(self._model_dir).module)),
                settings.critic,
                max_tokens=settings.max_tokens_per_pass,
                packing=settings.packing,
                peers=self._peers,
            )
        self._load(self._model_dir)

    def train_step(self, batch: TrainerBatch) -> Mapping[str, float]:
        """Look at what was sampled, then make one step; see `PolicyLearner.step`."""
        with naming_exhaustion(max_tokens=self._settings.max_tokens_per_pass):
            return self._step(batch)

    def likelihoods(self, batch: TrainerBatch) -> np.ndarray:
        """Return f32[K], log-probabilities of the loss tokens of a batch under its weights."""
        rows = TrainRows.from_parts(batch.parts)
        rows = replayed(rows, self._model, self._settings.router_replay)
        return self._learner.likelihoods(rows, np.ones(rows.row_count, np.bool_)).logprobs

    def at_version(self, version: int) -> None:
        self._probe.keep(version)

    def before_change(self, call: Callable[[], None]) -> None:
        self._warn = call

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the master weights, f32, or those of the adapters; a tied tensor comes once."""
        yield from self._published.items()

    def save(self, directory: Path) -> None:
        """Copy the state to the host, and begin to write it, the optimizer's beside the model."""
        if self._saving is not None:
            wait([self._saving])
        module = self._model.module
        weights, state = on_host((module.state_dict(), self._learner.state()))

        def write() -> None:
            write_model(module, directory, companions_of=self._model_dir, weights=weights)
            torch.save(state, directory / OPTIMIZER_FILE)

        self._saving = self._writer.submit(write)

    def wait_for_save(self) -> None:
        """Wait until what was saved last is whole.

        Raises:
            OSError: It could not be written.
            AstraflowError: The same, on one of several ranks.
        """
        if self._saving is not None:
            self._saving.result()

    def restore(self, directory: Path) -> None:
        """Go on from a checkpoint, bit for bit.

        Raises:
            AstraflowError: INVALID_FIELD when the directory is none.
        """
        self._load(directory, is_resumed=True)

    def _about_to_change(self) -> None:
        self._warn()

    def _step(self, batch: TrainerBatch) -> Mapping[str, float]:
        with agreeing(self._peers):
            rows = TrainRows.from_parts(batch.parts)
            rows = replayed(rows, self._model, self._settings.router_replay)
        seen = {**self._probe.measure(rows), **replay_metrics(rows, self._model, self._peers)}
        header = batch.header
        divisor = divisor_of(
            self._settings.loss, row_count=header.row_count, token_count=header.loss_token_count
        )
        return {**self._learner.step(rows, divisor=divisor), **seen}

    def _load(self, directory: Path, *, is_resumed: bool = False) -> None:
        """Take weights and optimizer from files; what cannot be read changes nothing."""
        settings = self._settings
        model = self._trainee(directory, is_resumed=is_resumed)
        learner = PolicyLearner(
            model,
            settings,
            reference=self._reference,
            critic=self._critic,
            before_change=self._about_to_change,
            peers=self._peers,
        )
        if is_resumed:
            learner.resume(directory)
        self._model, self._learner = model, learner
        self._published = trained_parameters(model.module)
        dtype = Dtype(settings.export_dtype)
        self._probe = MismatchProbe(
            model,
            learner,
            dtype=dtype,
            # What is stored was sampled by nobody.
            every=None if settings.loss.is_paired else settings.mismatch_every,
            peers=self._peers,
            before_change=self._about_to_change,
        )

    def _trainee(self, directory: Path, *, is_resumed: bool) -> CausalModel:
        """Load a checkpoint or the first weights: of the whole model, or of its adapters."""
        if self._lora is None:
            return self._shared_out(self._read(directory))
        model = self._read(self._model_dir)
        add_adapters(model.module, self._lora)
        if is_resumed:
            read_adapters(model.module, directory)
        return self._shared_out(model)

    def _read(self, directory: Path) -> CausalModel:
        return self._loaded(directory, device=self._settings.device)

    def _loaded(self, directory: Path, *, device: str, is_empty: bool = False) -> CausalModel:
        """Load a model, which a recipe may make a reward model of."""
        makes_scores = self._settings.loss.makes_reward_model
        return load_causal_model(
            directory, device=device, is_empty=is_empty, makes_scores=makes_scores
        )

    def _shared_out(self, model: CausalModel) -> CausalModel:
        """Keep what this rank has of a model: alone, all of it."""
        fsdp = resolved(self._settings.fsdp, self._device)
        if self._device.type == "cuda":
            fuse_norms(model.module)
            if fsdp.compile is None:
                fsdp = fsdp.model_copy(update={"compile": self._compiles(model)})
        prepare_blocks(model.module, fsdp, kept_tokens=self._kept_tokens(model))
        return model

    def _compiles(self, model: CausalModel) -> bool:
        """Whether blocks are compiled that nobody spoke of: small models train in less than that.

        Experts take as many tokens as come, and those of a replay are told by hooks.
        """
        size = sum(each.numel() for each in model.module.parameters())
        return (
            size >= _COMPILED_SIZE and not model.routes.has_mixtures and can_compile(self._device)
        )

    def _kept_tokens(self, model: CausalModel) -> int:
        """Return up to which size passes are not computed again: what fits a GPU beside the rest.

        None where the recipe decides, or the arithmetic does not know what is there besides.
        """
        settings = self._settings
        is_known = not (settings.critic or settings.loss.has_reference or model.routes.has_mixtures)
        if self._device.type != "cuda" or settings.fsdp.checkpointing is not None or not is_known:
            return 0
        try:
            shape = ModelShape.of(cast("Any", model.module).config.get_text_config().to_dict())
        except KeyError:
            return 0
        plain = resolved(settings.fsdp.model_copy(update={"checkpointing": False}), self._device)
        return StepMemory.tokens_that_fit(shape, plain, usable_nbytes(self._device))

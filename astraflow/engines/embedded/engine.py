"""The embedded engine as the event loop sees it, for one policy or several with adapters."""

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from astraflow import __version__
from astraflow.config.lora import base_of
from astraflow.config.recipe import EngineSettings, Lora
from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import KvPolicy
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import SwapReport, WeightUpdate
from astraflow.engines.checks import (
    check_prompt,
    check_sampling,
    no_weights,
    require_policy,
)
from astraflow.engines.embedded.adapters import AdapterSlots, add_adapter_places, places_of
from astraflow.engines.embedded.decoder import build_decoder_settings
from astraflow.engines.embedded.grammars import Grammars
from astraflow.engines.embedded.model import build_module, load_config, read_architecture
from astraflow.engines.embedded.rows import Request
from astraflow.engines.embedded.sampler import stream_of
from astraflow.engines.embedded.weights import Slots, Staged, Weights, read_directory, stage
from astraflow.engines.embedded.worker import DecodeWorker
from astraflow.engines.protocol import EngineLoad, Generation, Watch
from astraflow.engines.routers import mixtures_of
from astraflow.engines.tokenizer import find_tokenizer
from astraflow.rpc.concurrency import to_the_end

Stage = Callable[[Weights | None, Collection[Weights]], Staged]
"""Makes a version, beside the live one and those that are kept."""


class SharedBase:
    """A module and the threads that decode with it and stage its versions.

    Attributes:
        model_dir: Of its architecture and tokenizer.
        module: Its weights mean nothing before the first version.
        kv: What becomes of a cache when another version takes over.
        tokenizer: None: no text is read.
        grammars: Of its tokens; None: no text is read.
    """

    def __init__(
        self,
        model_dir: Path,
        settings: EngineSettings,
        *,
        draws_all: bool = False,
        adapters: Sequence[Lora] = (),
    ) -> None:
        """Read a Hugging Face directory, and start the threads.

        Args:
            model_dir: Its weights are read, too, where there are adapters.
            settings: Of the recipe.
            draws_all: Whether padding and beginning of text are drawn, too.
            adapters: Of each policy; empty: one trains all of the weights.

        Raises:
            AstraflowError: INVALID_FIELD when the directory or the settings do not fit.
        """
        config = load_config(model_dir)
        tokenizer, special = find_tokenizer(model_dir)
        if draws_all:
            special = replace(special, never_sampled=frozenset())
        architecture = read_architecture(config)
        decoding = build_decoder_settings(
            settings,
            architecture,
            special=special.below(architecture.vocab_size),
            tokenizer=tokenizer,
        )
        self.model_dir = model_dir
        self.module = build_module(config, dtype=decoding.dtype, device=decoding.device)
        self.kv = KvPolicy(settings.kv)
        self.tokenizer = tokenizer
        vocab_size = decoding.architecture.vocab_size
        self.grammars = tokenizer and Grammars(tokenizer, vocab_size=vocab_size)
        places = places_of(adapters)
        if places:
            slots = Slots(self.module)
            slots.install(read_directory(model_dir, slots, version=0))
            add_adapter_places(self.module, places)
        self.decoding = replace(decoding, adapters=places)
        count = settings.thread_count
        # Its own thread: torch bounds threads per thread, and decoding needs the other cores.
        self.stager = ThreadPoolExecutor(1, "staging", torch.set_num_threads, (count,))
        self.worker = DecodeWorker(self.module, self.decoding, thread_count=count, kv=self.kv)

    async def close(self) -> None:
        """Stop; running generations end with ENGINE_FAILED."""
        self.worker.close()
        self.stager.shutdown(wait=False)
        await asyncio.to_thread(self.worker.join)


class EmbeddedEngine:
    """Generates with a Hugging Face causal model in this process.

    Updates are staged beside generation and committed between two decode steps; a pinned
    version keeps its bits, and shares with the live one what they have in common.
    """

    name = f"embedded/{__version__}"
    keeps_versions = True

    def __init__(self, policy_id: PolicyId, base: SharedBase, slots: Slots) -> None:
        self._policy_id = policy_id
        self._base = base
        self._slots = slots
        self._settings = base.decoding
        self.max_context_token_count = self._settings.max_context
        self.tells_experts = bool(mixtures_of(base.module))
        self._versions = base.worker.version_sets[slots.adapter]
        self._swapping = asyncio.Lock()

    @classmethod
    def from_directory(
        cls,
        model_dir: Path,
        settings: EngineSettings,
        policy_id: PolicyId,
        *,
        draws_all: bool = False,
    ) -> "EmbeddedEngine":
        """Build the engine of a Hugging Face directory; weights come by `swap`.

        Raises:
            AstraflowError: INVALID_FIELD when the directory or the settings do not fit.
        """
        base = SharedBase(model_dir, settings, draws_all=draws_all)
        return cls(policy_id, base, Slots(base.module))

    @property
    def version(self) -> int | None:
        weights = self._versions.weights
        return None if weights is None else weights.version

    @property
    def pinned_versions(self) -> frozenset[int]:
        return frozenset(self._versions.pins)

    @property
    def named_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by name as in the Hugging Face checkpoint; a tied head is left out."""
        return self._slots.shapes

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        version: int | None = None,
        watch: Watch | None = None,
    ) -> Generation:
        request = self._request(prompt, sampling, version)
        request.watch = watch
        grammars = self._base.grammars
        if sampling.grammar is not None and grammars is not None:
            request.guide = await asyncio.to_thread(grammars.guide, sampling.grammar)
        self._base.worker.submit(request)
        try:
            return await request.reply
        except asyncio.CancelledError:
            self._base.worker.withdraw(request)
            raise

    async def swap(self, update: WeightUpdate) -> SwapReport:
        require_policy(update, self._policy_id)
        return await self._go_live(lambda base, kept: stage(update, self._slots, base, kept=kept))

    async def load_directory(self, version: int, model_dir: Path | None = None) -> SwapReport:
        """Make the weights of a Hugging Face directory live, for work without a trainer.

        Args:
            version: What to call them.
            model_dir: Of the same architecture; None: the one the engine was built from.

        Raises:
            AstraflowError: APPLY_FAILED naming the tensor that does not fit.
        """
        source = model_dir or self._base.model_dir
        return await self._go_live(
            lambda _base, _kept: Staged(
                weights=read_directory(source, self._slots, version=version)
            )
        )

    def restore_from(self, source: Callable[[], WeightUpdate]) -> None:
        """Nothing to do: its weights are lost with the node alone."""

    async def pin(self, version: int) -> None:
        await self._base.worker.pin(self._slots.adapter, version)

    async def unpin(self, version: int) -> None:
        await self._base.worker.unpin(self._slots.adapter, version)

    def load(self) -> EngineLoad:
        """Return how busy it was after the last decode step."""
        worker, adapter = self._base.worker, self._slots.adapter
        worker.require_running()
        load = worker.loads[adapter]
        return replace(load, queued_count=load.queued_count + worker.unseen_count(adapter))

    async def close(self) -> None:
        """Stop, and with it all engines of one base; running generations end with ENGINE_FAILED."""
        await self._base.close()

    def _request(
        self, prompt: Sequence[int], sampling: SamplingParams, version: int | None
    ) -> Request:
        if self.version is None:
            raise no_weights()
        vocab_size, max_context = self._settings.architecture.vocab_size, self._settings.max_context
        tokens = np.asarray(prompt, np.int64)
        check_prompt(tokens, vocab_size=vocab_size, max_context=max_context)
        reads_text = self._base.tokenizer is not None
        check_sampling(sampling, vocab_size=vocab_size, reads_text=reads_text)
        room = max_context - len(tokens)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        return Request(
            prompt=tokens.astype(np.int32),
            sampling=sampling,
            stream=stream_of(seed),
            budget=min(sampling.max_new_tokens or room, room),
            version=version,
            kv=self._base.kv,
            adapter=self._slots.adapter,
            reply=asyncio.get_running_loop().create_future(),
        )

    async def _go_live(self, make: Stage) -> SwapReport:
        """Stage until it can be committed: again if a version was pinned in the meantime."""
        worker, versions = self._base.worker, self._versions
        async with self._swapping:
            while True:
                worker.require_running()
                staged = await asyncio.get_running_loop().run_in_executor(
                    self._base.stager, make, versions.weights, versions.kept
                )
                # The worker has let go of the update's arrays when this ends.
                report = await to_the_end(worker.commit(staged))
                if report is not None:
                    return report


def adapter_engines(
    model_dir: Path,
    settings: EngineSettings,
    policies: Mapping[PolicyId, Lora],
    *,
    draws_all: bool = False,
) -> Mapping[PolicyId, EmbeddedEngine]:
    """Build the engines of policies that train adapters beside the same model.

    The model's weights are read here, once; adapters come by `swap`, each policy's on its own.
    Closing one engine closes all.

    Raises:
        AstraflowError: INVALID_FIELD when the directory, the settings or the targets do not
            fit, APPLY_FAILED when its weights do not.
    """
    base = SharedBase(model_dir, settings, draws_all=draws_all, adapters=list(policies.values()))
    return {
        policy_id: EmbeddedEngine(policy_id, base, AdapterSlots(base.module, place))
        for policy_id, place in zip(policies, base.decoding.adapters, strict=True)
    }


def checkpoint_engine(
    directory: Path, settings: EngineSettings, policy_id: PolicyId, *, lora: Lora | None
) -> EmbeddedEngine:
    """Build the engine of a checkpoint, or of adapters, which name their model; without weights.

    Raises:
        AstraflowError: INVALID_FIELD when the directory or the settings do not fit.
    """
    if lora is None:
        return EmbeddedEngine.from_directory(directory, settings, policy_id)
    return adapter_engines(base_of(directory), settings, {policy_id: lora})[policy_id]

"""The engine as the event loop sees it."""

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from astraflow import __version__
from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.rollouts import KvPolicy
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import SwapReport, TensorSpec, WeightUpdate
from astraflow.engines.checks import check_prompt, check_sampling, require_policy
from astraflow.engines.embedded.base import Base, Plan, Stage
from astraflow.engines.embedded.messages import Pin, Unpin
from astraflow.engines.embedded.randomness import stream_of
from astraflow.engines.embedded.requests import Request
from astraflow.engines.embedded.staging import Staged, bits_of, stage
from astraflow.engines.embedded.weights import Slots, Weights, read_directory
from astraflow.engines.protocol import EngineLoad, Generation, Watch
from astraflow.engines.routers import routers_of


class EmbeddedEngine:
    """Generates with a Hugging Face causal model in this process.

    Updates are staged beside generation and committed between two decode steps; a pinned
    version keeps its bits, and shares with the live one what they have in common.
    """

    def __init__(self, policy_id: PolicyId, base: Base, slots: Slots) -> None:
        """Serve a policy; see `from_directory` and `adapter_engines`.

        Args:
            policy_id: Whose weights it takes.
            base: Computes; closed with the engine.
            slots: Where these weights go in it.
        """
        self._policy_id = policy_id
        self._base = base
        self._slots = slots
        self._settings = base.plan.decoding
        self._shelf = base.worker.shelves[slots.adapter]
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

        Args:
            model_dir: With config.json, and tokenizer.json where stop strings are used.
            settings: Of the recipe.
            policy_id: Whose weights it takes.
            draws_all: Whether padding and beginning of text are drawn, too.

        Raises:
            AstraflowError: INVALID_FIELD when the directory or the settings do not fit.
        """
        plan = Plan.of(model_dir, settings, draws_all=draws_all)
        base = Base(plan, thread_count=settings.thread_count, kv=KvPolicy(settings.kv))
        return cls(policy_id, base, Slots(plan.module))

    @property
    def name(self) -> str:
        """Name and release."""
        return f"embedded/{__version__}"

    @property
    def version(self) -> int | None:
        """What newly sampled tokens are of; None before the first swap."""
        weights = self._shelf.weights
        return None if weights is None else weights.version

    @property
    def pinned_versions(self) -> frozenset[int]:
        """Versions that `generate` can be asked for until they are unpinned."""
        return frozenset(self._shelf.pins)

    @property
    def keeps_versions(self) -> bool:
        """Whether a pinned version serves on beside newer ones."""
        return True

    @property
    def max_context_token_count(self) -> int:
        """Prompt and completion together."""
        return self._settings.max_context

    @property
    def tells_experts(self) -> bool:
        """Whether generations have `routed_experts`."""
        return bool(routers_of(self._base.plan.module))

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
        """Sample one completion; see `Engine.generate`."""
        request = self._request(prompt, sampling, version)
        request.watch = watch
        grammars = self._base.plan.grammars
        if sampling.grammar is not None and grammars is not None:
            request.guide = await asyncio.to_thread(grammars.guide, sampling.grammar)
        self._base.submit(request)
        try:
            return await request.reply
        except asyncio.CancelledError:
            self._base.withdraw(request)
            raise

    async def swap(self, update: WeightUpdate) -> SwapReport:
        """Make a version live between two decode steps; see `Engine.swap`."""
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
        source = model_dir or self._base.plan.model_dir

        def make(_base: Weights | None, _kept: Collection[Weights]) -> Staged:
            return Staged(weights=read_directory(source, self._slots, version=version))

        return await self._go_live(make)

    async def live_bits(self, spec: TensorSpec) -> np.ndarray:
        """Return one tensor of the live version as it is computed with, to verify it.

        Args:
            spec: Name, and the element type to return: that of the checkpoint or a wider one.

        Returns:
            uN[element_count], a copy; no swap comes between.

        Raises:
            AstraflowError: INVALID_FIELD for a name that the model does not have,
                VERSION_NOT_SERVED before the first swap.
        """
        async with self._swapping:
            name, weights = self._slots.canonical(spec.name), self._shelf.weights
            if weights is None:
                raise _no_weights()
            if name is None:
                raise AstraflowError(Reason.INVALID_FIELD, f"the model has no tensor {spec.name}")
            return await asyncio.to_thread(bits_of, weights.tensors[name], spec.dtype)

    def restore_from(self, source: Callable[[], WeightUpdate]) -> None:
        """Nothing to do: its weights are lost with the node alone."""

    async def pin(self, version: int) -> None:
        """Keep the live version for `generate(version=...)`; see `Engine.pin`."""
        reply = asyncio.get_running_loop().create_future()
        self._base.put(Pin(version=version, adapter=self._slots.adapter, reply=reply))
        await reply

    async def unpin(self, version: int) -> None:
        """Let a pinned version go once its running generations are done."""
        reply = asyncio.get_running_loop().create_future()
        self._base.put(Unpin(version=version, adapter=self._slots.adapter, reply=reply))
        await reply

    def load(self) -> EngineLoad:
        """Return how busy it was after the last decode step."""
        load = self._base.worker.loads[self._slots.adapter]
        unseen = self._base.unseen_count(self._slots.adapter)
        return replace(load, queued_count=load.queued_count + unseen)

    async def close(self) -> None:
        """Stop, and with it all engines of one base; running generations end with ENGINE_FAILED."""
        await self._base.close()

    def _request(
        self, prompt: Sequence[int], sampling: SamplingParams, version: int | None
    ) -> Request:
        if self.version is None:
            raise _no_weights()
        vocab_size, max_context = self._settings.architecture.vocab_size, self._settings.max_context
        tokens = np.asarray(prompt, np.int64)
        check_prompt(tokens, vocab_size=vocab_size, max_context=max_context)
        check_sampling(
            sampling, vocab_size=vocab_size, reads_text=self._base.plan.tokenizer is not None
        )
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
        async with self._swapping:
            return await self._base.go_live(self._slots.adapter, make)


def _no_weights() -> AstraflowError:
    return AstraflowError(
        Reason.VERSION_NOT_SERVED, "the engine has no weights yet", retryable=True
    )

"""The sampling half: an engine that has the snapshots that are sampled from.

A snapshot is a version of the engine, pinned: what samples from it samples from its weights,
whatever is trained meanwhile. With it goes the cache of its keys and values, so one that nobody
samples from gives way to the next, and is read again from its directory when it is asked for.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from safetensors import numpy as safetensors_numpy

from astraflow.config.lora import TENSOR_FILE, Lora, tensor_name
from astraflow.config.pool import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import Dtype, TensorSpec, TensorUpdate, WeightUpdate
from astraflow.engines.building import build_adapter_engines
from astraflow.engines.protocol import Engine, Generation
from astraflow.rpc.concurrency import first_error
from astraflow.tinker.learner import lora_in
from astraflow.trainers.lora import read_lora

_POLICY: Final = PolicyId("tinker")
# Snapshots that are sampled from at once; engines that are servers have places for four.
_HELD_COUNT: Final = 3

Load = Callable[[int, Path | None], Awaitable[object]]
"""Makes the weights of a directory live as a version; None: those of the base model."""


class Holder:
    """One engine, and the snapshots that it has."""

    def __init__(self, engine: Engine, load: Load) -> None:
        """Take an engine that keeps versions beside each other."""
        self.engine = engine
        self._load = load
        # The version that each is, and how many sample from it.
        self._held: dict[Path | None, int] = {}
        self._users = Counter[Path | None]()
        self._versions = count(1)
        self._one_at_a_time = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def holding(self, snapshot: Path | None) -> AsyncGenerator[int]:
        """Yield the version that a snapshot is in the engine, which keeps it for the block."""
        # First come, first served: a snapshot that waits for room is not passed for ever.
        async with self._one_at_a_time:
            version = self._held.get(snapshot) or await self._read(snapshot)
            self._users[snapshot] += 1
        try:
            yield version
        finally:
            self._users[snapshot] -= 1
            self._freed.set()

    async def _read(self, snapshot: Path | None) -> int:
        """Have the engine read a snapshot, in place of all that nobody samples from now."""
        while True:
            for key in [key for key in self._held if not self._users[key]]:
                del self._users[key]
                await self.engine.unpin(self._held.pop(key))
            if len(self._held) < _HELD_COUNT:
                break
            self._freed.clear()
            await self._freed.wait()
        version = next(self._versions)
        await self._load(version, snapshot)
        await self.engine.pin(version)
        self._held[snapshot] = version
        return version


class Samplers:
    """Samples from snapshots: of adapters, all in one engine; of whole models, in another."""

    def __init__(
        self,
        model_dir: Path,
        settings: EngineSettings,
        *,
        layer_shapes: Mapping[str, tuple[int, int]],
        max_rank: int,
    ) -> None:
        """Build the engine of adapters; layers by path, (outputs, inputs). Needs a running loop.

        Raises:
            AstraflowError: INVALID_FIELD when the directory or the settings do not fit.
        """
        self._model_dir = model_dir
        self._settings = settings
        self._layer_shapes = layer_shapes
        self._rank = max_rank
        # Its scale is 1: that of each adapter is taken into its weights.
        lora = Lora(rank=max_rank, alpha=float(max_rank))
        engines = build_adapter_engines(model_dir, settings, {_POLICY: lora}, draws_all=True)
        self._adapted = Holder(engines[_POLICY], self._swap_adapters)
        self._whole: Holder | None = None
        self._building = asyncio.Lock()

    @property
    def max_context(self) -> int:
        """Tokens of prompt and completion."""
        return self._adapted.engine.max_context_token_count

    @property
    def serves_whole_models(self) -> bool:
        """Whether models without adapters can be sampled from."""
        return self._settings.kind == "embedded"

    async def sample(
        self,
        snapshot: Path | None,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        sample_count: int,
    ) -> list[Generation]:
        """Sample completions of a prompt from a snapshot's weights; None: the base model's.

        Raises:
            AstraflowError: As `Engine.generate`; APPLY_FAILED for weights that do not fit.
        """
        holder = await self._holder_of(snapshot)
        async with holder.holding(snapshot) as version:
            with first_error():
                async with asyncio.TaskGroup() as tasks:
                    made = [
                        tasks.create_task(holder.engine.generate(prompt, each, version=version))
                        for each in _seeded(sampling, sample_count)
                    ]
        return [each.result() for each in made]

    async def close(self) -> None:
        """Stop the engines."""
        for holder in (self._adapted, self._whole):
            if holder is not None:
                await holder.engine.close()

    async def _holder_of(self, snapshot: Path | None) -> Holder:
        if snapshot is None or lora_in(snapshot) is not None:
            return self._adapted
        async with self._building:
            if self._whole is None:
                self._whole = await asyncio.to_thread(self._build_whole)
        return self._whole

    def _build_whole(self) -> Holder:
        if not self.serves_whole_models:
            raise AstraflowError(
                Reason.CAPABILITY_MISSING,
                f"a model of rank 0 is sampled by the embedded engine, not by "
                f"{self._settings.kind}: train adapters",
            )
        from astraflow.engines.embedded.engine import EmbeddedEngine  # noqa: PLC0415 - torch

        engine = EmbeddedEngine.from_directory(
            self._model_dir, self._settings, _POLICY, draws_all=True
        )
        return Holder(engine, engine.load_directory)

    async def _swap_adapters(self, version: int, snapshot: Path | None) -> None:
        tensors = await asyncio.to_thread(
            lambda: tuple(_adapters(snapshot, self._layer_shapes, self._rank))
        )
        update = WeightUpdate(
            policy_id=_POLICY, version=version, base_version=None, tensors=tensors
        )
        await self._adapted.engine.swap(update)


def _adapters(
    snapshot: Path | None, layer_shapes: Mapping[str, tuple[int, int]], rank: int
) -> Iterator[TensorUpdate]:
    """Yield the adapters of a snapshot, as wide as the engine's: what is missing is 0."""
    found: Mapping[str, np.ndarray] = {}
    scale = 0.0
    if snapshot is not None:
        found = cast("Any", safetensors_numpy).load_file(snapshot / TENSOR_FILE)
        scale = read_lora(snapshot).scale
    for path, (output_count, input_count) in layer_shapes.items():
        names = [tensor_name(f"{path}.lora_{side}.weight") for side in "AB"]
        inner, outer = np.zeros((rank, input_count), "<f4"), np.zeros((output_count, rank), "<f4")
        if names[0] in found:
            own = found[names[0]]
            if len(own) > rank:
                raise AstraflowError(
                    Reason.INVALID_FIELD,
                    f"these adapters have rank {len(own)}, the server has {rank}: start it with a "
                    "greater --max-rank",
                )
            inner[: len(own)] = own
            outer[:, : len(own)] = np.float32(scale) * found[names[1]]
        for name, array in zip(names, (inner, outer), strict=True):
            spec = TensorSpec(name=name, dtype=Dtype.F32, shape=array.shape, offset=0)
            yield TensorUpdate(spec=spec, indices=None, values=array.view("<u4"))


def _seeded(sampling: SamplingParams, sample_count: int) -> list[SamplingParams]:
    if sampling.seed is None:
        return [sampling] * sample_count
    return [
        replace(sampling, seed=(sampling.seed + index) % (1 << 63)) for index in range(sample_count)
    ]

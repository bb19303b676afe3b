"""Weights of one policy: fetched from a trainer's sender, made live in the engine."""

import asyncio
from dataclasses import replace
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

import structlog

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout, TensorUpdate, WeightUpdate
from astraflow.engines.protocol import Engine
from astraflow.gateway.receiving import SenderCopy
from astraflow.raas.policies import VersionGate
from astraflow.rpc.peers import DialRules
from astraflow.storage.weight_files import read_weights

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


class SenderWeights:
    """Brings an engine what senders have; one version at a time.

    The engine counts its versions one by one: a trainer may skip numbers, and come back with older
    ones.

    Attributes:
        labels: The trainer's own number of every version of the engine.
    """

    def __init__(
        self,
        policy_id: PolicyId,
        *,
        engine: Engine,
        gate: VersionGate,
        host: str,
        timeout_s: float,
    ) -> None:
        self.labels: dict[int, int] = {}
        self._policy_id = policy_id
        self._engine = engine
        self._gate = gate
        self._host = host
        self._timeout_s = timeout_s
        # Name, type and shape of each tensor.
        self._layout = set[tuple[str, Dtype, tuple[int, ...]]]()
        self._copy: SenderCopy | None = None
        self._one_at_a_time = asyncio.Lock()
        # What is live, or about to be; None: nothing sound is here.
        self._whole: WeightUpdate | None = None
        # Held while that changes in place.
        self._changing = Lock()
        engine.restore_from(self._restored)

    async def close(self) -> None:
        """Let go of the sender."""
        if self._copy is not None:
            await self._copy.close()

    async def begin(self, directory: Path) -> None:
        """Sample with the weights of a model directory, which is what the trainer calls 0."""
        stored = await asyncio.to_thread(read_weights, directory)
        layout = Layout.of([(name, each.dtype, each.bits.shape) for name, each in stored.items()])
        tensors = tuple(
            TensorUpdate(spec=each, indices=None, values=stored[each.name].bits.reshape(-1))
            for each in layout.tensors
        )
        self._layout = {(each.name, each.dtype, each.shape) for each in layout.tensors}
        self.labels[0] = 0
        self._whole = self._update(0, tensors)
        async with self._gate.swapping():
            await self._engine.swap(self._whole)

    async def load(self, label: int, endpoint: str, dial: DialRules) -> dict[str, Any]:
        """Sample with what a sender calls `label`, or the newer one that it has by now.

        Raises:
            AstraflowError: VERSION_NOT_SERVED when the sender has an older one; LAYOUT_MISMATCH;
                what a transfer or a swap raises.
        """
        async with self._one_at_a_time:
            copy = await self._copy_of(endpoint, dial)
            offered = await copy.offered()
            version = self._engine.version
            if version is not None and label <= offered == self.labels[version]:
                return {"ok": True, "pulled": False, "reason": f"version {offered} is here already"}
            label, began = max(label, offered), perf_counter()
            update = await self._fetched(copy, label)
            fetched = perf_counter()
            async with self._gate.swapping():
                await self._swap(update)
            swap_s = perf_counter() - fetched
            pulled = {
                "ok": True,
                "version": label,
                "mode": "full" if copy.is_full else "delta",
                "shm_path": "",
                "use_lora": False,
                "pull_time": fetched - began + swap_s,
                "tcp_time": fetched - began,
                "save_time" if copy.is_full else "patch_time": swap_s,
                "tcp_size_mb": copy.nbytes / 1e6,
            }
            model_id = str(self._policy_id)
            return {"ok": True, "model_id": model_id, "version": label, "pull_result": pulled}

    async def _copy_of(self, endpoint: str, dial: DialRules) -> SenderCopy:
        """Return the copy of a sender; another one begins from nothing."""
        if self._copy is not None and self._copy.endpoint == endpoint:
            return self._copy
        copy = await SenderCopy.of(endpoint, host=self._host, timeout_s=self._timeout_s, dial=dial)
        # By name: their order may differ.
        given = {(each.name, each.dtype, each.shape) for each in copy.plan.tensors}
        if other := self._layout ^ given:
            names = ", ".join(sorted({name for name, *_ in other})[:5])
            raise AstraflowError(
                Reason.LAYOUT_MISMATCH,
                f"the sender's tensors are not those of the node: {names}; give the recipe the "
                "model that is trained, in the type that is trained",
            )
        await self.close()
        self._copy = copy
        return copy

    async def _fetched(self, copy: SenderCopy, label: int) -> WeightUpdate:
        """Get a version; return what it changes of the live one, where that is known."""
        await asyncio.to_thread(self._changing.acquire)
        try:
            # Where the transfer fails, its buffer may have some of it.
            self._whole = None
            await copy.fetch(label)
            base = max(self.labels)
            version = base + 1
            # Before anything is sampled with it.
            self.labels[version] = label
            self._whole = self._update(version, copy.updates())
            if copy.changed is None or self._engine.version != base:
                return self._whole
            changed = await asyncio.to_thread(copy.updates, copy.changed)
            return self._update(version, changed, base_version=base)
        finally:
            self._changing.release()

    async def _swap(self, update: WeightUpdate) -> None:
        try:
            await self._engine.swap(update)
        except AstraflowError as error:
            if error.reason is not Reason.APPLY_FAILED or update.base_version is None:
                raise
            log.warning("a swap failed; all weights are swapped", why=str(error))
            await self._engine.swap(await asyncio.to_thread(self._restored))

    def _restored(self) -> WeightUpdate:
        """Return a copy of all weights; in a thread: it may wait for a transfer."""
        with self._changing:
            if self._whole is None:
                raise AstraflowError(Reason.NOT_READY, "no weights are here; the next version is")
            tensors = (replace(each, values=each.values.copy()) for each in self._whole.tensors)
            return replace(self._whole, tensors=tuple(tensors))

    def _update(
        self, version: int, tensors: tuple[TensorUpdate, ...], base_version: int | None = None
    ) -> WeightUpdate:
        return WeightUpdate(
            policy_id=self._policy_id, version=version, base_version=base_version, tensors=tensors
        )

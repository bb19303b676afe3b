"""UnsampledEngine: for runs whose answers are stored; it follows versions, and samples nothing."""

import sys
from collections.abc import Callable, Sequence

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tasks import SamplingParams
from astraflow.core.tensors import SwapReport, WeightUpdate
from astraflow.engines.protocol import EngineLoad, Generation, Watch


class UnsampledEngine:
    """Has no model; an `Engine`."""

    name = "none"
    pinned_versions: frozenset[int] = frozenset()
    keeps_versions = False
    tells_experts = False

    def __init__(self, max_context: int | None) -> None:
        """Hold rows of at most so many tokens; None: of any length."""
        self.max_context_token_count = max_context or sys.maxsize
        self.version: int | None = None

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        version: int | None = None,
        watch: Watch | None = None,
    ) -> Generation:
        """Refuse.

        Raises:
            AstraflowError: CAPABILITY_MISSING.
        """
        del prompt, sampling, version, watch
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            "raas.engine.kind none samples nothing, and a workflow or an evaluation wants it to; "
            "take embedded, vllm or sglang",
        )

    async def swap(self, update: WeightUpdate) -> SwapReport:
        self.version = update.version
        return SwapReport(version=update.version, pause_s=0.0, inflight_count=0)

    def restore_from(self, source: Callable[[], WeightUpdate]) -> None:
        """Nothing to do: it has no weights to lose."""

    async def pin(self, version: int) -> None:
        """Refuse a version that is over.

        Raises:
            AstraflowError: VERSION_NOT_SERVED.
        """
        if version != self.version:
            raise AstraflowError(
                Reason.VERSION_NOT_SERVED,
                f"version {version} is not live here, {self.version} is",
                retryable=True,
            )

    async def unpin(self, version: int) -> None:
        """Nothing to do: it keeps no weights."""

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def close(self) -> None:
        """Nothing to do: it runs nothing."""

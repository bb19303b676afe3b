"""CUDA graphs of decode steps: one launch in place of the hundreds that a step is made of.

A graph is of one number of rows and one length, and reads weights and cache where they lay when it
was captured. Where they lie elsewhere, after a whole tensor was replaced or the cache grew, another
graph is captured once it has paid so far.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
import torch

# Capturing costs as much as some steps: places change with versions, numbers of rows with each end.
_USES_BEFORE: Final = 4
_LIMIT: Final = 32
_COUNTED: Final = 4096

Step = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Returns logits of what a step is given anew."""

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Captured:
    """A graph with the tensors that it reads what is given from, and writes logits to."""

    graph: torch.cuda.CUDAGraph
    given: tuple[torch.Tensor, ...]
    logits: torch.Tensor


class StepGraphs:
    """The newest graphs; all use the same memory, so that logits are valid until the next step."""

    def __init__(self) -> None:
        self._found: OrderedDict[Any, _Captured] = OrderedDict()
        self._uses: Counter[Any] = Counter()
        self._pool: Any = None
        self._is_broken = False

    def run(
        self, step: Step, given: tuple[torch.Tensor, ...], kept: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return what `step(given)` does, with its bits.

        Args:
            step: Has no branch on data.
            given: What is new with each step.
            kept: Where weights and cache lie, which `step` reads and writes as well.
        """
        places = tuple(each.data_ptr() for each in kept)
        key = (*(each.shape for each in given), kept[-1].stride(), places)
        captured = self._found.get(key)
        if captured is None:
            captured = self._captured(key, step, given)
            if captured is None:
                return step(given)
        self._found.move_to_end(key)
        for source, target in zip(given, captured.given, strict=True):
            target.copy_(source)
        captured.graph.replay()
        return captured.logits

    def _captured(self, key: Any, step: Step, given: tuple[torch.Tensor, ...]) -> _Captured | None:
        """Return a new graph; None where it does not pay yet, or cannot be had."""
        if len(self._uses) > _COUNTED:
            self._uses.clear()
        self._uses[key] += 1
        if self._is_broken or self._uses[key] <= _USES_BEFORE:
            return None
        del self._uses[key]
        own, graph = tuple(each.clone() for each in given), torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = step(own)
        except Exception as error:  # noqa: BLE001 - what torch cannot capture, the module can run
            log.info("decode steps are not captured", why=str(error).partition("\n")[0])
            self._is_broken = True
            return None
        found = self._found[key] = _Captured(graph=graph, given=own, logits=logits)
        while len(self._found) > _LIMIT:
            self._found.popitem(last=False)
        return found

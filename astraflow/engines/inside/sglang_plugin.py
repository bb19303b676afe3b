"""A plugin of SGLang: a version goes live when it is told, and nothing but the node ends anything.

SGLang finds it by the entry point in `astraflow.engines.sglang.plugin` and runs `install` in each
of its processes. A scheduler hears of a new version (`/update_weight_version`) between two steps,
whatever runs. What is staged for that version is written right then: all tokens before are of the
old weights, all after of the new ones.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .sglang_loader import applied, desk_in

_NOTHING, _DONE, _FAILED = range(3)
_CHANGE = "sglang.srt.managers.scheduler.Scheduler.handle_update_weight_version"
_END_IDS = "sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id"


def install() -> None:
    """Have `change` called whenever a scheduler hears of a version, and leave ends to the node."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    HookRegistry.register(_CHANGE, change, HookType.AROUND)
    HookRegistry.register(_END_IDS, no_end_ids, HookType.REPLACE)


def no_end_ids(_config: Any) -> set[int]:
    """Return what ends every completion: nothing, whatever `generation_config.json` says.

    The node names what ends each one. End tokens of the server's own would be ignored only
    together with those.
    """
    return set()


def change(tell: Callable[[Any, Any], Any], scheduler: Any, request: Any) -> Any:
    """Write what is staged for a version, then take note of it.

    Where a rank fails, or has nothing staged that another has, no rank goes on: the node reads
    why beside the file and ends the server.

    Args:
        tell: SGLang's own way to take note.
        scheduler: Of this rank.
        request: Names the version.
    """
    done = _written(scheduler, request.new_version)
    if _is_common(scheduler, done) and done is not _FAILED:
        return tell(scheduler, request)
    return _halted(scheduler)


def _halted(scheduler: Any) -> Any:
    from sglang.srt.managers import io_struct  # noqa: PLC0415

    scheduler.pause_generation(io_struct.PauseGenerationReqInput(mode="in_place"))
    return io_struct.UpdateWeightVersionReqOutput()


def _written(scheduler: Any, version: str) -> int:
    desk = desk_in(scheduler.tp_worker.model_runner.model)
    ready = desk.ready
    if ready is None or ready.staged is None or str(ready.staged.version) != version:
        return _NOTHING
    return _FAILED if applied(desk, ready.path) else _DONE


def _is_common(scheduler: Any, done: int) -> bool:
    """Return whether it went alike in all ranks; waits for them."""
    least_and_most = torch.tensor([-done, done])
    torch.distributed.all_reduce(
        least_and_most, torch.distributed.ReduceOp.MAX, group=scheduler.tp_group.cpu_group
    )
    return bool(least_and_most.sum() == 0)

"""What runs in SGLang's processes: a weight loader, and a plugin that needs no pause.

The server is started with `load` by `--custom-weight-loader` and calls it in each rank, between two
steps, with the model and what came by its own route for tensors, of which only the name counts: it
is the path of an exchange file. A server ends when a loader raises, so what happened is written
beside the file, an answer of each process:

    {"error": "", "version": 7, "nbytes": 4096, "apply_s": 0.001}

All routes of the server wait for its turn. So from the first update on a Unix socket in the
exchange folder lets the node have files staged beside generation. A caller writes the path of one,
ends its side, and reads one JSON object when it is staged:

    {"error": "", "is_quick": true}

with what was wrong, and whether the version goes live when it is announced: SGLang finds the plugin
by the entry point in `astraflow.engines.sglang.plugin` and runs `install` in each of its processes.
A scheduler hears of a new version (`/update_weight_version`) between two steps, whatever runs.
What is staged for that version is written right then: all tokens before are of the old weights, all
after of the new ones.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .stager import Stager, load_by_name, stager_of

_NOTHING, _DONE, _FAILED = range(3)
_CHANGE = "sglang.srt.managers.scheduler.Scheduler.handle_update_weight_version"
_PAUSE = "sglang.srt.managers.scheduler.Scheduler.pause_generation"
_END_IDS = "sglang.srt.configs.model_config.ModelConfig._get_hf_eos_token_id"

_SOCKETS: set[Path] = set()


def load(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Apply the exchange file that the only tensor is named after.

    Args:
        model: Of the server.
        named_tensors: One, of any value.
    """
    ((path, _),) = named_tensors
    stager = stager_in(model)
    _listen(Path(path).parent, stager)
    applied(stager, path)


def stager_in(model: Any) -> Stager:
    # What is not simply copied is finished by the server when its session ends.
    return stager_of(model, partial(load_by_name, model))


def applied(stager: Stager, path: str) -> str:
    """Apply a file, and write beside it what happened; return the error, or nothing."""
    answer: dict[str, Any] = {"error": ""}
    try:
        answer |= stager.apply(path)
    except Exception as error:  # noqa: BLE001  raised, it would end the server and say nothing
        traceback.print_exc()
        answer["error"] = f"{type(error).__name__}: {error}"
    draft = Path(f"{path}.{os.getpid()}.draft")
    draft.write_text(json.dumps(answer))
    draft.rename(draft.with_suffix(".answer"))
    return str(answer["error"])


def _listen(folder: Path, stager: Stager) -> None:
    """Open a socket in each folder that files come from: of a node, and of the next one."""
    path = folder / f"{os.getpid()}.socket"
    if path in _SOCKETS:
        return
    # Without one, files come by the route alone: it is not worth the server.
    with suppress(OSError):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        serving = partial(_serve, listener, stager, is_hooked=_is_hooked())
        threading.Thread(target=serving, name="astraflow-socket", daemon=True).start()
        _SOCKETS.add(path)


def _serve(listener: socket.socket, stager: Stager, *, is_hooked: bool) -> None:
    """Stage the files that are named at a socket, one after the other, until the process ends."""
    while True:
        caller, _ = listener.accept()
        with caller, caller.makefile("rwb") as stream:
            error = stager.staged(stream.read().decode())
            answer = {"error": error, "is_quick": is_hooked and stager.ready is not None}
            stream.write(json.dumps(answer).encode())


def _is_hooked() -> bool:
    """Return whether this server took `sglang_plugin`: releases without its target go without."""
    scheduler: Any = getattr(sys.modules.get("sglang.srt.managers.scheduler"), "Scheduler", None)
    return hasattr(getattr(scheduler, "handle_update_weight_version", None), "__wrapped__")


def install() -> None:
    """Have `change` called whenever a scheduler hears of a version, and leave ends to the node."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    HookRegistry.register(_CHANGE, change, HookType.AROUND)
    HookRegistry.register(_PAUSE, paused, HookType.AROUND)
    HookRegistry.register(_END_IDS, no_end_ids, HookType.REPLACE)


def no_end_ids(_config: Any) -> set[int]:
    """Return what ends every completion: nothing, whatever `generation_config.json` says.

    The node names what ends each one. End tokens of the server's own would be ignored only
    together with those.
    """
    return set()


def paused(pause: Callable[[Any, Any], Any], scheduler: Any, request: Any) -> Any:
    """Pause when the last step is over: weights that are loaded meanwhile are for the next."""
    finish_step(scheduler)
    return pause(scheduler, request)


def finish_step(scheduler: Any) -> None:
    """Take the tokens of the step that is under way, where the next one overlaps with it.

    Otherwise they would be told to be of the version that comes next, and a GPU may still be
    computing them. The scheduler's loop, which goes on to take them, finds a step of nothing.
    """
    under_way = scheduler.result_queue
    if not under_way or not under_way[0][0].reqs:
        return
    batch, result = under_way.popleft()
    scheduler.process_batch_result(batch, result)
    nothing = batch.copy()
    nothing.reqs, nothing.forward_mode = [], type(batch.forward_mode).IDLE
    under_way.appendleft((nothing, type(result)()))


def change(note_version: Callable[[Any, Any], Any], scheduler: Any, request: Any) -> Any:
    """Write what is staged for a version, then take note of it.

    Where a rank fails, or has nothing staged that another has, no rank goes on: the node reads
    why beside the file and ends the server.
    """
    finish_step(scheduler)
    done = _written(scheduler, request.new_version)
    if _is_common(scheduler, done) and done is not _FAILED:
        return note_version(scheduler, request)
    from sglang.srt.managers import io_struct  # noqa: PLC0415

    scheduler.pause_generation(io_struct.PauseGenerationReqInput(mode="in_place"))
    return io_struct.UpdateWeightVersionReqOutput()


def _written(scheduler: Any, version: str) -> int:
    stager = stager_in(scheduler.tp_worker.model_runner.model)
    path, staged = stager.ready or ("", None)
    if staged is None or str(staged.version) != version:
        return _NOTHING
    return _FAILED if applied(stager, path) else _DONE


def _is_common(scheduler: Any, done: int) -> bool:
    """Return whether it went alike in all ranks; waits for them."""
    least_and_most = torch.tensor([-done, done])
    torch.distributed.all_reduce(
        least_and_most, torch.distributed.ReduceOp.MAX, group=scheduler.tp_group.cpu_group
    )
    return bool(least_and_most.sum() == 0)

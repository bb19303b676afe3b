"""How an SGLang server is started."""

import json
import os
from pathlib import Path

from astraflow.config.model_dirs import read_config
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.devices import is_on_cpu
from astraflow.engines.served.dialect import AdapterLimits, ServerCommand, ServerSetup


def adapter_options(room: AdapterLimits | None, *, is_on_cpu: bool) -> tuple[str, ...]:
    """Return what a server's command line says of adapters; None: there are none.

    A request of the model alone, as its health page makes, takes a place as well.

    Raises:
        AstraflowError: CAPABILITY_MISSING on a CPU: it keeps adapters in pinned memory, which
            torch has not without an accelerator.
    """
    if room is None:
        return ()
    if is_on_cpu:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            "SGLang reads adapters into pinned memory, which there is none of without a GPU: on a"
            " CPU take raas.engine.kind vllm or embedded, or leave out model.lora",
        )
    return (
        *("--enable-lora", "--max-loras-per-batch", str(room.count + 1)),
        *("--max-lora-rank", str(room.rank), "--lora-target-modules", *room.targets),
    )


LOADER = "astraflow_plugins.sglang_plugin.load"

_ITEMSIZES = {"f32": 4, "bf16": 2}

_STUBS = Path(__file__).with_name("cpu_stubs")

# A server that lost a process would answer nobody for a minute or two while it writes them.
_NO_DUMPS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}

# Its entry point has the server run `astraflow_plugins.sglang_plugin`.
_PLUGIN = Path(__file__).with_name("plugin")

# The node says what ends a completion. A server that knows end tokens of its own ignores them
# only together with those that it is told.
_NO_END = json.dumps({"eos_token_id": None})


def launch(python: Path, place: ServerSetup) -> ServerCommand:
    """Return how to start a server; idle ones sleep."""
    settings, is_cpu = place.settings, is_on_cpu(place.settings)
    folders = [str(place.folder / "python"), str(_PLUGIN)]
    env = {"HF_HUB_OFFLINE": "1", **_NO_DUMPS}
    device = ()
    if is_cpu:
        folders.append(str(_STUBS))
        env |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(settings.thread_count)}
        # It is kept to torch's own kernels.
        device = (
            *("--device", "cpu", "--attention-backend", "torch_native"),
            *("--sampling-backend", "pytorch", "--disable-cuda-graph"),
            *("--max-total-tokens", str(_cache_token_count(place)), "--mem-fraction-static", "0.3"),
        )
    elif settings.memory is not None:
        device = ("--mem-fraction-static", str(settings.memory))
    argv = (
        *(str(python), "-m", "sglang.launch_server"),
        *("--model-path", str(place.model_dir), "--json-model-override-args", _NO_END),
        *("--host", "127.0.0.1", "--port", str(place.port)),
        *("--dtype", place.dtype_name, "--context-length", str(place.max_context)),
        *("--max-running-requests", str(settings.max_batch), "--skip-tokenizer-init"),
        *("--tensor-parallel-size", str(settings.tensor_parallel)),
        *("--custom-weight-loader", LOADER, "--sleep-on-idle", "--incremental-streaming-output"),
        *(("--enable-return-routed-experts",) if settings.routed_experts else ()),
        *device,
        *adapter_options(place.adapters, is_on_cpu=is_cpu),
        *settings.args,
    )
    return ServerCommand(argv=argv, env={**env, "PYTHONPATH": os.pathsep.join(folders)})


def _cache_token_count(place: ServerSetup) -> int:
    """Return for how many tokens the cache has room: twice what the places can fill at most."""
    config = read_config(place.model_dir)
    heads: int = config["num_attention_heads"]
    width: int = config.get("head_dim") or config["hidden_size"] // heads
    kept = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width
    nbytes = place.settings.cache_gib * 2**30
    wanted = 2 * place.settings.max_batch * place.max_context
    return min(wanted, int(nbytes / (kept * _ITEMSIZES[place.dtype])))

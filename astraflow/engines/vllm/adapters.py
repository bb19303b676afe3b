"""How a vLLM server is started that samples with adapters."""

from collections.abc import Mapping

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.served.dialect import AdapterRoom

# What it knows (vllm.config.lora, release 0.32).
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def adapter_options(room: AdapterRoom | None) -> tuple[str, ...]:
    """Return what a server's command line says of adapters; None: there are none.

    What is unloaded is held on to for as long again: a request that was withdrawn may be a step
    behind.

    Raises:
        AstraflowError: INVALID_FIELD for a rank that it does not know.
    """
    if room is None:
        return ()
    rank = next((known for known in _RANKS if known >= room.rank), None)
    if rank is None:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"model.lora.rank {room.rank} is more than vLLM's {_RANKS[-1]}: take a lower one",
        )
    said = {"max-loras": room.count, "max-cpu-loras": 2 * room.count, "max-lora-rank": rank}
    options = (word for name, value in said.items() for word in (f"--{name}", str(value)))
    return ("--enable-lora", *options)


def adapter_environment(room: AdapterRoom | None) -> Mapping[str, str]:
    """Return what a server's environment says of adapters: that they come while it runs."""
    return {} if room is None else {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

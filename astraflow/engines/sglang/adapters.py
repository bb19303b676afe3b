"""How an SGLang server is started that samples with adapters."""

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.served.dialect import AdapterRoom


def adapter_options(room: AdapterRoom | None, *, is_on_cpu: bool) -> tuple[str, ...]:
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

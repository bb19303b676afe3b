"""Context parallelism: where torch has it, and where it stops."""

import torch

from astraflow.config.policies import Fsdp
from astraflow.core.errors import AstraflowError, Reason


def check_context_parallel(settings: Fsdp, device: torch.device) -> None:
    """Refuse what no rank could compute.

    torch.distributed.tensor.experimental.context_parallel passes keys and values around a ring of
    ranks, in the flash, efficient and cuDNN kernels of scaled_dot_product_attention alone: all
    three need CUDA. On a CPU torch 2.13 stops at the kernel that it takes there,
    `aten._scaled_dot_product_flash_attention_for_cpu`, for which it has no sharding strategy. It
    also cuts positions, which here lie in rows of different lengths.

    Raises:
        AstraflowError: CAPABILITY_MISSING.
    """
    if settings.context_parallel == 1:
        return
    raise AstraflowError(
        Reason.CAPABILITY_MISSING,
        f"trainer.fsdp.context_parallel {settings.context_parallel} on {device.type}: torch's "
        "context_parallel needs scaled_dot_product_attention's flash, efficient or cuDNN kernel, "
        "on CUDA, and rows of one length; take 1, with fsdp.checkpointing for long rows",
    )

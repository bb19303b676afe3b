"""What of a recipe's wishes this machine and this model can grant."""

import torch

from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.embedded.model import Architecture


def device_of(name: str) -> torch.device:
    """Return a device by its name in a recipe; auto: a GPU where torch sees one.

    Raises:
        AstraflowError: INVALID_FIELD for a GPU that torch does not see.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise AstraflowError(
            Reason.INVALID_FIELD, f"engine.device is {name}, and torch sees no GPU; take cpu"
        )
    return device


def max_context_of(asked: int | None, architecture: Architecture) -> int:
    """Return the tokens of prompt and completion; None asks for all that the model can.

    Raises:
        AstraflowError: INVALID_FIELD for more than the model was made for.
    """
    if asked is not None and asked > architecture.max_context:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"engine.max_context {asked} is more than the model's {architecture.max_context}",
        )
    return asked or architecture.max_context

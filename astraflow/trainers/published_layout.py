"""The layout in which an engine's weights are published."""

from collections.abc import Iterable
from typing import Any

from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.layout import Layout
from astraflow.weights.publish.tensors import can_round, dtype_of


def published_layout(parameters: Iterable[tuple[str, Any]], dtype: Dtype) -> Layout:
    """Return where tensors lie once exported.

    Args:
        parameters: Names and arrays, as `TrainEngine.named_parameters` yields them.
        dtype: To which the floats of torch are rounded; other arrays keep their type.

    Raises:
        AstraflowError: LAYOUT_MISMATCH for an array of a type that cannot be published.
    """
    return Layout.of(
        (name, dtype if can_round(array, dtype) else _own(name, array), tuple(array.shape))
        for name, array in parameters
    )


def _own(name: str, array: Any) -> Dtype:
    dtype = dtype_of(array)
    if dtype is None:
        raise AstraflowError(
            Reason.LAYOUT_MISMATCH,
            f"tensor {name} is {array.dtype}, which cannot be published; give float32 or bfloat16",
        )
    return dtype

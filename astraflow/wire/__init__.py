"""The contract in Python: protobuf messages to core types and back.

A file holds what belongs together of one proto package. Parsing is validating: `decode_*` returns a
sound object or raises AstraflowError, with the field's name in the metadata. Files are loaded
together, for a converter uses those of the dataclasses nested in its own.
"""

from astraflow.wire import (  # noqa: I001 - those that are nested in others first
    common,
    tasks,
    rollout,
    versions,
    control,
    dataflow,
    transfers,
)

__all__ = [
    "common",
    "control",
    "dataflow",
    "rollout",
    "tasks",
    "transfers",
    "versions",
]

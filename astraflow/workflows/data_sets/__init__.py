"""Data sets: rows of files, with stable ids, in an order that a seed decides."""

from astraflow.workflows.data_sets.reader import DataSetReader, open_data_set

__all__ = ["DataSetReader", "open_data_set"]

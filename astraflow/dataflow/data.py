"""Opens the data sets of a recipe."""

from pathlib import Path

import structlog

from astraflow.config.recipe import Recipe
from astraflow.dataflow.prompts import DataSets
from astraflow.workflows.data_sets import DataSetReader, open_data_set

log = structlog.get_logger(__name__)


def open_data_sets(recipe: Recipe, *, root: Path | None = None) -> DataSets:
    """Open every data set; rows that are too long are left out and counted in the log.

    Args:
        recipe: Names and describes them.
        root: Where relative paths start; None: the working directory.

    Raises:
        AstraflowError: INVALID_FIELD when one cannot be read.
    """
    start = root or Path.cwd()
    readers: dict[str, DataSetReader] = {}
    for name, settings in recipe.data.items():
        reader = open_data_set(name, settings, start, seed=recipe.seed)
        readers[name] = reader
        log.info("data set", name=name, prompts=len(reader), left_out=reader.left_out_count)
    return DataSets(readers)

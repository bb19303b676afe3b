"""Data sets as the recipe describes them: rows become prompts."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from astraflow.config.recipe import DataSet
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PromptId
from astraflow.core.tasks import Prompt
from astraflow.workflows.data_sets.hub import download_data_set
from astraflow.workflows.data_sets.rows import HubDataSet, JsonLines, ParquetRows, Row, Rows

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_OPENERS: Mapping[str, Callable[[Path], Rows]] = {
    "jsonl": JsonLines,
    "parquet": ParquetRows,
    "datasets": HubDataSet,
}
_FORMATS = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


def open_data_set(name: str, settings: DataSet, root: Path, *, seed: int = 0) -> "DataSetReader":
    """Open a data set; every row is looked at once, for its id and its length.

    Args:
        name: As in the recipe; the start of every prompt id.
        settings: What the recipe says.
        root: Where a relative path starts.
        seed: Of the order.

    Raises:
        AstraflowError: INVALID_FIELD when the file cannot be read, a row lacks a field, or
            two rows have one id.
    """
    if settings.hub is not None:
        path = download_data_set(settings, report=log.info)
    else:
        path = root / (settings.path or "")
    rows = _OPENERS[_format_of(settings, path)](path)
    return DataSetReader(name, rows, settings, seed=seed)


class DataSetReader:
    """Rows with stable ids, passed through in an order that seed and pass decide.

    Attributes:
        name: As in the recipe.
        id_field: With the rows' ids; None: a digest of the row.
        row_count: Rows looked at.
        left_out_count: Of these, longer than the recipe allows.
    """

    def __init__(self, name: str, rows: Rows, settings: DataSet, *, seed: int) -> None:
        """Look at every row once; `open_data_set` is the way to get one."""
        self.name = name
        self.id_field = settings.id_field
        self._rows = rows
        self._settings = settings
        self._seed = seed
        self._ids: list[PromptId] = []
        self._kept: list[int] = []
        self.row_count = len(rows) if settings.limit is None else min(len(rows), settings.limit)
        self._look_at_rows()
        self.left_out_count = self.row_count - len(self._kept)

    def __len__(self) -> int:
        """Return how many prompts one pass has."""
        return len(self._kept)

    def prompt(self, index: int, *, epoch: int = 0) -> Prompt:
        """Return one prompt, counted in the order of the file."""
        fields, blobs = _split(self._rows[self._kept[index]])
        return Prompt(
            prompt_id=self._ids[index],
            data_set=self.name,
            epoch=epoch,
            fields=fields,
            blobs=blobs,
        )

    def __iter__(self) -> Iterator[Prompt]:
        """Yield every prompt in the order of the file, which is quicker than asking for each."""
        ids = dict(zip(self._kept, self._ids, strict=True))
        for index, row in zip(range(self.row_count), self._rows, strict=False):
            if index in ids:
                fields, blobs = _split(row)
                yield Prompt(prompt_id=ids[index], data_set=self.name, fields=fields, blobs=blobs)

    def epoch(self, number: int) -> Iterator[Prompt]:
        """Yield every prompt once; the order is the same whenever it is asked for."""
        return (self.prompt(index, epoch=number) for index in self._order(number).tolist())

    def _order(self, number: int) -> np.ndarray:
        """Return i64[n], the order of one pass."""
        if not self._settings.shuffle:
            return np.arange(len(self))
        words = [self._seed & (2**64 - 1), number, *self.name.encode()]
        return np.random.default_rng(words).permutation(len(self))

    def _look_at_rows(self) -> None:
        seen = Counter[str]()
        for index, row in zip(range(self.row_count), self._rows, strict=False):
            if not self._is_short_enough(row, index):
                continue
            key = self._key(row, index)
            seen[key] += 1
            if seen[key] > 1:
                key = self._repeated(key, seen[key], index)
            self._ids.append(PromptId(f"{self.name}/{key}"))
            self._kept.append(index)

    def _is_short_enough(self, row: Row, index: int) -> bool:
        limit = self._settings.max_prompt_chars
        if limit is None:
            return True
        return (
            len(str(self._field(row, self._settings.length_field, "length_field", index))) <= limit
        )

    def _key(self, row: Row, index: int) -> str:
        """Return what names a row: its own id, or a digest of all of it."""
        try:
            text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=_as_hex)
        except TypeError as error:
            raise self._fault(
                f"row {index + 1} has a field that JSON cannot say: {error}"
            ) from error
        field = self._settings.id_field
        if field is not None:
            return str(self._field(row, field, "id_field", index))
        return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()

    def _repeated(self, key: str, count: int, index: int) -> str:
        """Return another name for a row that equals an earlier one."""
        if self._settings.id_field is not None:
            raise self._fault(f"row {index + 1} has the id '{key}' of an earlier row")
        return f"{key}-{count}"

    def _field(self, row: Row, field: str, setting: str, index: int) -> Any:
        if field not in row:
            raise self._fault(
                f"row {index + 1} has no '{field}' ({setting}), only {', '.join(row)}"
            )
        return row[field]

    def _fault(self, what: str) -> AstraflowError:
        return AstraflowError(
            Reason.INVALID_FIELD,
            f"data.{self.name}: {what} in {self._settings.path or self._settings.hub}",
            metadata={"field": f"data.{self.name}"},
        )


def _format_of(settings: DataSet, path: Path) -> str:
    if settings.format != "auto":
        return settings.format
    if path.is_dir():
        return "datasets"
    found = _FORMATS.get(path.suffix)
    if found is None:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"data set {path}: what format is it? Set format to {', '.join(_OPENERS)}",
        )
    return found


def _as_hex(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(type(value).__name__)


def _split(row: Row) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Tell what JSON can say from bytes, which travel as blobs."""
    fields = {name: value for name, value in row.items() if not isinstance(value, bytes)}
    blobs = {name: value for name, value in row.items() if isinstance(value, bytes)}
    return fields, blobs

"""Rows of files, by number; what is large stays on disk."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from astraflow.core.errors import AstraflowError, Reason

Row = Mapping[str, Any]


class Rows(Protocol):
    """All rows of a data set, in the order of the file."""

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def __getitem__(self, index: int) -> Row:
        """Return one row."""
        ...

    def __iter__(self) -> Iterator[Row]:
        """Yield every row, which is quicker than asking for each."""
        ...


class SeedRows:
    """Rows `{"seed": n}`, for environments that make a task of a seed."""

    def __init__(self, first: int, end: int) -> None:
        self._seeds = range(first, end)

    def __len__(self) -> int:
        """Return how many seeds there are."""
        return len(self._seeds)

    def __getitem__(self, index: int) -> Row:
        """Return one row."""
        return {"seed": self._seeds[index]}

    def __iter__(self) -> Iterator[Row]:
        """Yield every row."""
        return ({"seed": seed} for seed in self._seeds)


class JsonLines:
    """A file with one JSON object a line; empty lines do not count.

    Keeps 8 bytes per row in memory; a row is read when it is asked for.
    """

    def __init__(self, path: Path) -> None:
        """Find where the rows start.

        Raises:
            AstraflowError: INVALID_FIELD when the file cannot be read.
        """
        self._path = path
        self._offsets: list[int] = []
        offset = 0
        with _open(path) as file:
            for line in file:
                if not line.isspace():
                    self._offsets.append(offset)
                offset += len(line)

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        """Return one row."""
        with _open(self._path) as file:
            return self._read(file, index)

    def __iter__(self) -> Iterator[Row]:
        """Yield every row."""
        with _open(self._path) as file:
            for index in range(len(self)):
                yield self._read(file, index)

    def _read(self, file: BinaryIO, index: int) -> Row:
        file.seek(self._offsets[index])
        return self._parse(file.readline(), index)

    def _parse(self, line: bytes, index: int) -> Row:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise AstraflowError(
                Reason.INVALID_FIELD, f"{self._path}: row {index + 1} is not JSON: {error}"
            ) from error
        if not isinstance(row, dict):
            raise AstraflowError(
                Reason.INVALID_FIELD, f"{self._path}: row {index + 1} is not a JSON object"
            )
        return cast("Row", row)


class ParquetRows:
    """A Parquet file, read whole; needs pyarrow (extra `parquet`)."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            AstraflowError: INVALID_FIELD when it cannot be read, or pyarrow is missing.
        """
        try:
            from pyarrow import (  # noqa: PLC0415 - an extra  # pyright: ignore[reportMissingTypeStubs]
                parquet,
            )
        except ImportError as error:
            raise _missing("pyarrow", "parquet", path) from error
        _open(path).close()
        try:
            self._table: Any = cast("Any", parquet).read_table(path)
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error

    def __len__(self) -> int:
        """Return how many rows there are."""
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        """Return one row."""
        return self._table.slice(index, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        """Yield every row."""
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()


class HubDataSet:
    """A folder written by `datasets.Dataset.save_to_disk`; needs datasets (extra `datasets`)."""

    def __init__(self, path: Path) -> None:
        """Open the folder; nothing is downloaded.

        Raises:
            AstraflowError: INVALID_FIELD when it is not such a folder, holds several
                splits, or datasets is missing.
        """
        try:
            import datasets  # noqa: PLC0415 - an extra  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise _missing("datasets", "datasets", path) from error
        try:
            loaded: Any = cast("Any", datasets).load_from_disk(str(path))
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        if isinstance(loaded, dict):
            splits = ", ".join(cast("dict[str, Any]", loaded))
            raise AstraflowError(
                Reason.INVALID_FIELD, f"{path} holds the splits {splits}; name one: {path}/<split>"
            )
        self._data_set = loaded

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._data_set)

    def __getitem__(self, index: int) -> Row:
        """Return one row."""
        return self._data_set[index]

    def __iter__(self) -> Iterator[Row]:
        """Yield every row."""
        return iter(self._data_set)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> AstraflowError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return AstraflowError(Reason.INVALID_FIELD, f"data set {path} cannot be read: {why}")


def _missing(package: str, extra: str, path: Path) -> AstraflowError:
    return AstraflowError(
        Reason.INVALID_FIELD,
        f"data set {path} needs {package}: pip install 'astraflow[{extra}]'",
    )

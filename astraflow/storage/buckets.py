"""Buckets: objects by name under one URL, behind fsspec (`file://`, `s3://` and others)."""

import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from astraflow.config.extras import install
from astraflow.core.errors import AstraflowError, Reason

PROTOCOLS: Final = (
    *("file", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "obs"),
    *("cos", "hdfs", "webhdfs", "sftp", "smb", "http", "https"),
)
"""What is opened. An address comes over the network, so none that runs code or opens others is."""

PART: Final = ".part"
"""How the name of a file ends that is being written."""


class Bucket:
    """Objects by name under one URL; a store that fails raises SOURCE_UNREACHABLE."""

    def __init__(self, url: str) -> None:
        """Open nothing yet.

        Args:
            url: Such as s3://bucket/run, file:///shared/run.

        Raises:
            AstraflowError: INVALID_FIELD for a URL that is none of these; CAPABILITY_MISSING
                when the package for it is not installed.
        """
        self.url = url.rstrip("/")
        protocol, _, rest = url.partition("://")
        if protocol not in PROTOCOLS or not rest or "::" in url:
            raise AstraflowError(
                Reason.INVALID_FIELD,
                f"'{url}' is no URL of an object store, such as s3://bucket/run or"
                " file:///shared/run",
            )
        self._fs, self._root = _opened(self.url)
        self._is_local = protocol == "file"

    def read(self, name: str, first: int = 0, end: int | None = None) -> bytes:
        """Return an object, or a part of it; FileNotFoundError when there is none."""
        path = self._path(name)
        with _store_errors(f"{self.url}/{name} cannot be read"):
            if end is not None and self._is_local:
                # Python makes place for all that is asked for, and waits for a pipe that is empty.
                end = min(end, self._fs.size(path))
                if end <= first:
                    return b""
            return bytes(self._fs.cat_file(path, start=first, end=end))

    def write(self, name: str, content: bytes, *, is_synced: bool = False) -> None:
        """Write an object: the old one, or none, is there until the new one is, whole."""
        with _store_errors(f"{self.url}/{name} cannot be written", lets=AstraflowError):
            if self._is_local:
                _write_file(Path(self._path(name)), (content,), is_synced=is_synced)
            else:
                self._fs.pipe_file(self._path(name), content)

    def write_parts(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write a large object part by part; a failure may leave a part of it."""
        with _store_errors(f"{self.url}/{name} cannot be written", lets=AstraflowError):
            if self._is_local:
                _write_file(Path(self._path(name)), parts)
                return
            with self._fs.open(self._path(name), "wb") as file:
                for part in parts:
                    file.write(part)

    def remove(self, name: str) -> None:
        """Remove an object, or a folder with all in it; nothing there is nothing to do."""
        with suppress(FileNotFoundError), _store_errors(f"{self.url}/{name} cannot be removed"):
            self._fs.invalidate_cache()
            self._fs.rm(self._path(name), recursive=True)

    def remove_all(self, names: Sequence[str]) -> None:
        """Remove many objects; one that is not there is nothing to do."""
        if not self._is_local and len(names) > 1:
            with suppress(FileNotFoundError), _store_errors(f"{self.url} cannot be cleared"):
                self._fs.rm([self._path(name) for name in names])
                return
        for name in names:
            if not self._is_local:
                self.remove(name)
                continue
            with _store_errors(f"{self.url}/{name} cannot be removed"):
                Path(self._path(name)).unlink(missing_ok=True)

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder; none when it is not there."""
        path = self._path(folder)
        with suppress(FileNotFoundError), _store_errors(f"{self.url}/{folder} cannot be listed"):
            self._fs.invalidate_cache()
            return sorted(each.rstrip("/").rpartition("/")[2] for each in self._fs.ls(path, False))
        return []

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _opened(url: str) -> tuple[Any, str]:
    try:
        fsspec = import_module("fsspec.core")  # an extra
    except ImportError as error:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING, f"{url} needs fsspec: {install('store')}"
        ) from error
    try:
        fs, root = fsspec.url_to_fs(url)
    except ImportError as error:
        raise AstraflowError(Reason.CAPABILITY_MISSING, f"{url}: {error}") from error
    except Exception as error:  # every file system has its own
        raise AstraflowError(Reason.INVALID_FIELD, f"{url} cannot be opened: {error}") from error
    return fs, str(root).rstrip("/")


def _write_file(
    path: Path, parts: Iterable[bytes | memoryview], *, is_synced: bool = False
) -> None:
    # A name of its own: ranks write the same layout at once.
    part = path.with_name(f"{path.name}.{uuid4().hex}{PART}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("wb") as file:
            file.writelines(parts)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


@contextmanager
def _store_errors(
    what: str, *, lets: type[Exception] | tuple[type[Exception], ...] = FileNotFoundError
) -> Generator[None]:
    """Say of any failure what it means: every file system has its own."""
    try:
        yield
    except lets:
        raise
    except Exception as error:
        raise AstraflowError(
            Reason.SOURCE_UNREACHABLE, f"{what}: {error or type(error).__name__}", retryable=True
        ) from error

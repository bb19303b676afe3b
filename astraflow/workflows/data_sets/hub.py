"""Data sets of the Hugging Face hub, which a recipe names there; kept on disk as files are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from astraflow.config.recipe import DataSet
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.hub import commit_of, unreachable
from astraflow.storage.cache import cache_dir, making


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
    """Return the folder of a split, as `datasets` saves one; what is here is not asked for again.

    Args:
        settings: With `hub`.
        report: Told what is done, one line each.

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
            f"{name} of the Hugging Face hub needs {error.name}: pip install 'astraflow[datasets]'",
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
    """Return the folder of a split that was downloaded before, of any commit where none is named.

    Args:
        settings: With `hub`.
    """
    pattern = _folder(settings, settings.revision or "*")
    found = pattern.parent.glob(pattern.name)
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def _folder(settings: DataSet, commit: str) -> Path:
    name = str(settings.hub).replace("/", "--")
    parts = [name, settings.config or "default", settings.split, commit]
    return cache_dir() / "data" / "-".join(parts)

"""The Hugging Face hub, for models that a recipe names there and no others."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from astraflow.config.extras import install
from astraflow.config.model_dirs import must_be_model
from astraflow.core.errors import AstraflowError, Reason

# What a model is made of here: neither pickles nor code.
_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt")

_COMMIT = re.compile(r"[0-9a-f]{40}")

Kind = Literal["model", "dataset"]


def commit_of(repository: str, revision: str | None, *, kind: Kind = "model") -> str:
    """Return the commit that a branch or a tag of the hub stands for now.

    Where the hub is not to be asked (HF_HUB_OFFLINE), it is the one that was downloaded last.

    Raises:
        AstraflowError: CAPABILITY_MISSING without huggingface_hub, SOURCE_UNREACHABLE when the hub
            cannot be asked, or has no such repository or revision.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    hub = _library(repository)
    try:
        if hub.is_offline_mode():
            folder = hub.snapshot_download(
                repository, revision=revision, repo_type=kind, local_files_only=True
            )
            return Path(folder).name
        return str(hub.HfApi().repo_info(repository, revision=revision, repo_type=kind).sha)
    except Exception as error:  # the library raises what its HTTP client does, too
        raise unreachable(repository, revision, error) from error


def download_model(repository: str, revision: str | None, *, report: Callable[[str], None]) -> Path:
    """Return the directory of a model of the hub; what is in its cache is not downloaded again.

    Raises:
        AstraflowError: CAPABILITY_MISSING without huggingface_hub, SOURCE_UNREACHABLE when it
            cannot be downloaded, INVALID_FIELD when it lacks files that a model has.
    """
    hub = _library(repository)
    options: dict[str, Any] = {"revision": revision, "allow_patterns": list(_FILES)}
    try:
        folder = Path(hub.snapshot_download(repository, local_files_only=True, **options))
        must_be_model(folder, where=repository)
    except Exception:  # noqa: BLE001 - not here, or not all of it: the hub is asked
        report(f"downloading {repository} ({revision or 'main'}) from the Hugging Face hub")
        try:
            folder = Path(hub.snapshot_download(repository, **options))
        except Exception as error:
            raise unreachable(repository, revision, error) from error
        report(f"{folder} is here")
    must_be_model(folder, where=f"{repository} of the Hugging Face hub")
    return folder


def kept_model(repository: str, revision: str | None) -> Path | None:
    """Return the directory of a model that was downloaded before; None: there is none."""
    hub = _library(repository)
    options: dict[str, Any] = {"revision": revision, "allow_patterns": list(_FILES)}
    try:
        return Path(hub.snapshot_download(repository, local_files_only=True, **options))
    except Exception:  # noqa: BLE001 - the library raises what its HTTP client does, too
        return None


def _library(repository: str) -> Any:
    try:
        import huggingface_hub  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise AstraflowError(
            Reason.CAPABILITY_MISSING,
            f"{repository} of the Hugging Face hub needs {error.name}: {install('torch')}",
        ) from error
    return cast("Any", huggingface_hub)


def unreachable(repository: str, revision: str | None, error: Exception) -> AstraflowError:
    why = " ".join(str(error).split())
    return AstraflowError(
        Reason.SOURCE_UNREACHABLE,
        f"{repository} ({revision or 'main'}) cannot be had from the Hugging Face hub: "
        f"{type(error).__name__}: {why[:400]}. Check its name; a gated one needs `hf auth login`; "
        "on a machine without a network, download it elsewhere and give its directory as 'path'",
    )

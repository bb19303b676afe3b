"""The folders that policies start from."""

from pathlib import Path
from typing import Any

from astraflow.config.run_dir import read_json
from astraflow.core.errors import AstraflowError, Reason


def checked_model_dir(policy_id: str, directory: Path) -> Path:
    """Return the folder of a policy's model.

    Raises:
        AstraflowError: INVALID_FIELD when no Hugging Face model is in it.
    """
    if not (directory / "config.json").is_file():
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"policy {policy_id}: {directory} has no config.json; give the folder of a Hugging "
            "Face model",
        )
    return directory


def must_be_model(directory: Path, *, where: str) -> None:
    """Refuse a directory that is no model.

    Raises:
        AstraflowError: INVALID_FIELD when it is not there or lacks a file.
    """
    if not directory.is_dir():
        raise AstraflowError(Reason.INVALID_FIELD, f"{where}: {directory} is not a directory")
    needed = ("config.json", "tokenizer.json")
    missing = [name for name in needed if not (directory / name).exists()]
    if not list(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise AstraflowError(
            Reason.INVALID_FIELD,
            f"{where}: {directory} lacks {', '.join(missing)}; a Hugging Face model directory is "
            "needed",
        )


def read_config(directory: Path) -> dict[str, Any]:
    """Return `config.json` of a model; what it says of its text counts first."""
    config = read_json(directory / "config.json")
    return {**config, **config.get("text_config", {})}

"""The folders that policies start from."""

from pathlib import Path

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

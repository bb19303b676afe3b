"""Devices: whether a server computes on a CPU."""

from pathlib import Path

from astraflow.config.recipe import EngineSettings

_GPUS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def is_on_cpu(settings: EngineSettings) -> bool:
    """Return whether a recipe's server is for a CPU; auto: where no GPU's driver is."""
    if settings.device != "auto":
        return settings.device == "cpu"
    return not has_gpus()


def has_gpus() -> bool:
    """Return whether a GPU's driver is here."""
    return any(device.exists() for device in _GPUS)

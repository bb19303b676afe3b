"""Exchange folders: updates as files in shared memory, each written once and read once."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.core.tensors import WeightUpdate
from astraflow.engines import inside
from astraflow.engines.inside.exchange import MAGIC, aligned
from astraflow.engines.served.owned_folder import OwnedFolder


class ExchangeFolder:
    """A folder in memory that a server reads updates from, and imports what reads them."""

    def __init__(self, name: str) -> None:
        """Make it, with a link to what the server imports.

        Args:
            name: For people who find it.
        """
        self._folder = OwnedFolder(name)
        self.path = self._folder.path
        python = self.path / "python"
        python.mkdir()
        (python / "astraflow_inside").symlink_to(Path(inside.__file__).parent)

    @asynccontextmanager
    async def file(self, update: WeightUpdate) -> AsyncGenerator[Path]:
        """Write an update; the file is there as long as the body runs."""
        path = self.path / f"{update.version}.update"
        try:
            await asyncio.to_thread(write_update, path, update)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove it."""
        self._folder.close()


def write_update(path: Path, update: WeightUpdate) -> None:
    """Write an update as `inside.exchange` reads it; no copy of its arrays is made."""
    tensors, arrays = _laid_out(update)
    said = {"version": update.version, "base_version": update.base_version, "tensors": tensors}
    header = json.dumps(said).encode()
    start = len(MAGIC) + 8 + len(header)
    with path.open("wb") as file:
        file.write(MAGIC + len(header).to_bytes(8, "little") + header)
        for offset, array in arrays:
            file.seek(aligned(start) + offset)
            file.write(np.ascontiguousarray(array).data)


def _laid_out(update: WeightUpdate) -> tuple[list[dict[str, Any]], list[tuple[int, np.ndarray]]]:
    """Return what the header says of each tensor, and the arrays with their offsets."""
    tensors: list[dict[str, Any]] = []
    arrays: list[tuple[int, np.ndarray]] = []
    end = 0

    def place(array: np.ndarray) -> int:
        nonlocal end
        offset, end = end, aligned(end + array.nbytes)
        arrays.append((offset, array))
        return offset

    for part in update.tensors:
        indices = None if part.indices is None else part.indices.astype(np.int64, copy=False)
        tensors.append(
            {
                "name": part.spec.name,
                "dtype": str(part.spec.dtype),
                "shape": part.spec.shape,
                "count": part.values.size,
                "indices": None if indices is None else place(indices),
                "values": place(part.values.reshape(-1)),
            }
        )
    return tensors, arrays

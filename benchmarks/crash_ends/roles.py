"""What the processes of a run that crashes do; each function is one process."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Final

import structlog

from astraflow.core.errors import AstraflowError
from astraflow.dataflow.main import JOIN_TOKEN, OPERATOR_TOKEN, main_serve
from astraflow.storage.fault_points import VARIABLE
from astraflow.storage.sqlite import SqliteJournal
from astraflow.telemetry.logging import configure_logging
from crash_ends.members import CountingTrainer, Node
from crash_ends.scene import JOIN, OPERATOR, Scene

_LOOK_S: Final = 0.01

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def hub(root: str, name: str, fault: str) -> None:
    """Serve the hub; it dies where `fault` says, unset: nowhere."""
    scene = _logged(root, name)
    _trim_what_is_copied(scene)
    os.environ.update({JOIN_TOKEN: JOIN, OPERATOR_TOKEN: OPERATOR, VARIABLE: fault})
    try:
        code = main_serve(scene.read_recipe(), run_dir=scene.run_dir.root)
    except AstraflowError as error:
        log.error("the hub ends", reason=error.reason, why=error.message)  # noqa: TRY400
        code = 1
    raise SystemExit(code)


def node(root: str, name: str) -> None:
    """Answer tasks."""
    asyncio.run(Node(_logged(root, name), name).run())


def trainer(root: str, name: str) -> None:
    """Train, or go on training."""
    CountingTrainer(_logged(root, name)).run()


def _trim_what_is_copied(scene: Scene) -> None:
    """Have the journal of this process let records go once the archive has them."""
    trim = SqliteJournal.trim

    async def trim_copied(journal: SqliteJournal, before: int, *, spare_nbytes: int = 0) -> None:
        while int(scene.copied.read_text()) < before:  # noqa: ASYNC110 - another process copies
            await asyncio.sleep(_LOOK_S)
        await trim(journal, before, spare_nbytes=spare_nbytes)

    SqliteJournal.trim = trim_copied  # type: ignore[method-assign]


def _logged(root: str, name: str) -> Scene:
    scene = Scene(Path(root))
    configure_logging(name, log_file=scene.log(name), level="warning")
    logging.captureWarnings(capture=True)
    return scene

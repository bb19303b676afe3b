"""Real inference servers for tests and benchmarks, started once for many engines."""

import asyncio
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx

from astraflow.config.recipe import EngineSettings
from astraflow.engines.building import dialect_of
from astraflow.engines.served.dialect import AdapterLimits, Dialect, ServerSetup
from astraflow.engines.served.exchange import ExchangeFolder
from astraflow.engines.served.model import ModelDescription
from astraflow.engines.served.server import environment, free_port, kept_command


@contextmanager
def running_server(
    settings: EngineSettings, model_dir: Path, *, adapters: AdapterLimits | None = None
) -> Generator[str]:
    """Start a server that `raas.engine.url` can name; it ends with the body.

    Args:
        settings: With a kind of server.
        model_dir: Hugging Face.
        adapters: Its room for them; None: it serves the model alone.

    Yields:
        Its address, once it has generated a token; its log is `server.log` beside the model.

    Raises:
        ChildProcessError: It ended.
    """
    dialect, model, port = (
        dialect_of(settings),
        ModelDescription.read(model_dir, settings.max_context),
        free_port(),
    )
    folder = ExchangeFolder(f"test-{dialect.name}")
    place = ServerSetup(
        model_dir=model_dir,
        port=port,
        folder=folder.path,
        settings=settings,
        max_context=model.max_context,
        adapters=adapters,
    )
    launch = dialect.launch(place)
    with (model_dir.parent / "server.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603  the recipe's command
            kept_command(launch),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment(launch),
            # What ends a run of tests by its group does not end the keeper before its server.
            start_new_session=True,
        )
    try:
        asyncio.run(_until_alive(dialect, f"http://127.0.0.1:{port}", process))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.communicate()
        folder.close()


async def _until_alive(dialect: Dialect, url: str, process: "subprocess.Popen[bytes]") -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        while not await _answers(dialect, http):
            if process.poll() is not None:
                raise ChildProcessError(f"the server ended with code {process.returncode}")
            await asyncio.sleep(0.5)


async def _answers(dialect: Dialect, http: httpx.AsyncClient) -> bool:
    try:
        return await dialect.is_alive(http)
    except httpx.HTTPError:
        return False

"""The hub of the run.

python -m live_ends.hub ADDRESS FOLDER
"""

import asyncio
import sys
from pathlib import Path

from astraflow.dataflow.hub import Hub
from astraflow.dataflow.server import serve_hub
from astraflow.rpc.access import HubTokens
from astraflow.telemetry.logging import configure_logging
from live_ends.run import TOKEN, recipe_of, say


def _ready(_: Hub, address: str) -> None:
    say(address=address)


async def main(address: str, folder: Path) -> None:
    serving = asyncio.create_task(
        serve_hub(
            recipe_of(folder),
            run_dir=folder / "run",
            tokens=HubTokens(join=TOKEN, operator=TOKEN),
            listen=f"{address}:0",
            on_ready=_ready,
        )
    )
    over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait({serving, over}, return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    await asyncio.wait({serving})


if __name__ == "__main__":
    configure_logging("hub", level="warning")
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))

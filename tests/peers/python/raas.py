"""Our own node with a small engine, as a process of its own: `python raas.py HUB TOKEN`."""

import asyncio
import sys
import tempfile
from pathlib import Path

from astraflow.raas.policies import ServedModel
from astraflow.testing import CharTokenizer, SmallEngine, small_recipe
from astraflow.testing.nodes import make_node


async def main(hub, token):
    tokenizer = CharTokenizer()
    with tempfile.TemporaryDirectory() as folder:
        recipe = small_recipe(Path(folder), scorer="exact")
    model = ServedModel(engine=SmallEngine(tokenizer), tokenizer=tokenizer)
    node = make_node(
        recipe, hub=hub, token=token, name="ours", capacity=16, models={"solver": model}
    )
    await node.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

"""What publishing costs a trainer of many ranks: the same steps with and without a version.

    torchrun --standalone --nproc-per-node 2 benchmarks/rank_stall.py --json rank_stall.json

As `trainer_stall.py`, of which it has models, steps and sums; but the model is shared out over the
ranks (FSDP2), every rank encodes its own rows, and nobody pulls. What is said is of rank 0.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from astraflow.core.dtype import Dtype
from astraflow.core.versions import VersionInfo
from astraflow.telemetry.logging import configure_logging
from astraflow.trainers.fsdp.engine import ShardedEngine
from astraflow.trainers.fsdp.orders import PublishVersion
from astraflow.trainers.fsdp.ranks import Ranks, joined_ranks
from astraflow.trainers.fsdp.weights import publish_shard, shard_publisher
from astraflow.trainers.origin import WeightOrigin
from astraflow.trainers.published_layout import published_layout
from fanout_ends.origin import POLICY
from trainer_stall import MODELS, Step, made_rows, settings_of, summary, timed, write_weights


class ShardPublishing:
    """Publishes the rows of this rank with those of the others, on the thread that encodes."""

    is_damaged = False

    def __init__(self, ranks: Ranks, engine: ShardedEngine) -> None:
        layout = published_layout(engine.named_parameters(), Dtype.BF16)
        self.layout = layout
        self._own = shard_publisher(POLICY, layout, ranks)
        self._beside = ranks.beside()

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Any],
        *,
        step: int,
        restored_from: int | None = None,
    ) -> VersionInfo:
        """Publish what all ranks publish at once."""
        order = PublishVersion(version, step, restored_from)
        return publish_shard(self._own, tensors, order, self._beside)


class Silent:
    """Tells nobody of versions."""

    def announce(self, info: Future[VersionInfo], *, then: Callable[[], None]) -> None:
        """Call back once a version is made."""
        info.add_done_callback(lambda _: then())


def measure(name: str, given: argparse.Namespace, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Return what versions cost the steps of one model on this rank."""
    shape, token_count, step_count = MODELS[name]
    step_count = given.steps or step_count
    if ranks.rank == 0:
        write_weights(folder, shape)
    ranks.wait()
    engine = ShardedEngine(settings_of(given.threads), model_dir=folder, ranks=ranks)
    engine.prepare()
    publishing = ShardPublishing(ranks, engine)
    origin = WeightOrigin(
        engine,
        layout=publishing.layout,
        publisher=publishing,
        herald=Silent(),
        first_version=0,
    )
    origin.publish(step=0)
    batch = made_rows(shape["vocab_size"], token_count // ranks.count, seed=ranks.rank)
    engine.train_step(batch)
    kinds: dict[bool, list[Step]] = {True: [], False: []}
    for _ in range(given.blocks):
        for publishes in (False, True):
            ranks.wait()
            kinds[publishes] += [timed(engine, origin, batch, publishes) for _ in range(step_count)]
            origin.hold()
    return summary(kinds[False], kinds[True]) | {"ranks": ranks.count, "tokens": token_count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["demo"], choices=MODELS)
    parser.add_argument("--steps", type=int, help="of a block; unset: as the model has them")
    parser.add_argument("--blocks", type=int, default=6, help="of each kind")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--json", type=Path, help="where rank 0 writes the result")
    given = parser.parse_args()
    configure_logging("trainer", level="warning")
    began = time.monotonic()
    with joined_ranks(device="cpu", replicas=1) as ranks, tempfile.TemporaryDirectory() as own:
        folders = {name: Path(ranks.tell(own)) / name for name in given.models}
        result = {name: measure(name, given, ranks, path) for name, path in folders.items()}
        ranks.wait()
        if ranks.rank == 0:
            text = json.dumps(result, indent=2)
            print(text, f"in {time.monotonic() - began:.0f} s")
            if given.json:
                given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()

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
from functools import partial
from pathlib import Path
from typing import Any

from astraflow.config.policies import Fsdp
from astraflow.core.tensors import Dtype
from astraflow.core.versions import VersionInfo
from astraflow.telemetry.logging import configure_logging
from astraflow.trainers.fsdp.engine import ShardedEngine
from astraflow.trainers.fsdp.ranks import Ranks, joined_ranks
from astraflow.trainers.fsdp.weights import publish_shard, shard_publisher
from astraflow.trainers.main import shared_interpreter
from astraflow.trainers.origin import Publishing, WeightOrigin, published_layout
from fanout_ends.origin import POLICY
from trainer_stall import (
    MODELS,
    Kind,
    Model,
    asked,
    made_rows,
    measured,
    settings_of,
    summary,
    timed,
    write_weights,
)


class ShardPublishing(Publishing):
    """Publishes the rows of this rank with those of the others, on the thread that encodes."""

    def __init__(self, ranks: Ranks, engine: ShardedEngine) -> None:
        layout = published_layout(engine.named_parameters(), Dtype.BF16)
        self.layout = layout
        super().__init__(shard_publisher(POLICY, layout, ranks))
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
        how = {"version": version, "step": step, "restored_from": restored_from}
        return publish_shard(self.own, tensors, self._beside, **how)


class Silent:
    """Tells nobody of versions."""

    def announce(self, info: Future[VersionInfo], *, then: Callable[[], None]) -> None:
        """Call back once a version is made."""
        info.add_done_callback(lambda _: then())


def measure(model: Model, threads: int, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Return what versions cost the steps of one model on this rank."""
    if ranks.rank == 0:
        write_weights(folder, model.shape)
    ranks.wait()
    engine = ShardedEngine(settings_of(threads), model_dir=folder, ranks=ranks)
    engine.prepare()
    publishing = ShardPublishing(ranks, engine)
    origin = WeightOrigin(
        engine,
        layout=publishing.layout,
        publishing=publishing,
        herald=Silent(),
        first_version=0,
    )
    share = model.token_count // ranks.count
    batch = made_rows(model.shape["vocab_size"], share, seed=ranks.rank)

    def settle() -> None:
        origin.hold()
        ranks.wait()

    origin.publish(step=0)
    engine.train_step(batch)
    kinds = (Kind.ALONE, Kind.PUBLISHING)
    rounds = measured(partial(timed, engine, origin, batch), kinds, model, settle=settle)
    return summary(rounds) | {"ranks": ranks.count, "tokens": model.token_count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["demo"], choices=MODELS)
    parser.add_argument("--steps", type=int, help="of a block; unset: as the model has them")
    parser.add_argument("--blocks", type=int, help="of each kind; unset: as the model has them")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--json", type=Path, help="where rank 0 writes the result")
    given = parser.parse_args()
    configure_logging("trainer", level="warning")
    began = time.monotonic()
    with joined_ranks(device="cpu", fsdp=Fsdp()) as ranks, tempfile.TemporaryDirectory() as own:
        folder = Path(ranks.broadcast(own))
        with shared_interpreter():
            result = {
                name: measure(asked(MODELS[name], given), given.threads, ranks, folder / name)
                for name in given.models
            }
        ranks.wait()
        if ranks.rank == 0:
            text = json.dumps(result, indent=2)
            print(text, f"in {time.monotonic() - began:.0f} s")
            if given.json:
                given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()

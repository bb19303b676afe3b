"""What one rank does in these tests: `torchrun ranks_at_work.py FOLDER`."""

import pickle
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from astraflow.config.recipe import TrainerConfig
from astraflow.core.errors import AstraflowError
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype
from astraflow.trainers.fsdp.engine import ShardedEngine
from astraflow.trainers.fsdp.orders import PublishVersion
from astraflow.trainers.fsdp.ranks import Ranks, joined_ranks
from astraflow.trainers.fsdp.weights import publish_shard, shard_publisher
from astraflow.trainers.mismatch import export_bits
from astraflow.trainers.origin import published_layout
from astraflow.trainers.tensors import local, whole

LAST = 3


class Work:
    """A rank at work in a folder: what it finds goes into `found`."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder = folder
        self.ranks = ranks
        given = pickle.loads((folder / "given.pickle").read_bytes())
        self.settings: dict[str, TrainerConfig] = given["settings"]
        self.lora = given["lora"]
        self.counts = given["counts"]
        self.batches = given["batches"][ranks.rank]
        self.contexts = given["contexts"]
        self.found: dict[str, object] = {}

    def engine(self, name: str) -> ShardedEngine:
        model_dir = self.folder / "model"
        settings, ranks = self.settings[name], self.ranks
        fsdp = settings.fsdp
        if fsdp.replicas > 1 or fsdp.context_parallel > 1:
            ranks = Ranks(
                device=ranks.device, replicas=fsdp.replicas, context=fsdp.context_parallel
            )
        lora = self.lora.get(name)
        engine = ShardedEngine(settings, model_dir=model_dir, ranks=ranks, lora=lora)
        engine.prepare()
        return engine

    def steps(self, engine: ShardedEngine, some: slice) -> list[dict[str, float]]:
        return [dict(engine.train_step(batch)) for batch in self.batches[some]]

    def save(self, engine: ShardedEngine, name: str) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        self.ranks.wait()
        engine.save(self.folder / name)

    def train_and_save(self, name: str) -> None:
        """Save in the middle, beside steps; go on from there with what was saved."""
        engine, count = self.engine(name), self.counts[name]
        half, few = count // 2, slice(count // 2, count // 2 + LAST)
        metrics = self.steps(engine, slice(half))
        masters = engine.named_parameters()
        self.found[f"{name} saved"] = {
            key: whole(each.detach()).numpy().copy() for key, each in masters
        }
        self.save(engine, f"{name} by ranks")
        rest = self.steps(engine, slice(half, count))
        engine.wait_for_save()
        self.found[name] = [*metrics, *rest]
        engine.restore(self.folder / f"{name} by ranks")
        assert engine.step_count == half
        assert self.steps(engine, few) == rest[:LAST]
        engine.restore(self.folder / f"{name} by one")
        self.found[f"{name} resumed"] = self.steps(engine, few)

    def publish(self, name: str) -> None:
        """Publish shards beside the steps that follow; note every bit of the gathered weights."""
        engine, found = self.engine(name), dict[str, object]()
        self.found[f"{name} published"] = found
        layout = published_layout(engine.named_parameters(), Dtype.BF16)
        publisher = shard_publisher(PolicyId("solver"), layout, self.ranks)
        beside, made = self.ranks.beside(), list[Future]()
        engine.before_change(lambda: wait(made))
        with ThreadPoolExecutor(1) as encoder:

            def begin(version: int) -> None:
                tensors = dict(engine.named_parameters())
                order = PublishVersion(version, version, None)
                made.append(encoder.submit(publish_shard, publisher, tensors, order, beside))

            for version, batch in enumerate(self.batches[:3]):
                found[f"version {version}"] = gathered(engine)
                bits = export_bits(engine._model.module, Dtype.BF16)
                found[f"shard {version}"] = {key: bits[key].copy() for key in bits}
                begin(version)
                engine.train_step(batch)
            found["infos"] = [each.result() for each in made]
            if self.ranks.rank == 0:
                for _, parameter in engine.named_parameters():
                    local(parameter.detach()).normal_(std=1e3)
            begin(3)
        found["noise"] = made[-1].result()

    def refuse(self) -> None:
        """Get a batch of which one rank's rows are no numbers; then one that is sound."""
        engine = self.engine("plain")
        before = gathered(engine)
        batch = self.batches[0]
        part = batch.parts[0]
        odd = replace(
            part.columns["logprobs"], values=np.full_like(part.values("logprobs"), np.nan)
        )
        torn = replace(part, columns={**part.columns, "logprobs": odd})
        with pytest.raises(AstraflowError) as caught:
            engine.train_step(replace(batch, parts=(torn,)) if self.ranks.rank == 1 else batch)
        self.found["refused"] = caught.value.message
        assert all(np.array_equal(before[name], bits) for name, bits in gathered(engine).items())
        assert dict(engine.train_step(batch)) == self.found["plain"][0]

    def variants(self) -> None:
        """Train with every other way to compute the same."""
        for name in self.settings:
            if name in self.contexts:
                self.share_rows(name)
            elif name not in self.counts:
                self.found[name] = self.steps(self.engine(name), slice(-LAST, None))

    def share_rows(self, name: str) -> None:
        """Have a part of every row each; only one of those that share them has read a batch."""
        engine = self.engine(name)
        ranks = engine._ranks
        batches = self.contexts[name][ranks.data_rank][-LAST:]
        given = batches if ranks.reads_batches else [None] * LAST
        self.found[name] = [dict(engine.train_step(each)) for each in given]
        self.found[f"{name} bits"] = gathered(engine)


def gathered(engine: ShardedEngine) -> dict[str, np.ndarray]:
    return {
        name: whole(parameter.detach()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        for name, parameter in engine.named_parameters()
    }


def main() -> None:
    folder = Path(sys.argv[1])
    with joined_ranks(device="cpu", replicas=1) as ranks:
        work = Work(folder, ranks)
        for name in work.counts:
            work.train_and_save(name)
        if work.counts:
            work.publish("plain")
            work.publish("lora")
            work.refuse()
        work.variants()
        (folder / f"found-{ranks.rank}.pickle").write_bytes(pickle.dumps(work.found))


if __name__ == "__main__":
    main()

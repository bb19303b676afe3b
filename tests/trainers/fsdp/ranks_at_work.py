"""What one rank does in these tests."""

# ruff: noqa: T201 - a test reads what is said

import copy
import os
import pickle
import signal
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from astraflow.client.loop_thread import LoopThread
from astraflow.config.policies import Fsdp
from astraflow.config.recipe import PolicyConfig, TrainerConfig
from astraflow.config.run_dir import RunDir
from astraflow.core.errors import AstraflowError
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.trainers.causal_model import CausalModel
from astraflow.trainers.fsdp.engine import ShardedEngine, shard_model
from astraflow.trainers.fsdp.main import train_rank
from astraflow.trainers.fsdp.ranks import Ranks, joined_ranks
from astraflow.trainers.fsdp.weights import publish_shard, published_rows, shard_publisher
from astraflow.trainers.joining import TrainerPlace
from astraflow.trainers.likelihood import PassTokens, log_softmax_of
from astraflow.trainers.mismatch import export_bits
from astraflow.trainers.origin import published_layout
from astraflow.trainers.tensors import local, whole
from astraflow.wire.transfers import TransferSpec

LAST = 3


class Work:
    """A rank at work in a folder: what it finds goes into `found`."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder = folder
        self.ranks = ranks
        given = pickle.loads((folder / "given.pickle").read_bytes())
        self.settings: dict[str, TrainerConfig] = given["settings"]
        self.lora = given["lora"]
        self.whole = given["whole"]
        self.batches = given["batches"][ranks.rank]
        self.contexts = given["contexts"]
        self.families = given["families"]
        self.found: dict[str, object] = {}

    def engine(self, name: str) -> ShardedEngine:
        model_dir = self.folder / ("mixture" if "experts" in name else "model")
        settings = self.settings[name]
        ranks = Ranks(device=self.ranks.device, fsdp=settings.fsdp)
        lora = self.lora.get(name)
        engine = ShardedEngine(settings, model_dir=model_dir, ranks=ranks, lora=lora)
        engine.prepare()
        return engine

    def steps(self, engine: ShardedEngine, some: slice, name: str) -> list[dict[str, float]]:
        given = self.contexts[name][self.ranks.rank] if "experts" in name else self.batches
        return [dict(engine.train_step(batch)) for batch in given[some]]

    def save(self, engine: ShardedEngine, name: str) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        self.ranks.wait()
        engine.save(self.folder / name)

    def train_and_save(self, name: str) -> None:
        """Save in the middle, beside steps; go on from there with what was saved."""
        engine, half = self.engine(name), len(self.batches) // 2
        few = slice(half, half + LAST)
        metrics = self.steps(engine, slice(half), name)
        masters = engine.named_parameters()
        self.found[f"{name} saved"] = {
            key: whole(each.detach()).numpy().copy() for key, each in masters
        }
        self.save(engine, f"{name} by ranks")
        rest = self.steps(engine, slice(half, None), name)
        engine.wait_for_save()
        self.found[name] = [*metrics, *rest]
        engine.restore(self.folder / f"{name} by ranks")
        assert engine.step_count == half
        assert self.steps(engine, few, name) == rest[:LAST]
        engine.restore(self.folder / f"{name} by one")
        self.found[f"{name} resumed"] = self.steps(engine, few, name)

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
                tensors = published_rows(engine.named_parameters(), self.ranks)
                made.append(
                    encoder.submit(
                        publish_shard, publisher, tensors, beside, version=version, step=version
                    )
                )

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
            if name in self.whole:
                continue
            if name in self.contexts:
                self.share_rows(name)
            else:
                self.found[name] = self.steps(self.engine(name), slice(-LAST, None), name)

    def share_rows(self, name: str) -> None:
        """Train beside ranks that have the same rows: of these, one has read a batch."""
        engine = self.engine(name)
        ranks = engine._ranks
        batches = self.contexts[name][ranks.data_rank][-LAST:]
        given = batches if ranks.reads_batches else [None] * LAST
        self.found[name] = [dict(engine.train_step(each)) for each in given]
        self.found[f"{name} bits"] = gathered(engine)
        layout = published_layout(engine.named_parameters(), Dtype.BF16)
        publisher = shard_publisher(PolicyId("solver"), layout, ranks)
        rows = published_rows(engine.named_parameters(), ranks)
        info = publish_shard(publisher, rows, ranks, version=0, step=LAST)
        self.found[f"{name} version"] = info
        self.save(engine, name)
        engine.wait_for_save()
        # The second step depends on the moments.
        then = [dict(engine.train_step(each)) for each in given[:2]]
        engine.restore(self.folder / name)
        assert [dict(engine.train_step(each)) for each in given[:2]] == then
        self.found[f"{name} then"] = then

    def compare_families(self) -> None:
        """Share out models of many families, with the gradients of one rank."""
        for kind, names in self.families.items():
            fsdp = Fsdp.model_validate({kind: 2, "compute": "f32", "checkpointing": False})
            self.found[kind] = {name: self.compared(name, fsdp) for name in names}

    def compared(self, name: str, fsdp: Fsdp) -> float | str:
        """Return how far a family's gradients are from those of one rank, or why it is refused."""
        ranks, module = Ranks(device=self.ranks.device, fsdp=fsdp), made(name)
        whole_model = CausalModel(copy.deepcopy(module))
        model = CausalModel(module)
        model.row_groups = ranks.row_groups
        try:
            shard_model(module, ranks, fsdp)
        except AstraflowError as error:
            return error.message
        wanted, found = (gradients_of(each, ranks.data_rank) for each in (whole_model, model))
        for each in wanted.values():
            torch.distributed.all_reduce(each.div_(ranks.count // ranks.data_count))
        largest = {key: each.abs().max() for key, each in wanted.items()}
        # Some have none but rounding; those of experts are seen each by itself.
        most = max(largest.values())
        sizes = {key: each if "experts." in key else most for key, each in largest.items()}
        gaps = {key: (found[key] - wanted[key]).abs().max() for key in wanted}
        return float(max(gaps[key] / sizes[key] for key in gaps))


def made(name: str) -> torch.nn.Module:
    """Return a small model of a family, the same on all ranks."""
    name, _, count = name.partition(" of ")
    known = AutoConfig.for_model(name)
    fields = {key: value for key, value in TINY.items() if hasattr(known, key)}
    if count == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
        fields["rope_parameters"] = {"rope_type": "longrope", **factors}
        fields["original_max_position_embeddings"] = 32
    elif count:
        kinds = ("num_experts", "num_local_experts")
        fields |= {key: int(count) for key in fields if key in kinds}
    # Of latent attention every head has keys of its own.
    fields |= {"num_key_value_heads": 4} if "kv_lora_rank" in fields else {}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields))


def gradients_of(model: CausalModel, share: int) -> dict[str, torch.Tensor]:
    few = PassTokens.of_few(model)
    tokens = replace(few, tokens=np.roll(few.tokens, share, axis=1))
    log_softmax_of(model, tokens)[0].sum().backward()
    named = model.module.named_parameters()
    return {name: whole(each.grad) for name, each in named if each.grad is not None}


# What families call the same; each takes the keys that it knows.
TINY = {
    **dict.fromkeys(("hidden_size", "n_embd"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    "intermediate_size": 48,
    "vocab_size": 64,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    **dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group", "moe_layer_start_index"), 1),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"), 8),
    "q_lora_rank": 16,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}


def gathered(engine: ShardedEngine) -> dict[str, np.ndarray]:
    return {
        name: whole(parameter.detach()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        for name, parameter in engine.named_parameters()
    }


def work(rank: str, count: str, port: str, folder: str) -> None:
    """Train as one rank, in every way."""
    with joined(rank, count, port) as ranks:
        mine = Work(Path(folder), ranks)
        for name in mine.whole:
            mine.train_and_save(name)
        for name in ("plain", "lora"):
            if name in mine.whole:
                mine.publish(name)
        if "plain" in mine.whole:
            mine.refuse()
        mine.variants()
        mine.compare_families()
        (Path(folder) / f"found-{ranks.rank}.pickle").write_bytes(pickle.dumps(mine.found))


def join(rank: str, count: str, port: str) -> None:
    """Join the other ranks, say so with the process id, and do nothing until killed."""
    with joined(rank, count, port):
        print("joined", os.getpid(), flush=True)
        signal.pause()


def follow(rank: str, count: str, port: str, folder: str) -> None:
    """Follow rank 0 of a trainer; say why that ended."""
    be_told(rank, count, port)
    policy = PolicyConfig.model_validate(
        {"model": {"path": "model"}, "trainer": {"ranks": int(count), "device": "cpu"}}
    )
    place = TrainerPlace(hub="127.0.0.1:1", token="", run_dir=RunDir(Path(folder)))
    try:
        with LoopThread() as loop:
            train_rank("solver", policy, place, model_dir=Path(folder), loop=loop)
    except AstraflowError as error:
        print(error.reason, error.message)


def publish_versions(rank: str, count: str, port: str) -> None:
    """Publish some versions, as one rank; say how a new node would come to each."""
    policy = PolicyId("solver")
    layout = Layout.of([("w", Dtype.BF16, (64, 8))])
    with joined(rank, count, port) as ranks, ExitStack() as reading:
        publisher = shard_publisher(policy, layout, ranks)
        publisher.store.keep = 2
        rows = np.zeros((32, 8), np.uint16)
        for version in range(7):
            publish_shard(publisher, {"w": rows}, ranks, version=version, step=version)
            spec = TransferSpec(policy_id=policy, version=version, base_version=None)
            if version == 0 and ranks.rank == 0:
                own = publisher.store.plan(spec)
                reading.enter_context(publisher.store.reading([each.info for each in own]))
            if version == 4:
                reading.close()
            plan = publisher.store.plan(spec)
            print("way", version, [(each.info.base_version, each.info.version) for each in plan])
            rows[version] += 1
        ranks.wait()


def joined(rank: str, count: str, port: str) -> AbstractContextManager[Ranks]:
    be_told(rank, count, port)
    torch.set_num_threads(1)
    return joined_ranks(device="cpu", fsdp=Fsdp())


def be_told(rank: str, count: str, port: str) -> None:
    """Know what torchrun would tell this rank."""
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

"""Two ranks train as one does, publish shards, and save for any count."""

import pickle
import time
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from astraflow.client.trainer import TrainerBatch
from astraflow.config.recipe import Lora, TrainerConfig
from astraflow.core.batches import BatchHeader
from astraflow.core.errors import AstraflowError
from astraflow.core.ids import PolicyId
from astraflow.core.packing import share_out
from astraflow.core.tensors import Dtype, Layout
from astraflow.trainers.lora import read_lora
from astraflow.trainers.model_files import save_model
from astraflow.trainers.torch_engine import TorchEngine
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.workflows.tutors import write_tokenizer
from crash_ends.nursery import Nursery
from crash_ends.postgres import free_port

pytestmark = pytest.mark.slow

RANKS = 2
STEPS = 10
PLAIN = {
    "optimizer": {"learning_rate": 3e-3},
    "max_tokens_per_pass": 64,
    "device": "cpu",
    "ranks": RANKS,
}
LAST = 3
DPO = {"surrogate": "dpo", "pairs": {"margin": 0.1}}
CRITIC = {"critic": {"optimizer": {"learning_rate": 3e-3}}}
MUON = {"optimizer": {"learning_rate": 3e-3, "kind": "muon"}}
BALANCED = {"loss": {"router_balance_coefficient": 0.01}}
VARIANTS = {
    "m2po": {"loss": {"m2_threshold": 0.04}, "fsdp": {"checkpointing": True}},
    "whitened": {
        "loss": {"whiten": True, "mean": "rows", "kl": {"coefficient": 0.1}},
        "fsdp": {"replicas": 2},
        "packing": "always",
    },
    "minibatches": {
        "minibatches": 3,
        "epochs": 2,
        "loss": {"old": "recomputed", "correction": {"high": 2.0}},
    },
    "muon": {**MUON, "loss": {"entropy_coefficient": 0.01}},
    "bf16": {"fsdp": {"compute": "bf16", "offload": True}},
    "dpo": {"loss": DPO, "epochs": 2},
    "bradley_terry": {
        "loss": {"surrogate": "bradley_terry"},
        "fsdp": {"checkpointing": True},
        "packing": "always",
    },
}
# Of a mixture of experts, whose layers are whole on each rank, or not.
MIXTURES = {
    "balanced experts": {**BALANCED, "fsdp": {"expert_parallel": 2}},
    "balanced whole experts": BALANCED,
    "bf16 experts": {"fsdp": {"compute": "bf16", "expert_parallel": 2}},
    "whole experts": {},
    "many experts": {"fsdp": {"expert_parallel": 2}},
}
# How many ranks, of which some share rows or experts. The losses of the first need whole rows.
CONTEXTS = {
    "context": (2, {"loss": {"ratio": "sequence", "mean": "rows"}}, {"context_parallel": 2}),
    "context of shards": (4, {}, {"context_parallel": 2, "checkpointing": True}),
    "tensor": (2, {"loss": {"kl": {"coefficient": 0.1}}, "minibatches": 2}, {"tensor_parallel": 2}),
    "tensor and lora": (2, {"packing": "always"}, {"tensor_parallel": 2}),
    "dpo of contexts": (2, {"loss": DPO}, {"context_parallel": 2}),
    "dpo of tensors": (2, {"loss": DPO, "packing": "always"}, {"tensor_parallel": 2}),
    "tensor of shards": (
        *(4, {"packing": "always"}),
        {"tensor_parallel": 2, "checkpointing": True},
    ),
    "tensor of replicas": (4, {}, {"tensor_parallel": 2, "replicas": 2}),
    "tensor of contexts": (4, {}, {"tensor_parallel": 2, "context_parallel": 2}),
    # Of a mixture of experts; batches say through which of these tokens go.
    "experts and kl": (
        *(2, {"loss": {"kl": {"coefficient": 0.1}}, "minibatches": 2, "router_replay": "never"}),
        {"expert_parallel": 2, "checkpointing": True},
    ),
    "experts and lora": (2, {"packing": "always"}, {"expert_parallel": 2}),
    "experts, muon and critic": (2, MUON | CRITIC, {"expert_parallel": 2, "offload": True}),
    "experts of shards": (
        *(4, {"packing": "always", "router_replay": "never"}),
        {"expert_parallel": 2, "checkpointing": True},
    ),
    "experts of replicas": (4, {}, {"expert_parallel": 2, "replicas": 2}),
    "experts of contexts": (4, {}, {"expert_parallel": 4, "context_parallel": 2}),
}
# Of each kind one; the others show more of the same.
FEW = {
    *("plain", "m2po", "minibatches", "many experts"),
    *("context", "tensor and lora", "experts and kl", "tensor of contexts"),
}
# What can be shared out of which families, and what is said of others.
FAMILIES = {
    "tensor_parallel": {
        **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")),
        **dict.fromkeys(("phi", "gpt_neox", "olmo", "granite", "smollm3", "starcoder2")),
        "nemotron": None,
        "gpt2": "its layers have no plan in transformers",
        "phi3": "self_attn.qkv_proj is colwise_gather_output",
        "qwen3_moe": "mlp.experts",
    },
    "expert_parallel": {
        **dict.fromkeys(("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3")),
        **dict.fromkeys(("glm4_moe", "granitemoe", "ernie4_5_moe", "hunyuan_v1_moe", "minimax")),
        "qwen3_moe of 3": "3 experts",
        "qwen3": "it has no experts with a plan in transformers",
        "llama4_text": "it has no experts with a plan in transformers",
    },
    "context_parallel": {
        "llama": None,
        "phi3 of longrope": "positions are scaled by the longest row, of which a rank has a part",
    },
}
FEW_FAMILIES = {
    ("context_parallel", "phi3 of longrope"),
    *(("tensor_parallel", name) for name in ("llama", "gpt2", "phi3", "qwen3_moe")),
    *(("expert_parallel", name) for name in ("qwen3_moe", "gpt_oss", "qwen3")),
}
SETTINGS = {
    name: TrainerConfig.model_validate({**PLAIN, **fields})
    for name, fields in {"plain": {}, "lora": {}, "critic": CRITIC, **VARIANTS, **MIXTURES}.items()
}
for _name, (_count, _fields, _fsdp) in CONTEXTS.items():
    SETTINGS[_name] = TrainerConfig.model_validate(
        {**PLAIN, **_fields, "fsdp": _fsdp, "ranks": _count}
    )
LORA = dict.fromkeys(("lora", "tensor and lora", "experts and lora"), Lora(rank=3, alpha=6))
# They go all the steps, are saved in the middle and resumed; others go the last few.
WHOLE = ("plain", "lora", "critic", "many experts")
HALF = STEPS // 2
AFTER_HALF = slice(HALF, HALF + LAST)


class Ran:
    """What ranks found, and what one process finds with the same batches."""

    def __init__(self, nursery: Nursery, folder: Path, batches: list, given: dict) -> None:
        self.nursery = nursery
        self.folder = folder
        self.batches = batches
        self.alone = cache(self._alone)
        self.four = cache(self._four)
        self._given = given
        self.ranks = launch(nursery, folder, RANKS, given)
        self.found = self.ranks[0]

    def _alone(self, name: str, start: int = 0) -> list:
        engine = alone_engine(self.folder, name)
        return [dict(engine.train_step(batch)) for batch in self.given(name)[start:]]

    def _four(self) -> tuple[Path, list]:
        """Return where four ranks saved, and what each found."""
        folder = self.folder / "four"
        folder.mkdir()
        for name in ("model", "mixture"):
            (folder / name).symlink_to(self.folder / name)
        return folder, launch(self.nursery, folder, 4, self._given | {"families": {}})

    def given(self, name: str) -> list:
        """Return what one process trains on."""
        return self.batches[has_experts(name)]


def has_experts(name):
    return "experts" in name


def alone_engine(folder, name):
    model_dir = folder / ("mixture" if has_experts(name) else "model")
    engine = TorchEngine(SETTINGS[name], model_dir=model_dir, lora=LORA.get(name))
    engine.prepare()
    return engine


def few(names):
    """Leave all but some to `make test-all`."""
    long = pytest.mark.long
    return [name if name in FEW else pytest.param(name, marks=long) for name in names]


@pytest.fixture(scope="module")
def run_of(nursery, tmp_path_factory, make_model, make_mixture, make_rows, to_part):
    """Return what makes the run that a name is of: the few, or all others."""
    folder = tmp_path_factory.mktemp("ranks")
    write_tokenizer(folder / "tokenizer", "abcdefghij>")
    # 23 rows of a matrix for each of two ranks are not even over two more.
    module = make_model(num_attention_heads=4, intermediate_size=46).module
    mixture = make_mixture(num_attention_heads=4, tie_word_embeddings=True)
    rows = [make_rows(12 + step % 3, seed=step) for step in range(STEPS)]
    rows[3] = [{**row, "advantages": row["advantages"] * 0} for row in rows[3]]
    rows[4] = rows[4][:1]
    for row in chain.from_iterable(rows):
        row["reward"] = float(row["tokens"][0] % 2)
    for step in rows:
        for number, row in enumerate(step):
            row["group"] = number // 3
    routed = [[{**row, "routed_experts": routes(row)} for row in step] for step in rows]

    def shares(name, count):
        of = routed if has_experts(name) else rows
        return [
            [batch(step, to_part, each, rank, count) for step, each in enumerate(of)]
            for rank in range(count)
        ]

    shared = {name: shares(name, RANKS) for name in MIXTURES}
    for name, (count, _, fsdp) in CONTEXTS.items():
        sharing = fsdp.get("context_parallel", 1) * fsdp.get("tensor_parallel", 1)
        shared[name] = shares(name, count // sharing)
    whole = {has_experts(name): shares(name, 1)[0] for name in WHOLE}
    batches = shares("plain", RANKS)

    @cache
    def run(is_few: bool) -> Ran:
        ours = folder / ("few" if is_few else "others")
        save_model(module, ours / "model", companions_of=folder / "tokenizer")
        save_model(mixture, ours / "mixture", companions_of=folder / "tokenizer")
        whole_runs = [name for name in WHOLE if (name in FEW) is is_few]
        for name in whole_runs:
            write_by_one(ours, name, whole[has_experts(name)])
        families = {
            kind: [name for name in some if ((kind, name) in FEW_FAMILIES) is is_few]
            for kind, some in FAMILIES.items()
        }
        given = {
            "settings": {name: SETTINGS[name] for name in SETTINGS if (name in FEW) is is_few},
            "lora": LORA,
            "whole": whole_runs,
            "batches": batches,
            "contexts": shared,
            "families": families,
        }
        return Ran(nursery, ours, whole, given)

    return lambda name: run(name in FEW)


@pytest.fixture
def ran(run_of) -> Ran:
    return run_of("plain")


def routes(row):
    """Return experts of two layers for each token of a row."""
    rng = np.random.default_rng(int(row["tokens"].sum()))
    scores = rng.random((len(row["tokens"]), 2, 8))
    return scores.argsort(axis=2)[:, :, :2].astype(np.uint16)


def launch(nursery, folder, count, given) -> list:
    """Have so many ranks do what is for them; return what each found."""
    some = {name: each for name, each in given["settings"].items() if each.ranks == count}
    whole = given["whole"] if count == RANKS else []
    batches = given["batches"] if count == RANKS else [[]] * count
    ours = {**given, "settings": some, "whole": whole, "batches": batches}
    (folder / "given.pickle").write_bytes(pickle.dumps(ours))
    place = (str(count), str(free_port()), str(folder))
    pids = [nursery.start("work", str(rank), *place) for rank in range(count)]
    while None in (codes := [nursery.exit_code(pid) for pid in pids]):
        assert not any(codes), "a rank has failed, as it says above"
        time.sleep(0.1)
    assert not any(codes)
    found = (folder / f"found-{rank}.pickle" for rank in range(count))
    return [pickle.loads(each.read_bytes()) for each in found]


def write_by_one(folder, name, batches):
    """Write the checkpoint of one process, from which ranks go on."""
    engine = alone_engine(folder, name)
    for each in batches[:HALF]:
        engine.train_step(each)
    (folder / f"{name} by one").mkdir()
    engine.save(folder / f"{name} by one")
    engine.wait_for_save()


def batch(step, to_part, rows, rank, count) -> TrainerBatch:
    shares = share_out([len(row["tokens"]) for row in rows], count)
    mine = [rows[index] for index in shares[rank]]
    header = BatchHeader(
        batch_id=f"b{step}",
        policy_id="solver",
        version=0,
        part_count=int(bool(mine)),
        row_count=len(rows),
        token_count=sum(len(row["tokens"]) for row in rows),
        loss_token_count=sum(int(row["loss_mask"].sum()) for row in rows),
        groups=(),
        policy_ids=("solver",),
    )
    return TrainerBatch(header=header, parts=(to_part(mine),) if mine else (), wait_s=0.0)


def furthest(one, other, name="train/loss"):
    return max(abs(a[name] - b[name]) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", few(WHOLE))
def test_two_ranks_have_the_loss_curve_of_one(run_of, name):
    ran = run_of(name)
    alone, found = ran.alone(name), ran.found[name]
    for each in ("train/loss", "train/entropy", "train/clip_frac", "mismatch/kl"):
        assert furthest(found, alone, each) < 1e-4, each
    largest = max(step["train/grad_norm"] for step in alone)
    assert furthest(found, alone, "train/grad_norm") < 1e-3 * largest
    assert len(alone) == STEPS
    assert found == ran.ranks[1][name]
    moved = [step["train/loss"] for step in alone]
    assert len(set(moved)) >= STEPS - 2


@pytest.mark.long
def test_ranks_have_the_critic_of_one(run_of):
    ran = run_of("critic")
    alone, found = ran.alone("critic"), ran.found["critic"]
    for each in ("critic/loss", "critic/value_mean", "critic/explained_variance"):
        assert furthest(found, alone, each) < 1e-4, each
    assert alone[-1]["critic/value_mean"] != 0


@pytest.mark.parametrize("name", few(name for name in VARIANTS if name != "bf16"))
def test_what_counts_the_whole_batch_does_not_depend_on_ranks(run_of, name):
    ran = run_of(name)
    alone = ran.alone(name, STEPS - LAST)
    assert furthest(ran.found[name], alone) < 1e-4
    if name == "m2po":
        for bound in ("train/clip_low", "train/clip_high", "train/m2"):
            assert furthest(ran.found[name], alone, bound) < 1e-5


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_of_ranks_learn_what_plain_ones_do(run_of, tmp_path):
    ran = run_of("plain")
    (tmp_path / "model").symlink_to(ran.folder / "model")
    compiled = {"fsdp": {"compile": True, "checkpointing": True}}
    settings = {"compiled": TrainerConfig.model_validate({**PLAIN, **compiled})}
    given = pickle.loads((ran.folder / "given.pickle").read_bytes())
    empty = {name: {} for name in ("lora", "whole", "contexts", "families")}
    alone = ran.alone("plain", STEPS - LAST)
    for found in launch(ran.nursery, tmp_path, RANKS, {**given, **empty, "settings": settings}):
        assert furthest(found["compiled"], alone) < 1e-4


@pytest.mark.parametrize("name", few(CONTEXTS))
def test_ranks_may_share_rows_and_batches(run_of, name):
    """Two ranks; or four, which are two shares of a batch, each of two, or one share of four."""
    ran = run_of(name)
    folder, ranks = (ran.folder, ran.ranks) if SETTINGS[name].ranks == RANKS else ran.four()
    require_like_one(ran, name, folder, ranks)


def require_like_one(ran, name, folder, ranks):
    """Have the losses of one process, the same weights everywhere, and publish and save these."""
    alone, found = ran.alone(name, STEPS - LAST), ranks[0][name]
    assert furthest(found, alone) < 1e-4
    if "dpo" not in name:
        assert furthest(found, alone, "train/entropy") < 1e-4
    largest = max(step["train/grad_norm"] for step in alone)
    assert furthest(found, alone, "train/grad_norm") < 1e-3 * largest
    assert same_everywhere(ranks, name)
    bits = ranks[0][f"{name} bits"]
    layout = Layout.of((key, Dtype.BF16, each.shape) for key, each in bits.items())
    published = WeightPublisher(PolicyId("solver"), layout).publish(0, bits, step=LAST)
    assert ranks[0][f"{name} version"].content_digest == published.content_digest
    engine = alone_engine(folder, name)
    engine.restore(folder / name)
    for key, parameter in engine.named_parameters():
        saved = parameter.detach().bfloat16().view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(saved, bits[key]), key
    given = ran.given(name)[STEPS - LAST :][:2]
    then = [dict(engine.train_step(each)) for each in given]
    assert furthest(then, ranks[0][f"{name} then"]) < 1e-4


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        pytest.param(
            kind, name, why, marks=() if (kind, name) in FEW_FAMILIES else pytest.mark.long
        )
        for kind, some in FAMILIES.items()
        for name, why in some.items()
    ],
)
def test_a_family_is_shared_out_or_refused_by_name(run_of, kind, name, why):
    found = run_of("plain" if (kind, name) in FEW_FAMILIES else "lora").found[kind][name]
    if why is None:
        assert found < 1e-4
    else:
        assert why in found


def same_everywhere(ranks, name) -> bool:
    first, *others = ranks
    bits = first[f"{name} bits"]
    return all(
        first[name] == other[name]
        and all(np.array_equal(bits[key], other[f"{name} bits"][key]) for key in bits)
        for other in others
    )


@pytest.mark.long
def test_ranks_that_share_experts_out_balance_them_alike(run_of):
    ran = run_of("whole experts")
    found, whole = ran.found["balanced experts"], ran.found["balanced whole experts"]
    for name in ("train/loss", "train/router_imbalance"):
        assert furthest(found, whole, name) < 1e-4
    assert furthest(found, ran.found["whole experts"]) > 1e-4


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "other"), [("bf16", "whitened"), ("bf16 experts", "whole experts")]
)
def test_blocks_may_compute_in_bf16(run_of, name, other):
    ran = run_of(name)
    first, exact = ran.found[name][0], ran.alone(other, STEPS - LAST)[0]
    assert 0 < abs(first["train/entropy"] - exact["train/entropy"]) < 0.02


def test_a_batch_that_is_no_numbers_on_one_rank_is_refused_by_all(ran):
    for found in ran.ranks:
        assert found["refused"].startswith("rank 1: ")
        assert "not finite" in found["refused"]


@pytest.mark.parametrize("name", few(["plain", "lora"]))
def test_what_shards_publish_is_what_gathered_weights_would_be(run_of, name):
    ran = run_of(name)
    ranks = [rank[f"{name} published"] for rank in ran.ranks]
    found = ranks[0]
    layout = Layout.of((key, Dtype.BF16, bits.shape) for key, bits in found["version 0"].items())
    whole = WeightPublisher(PolicyId("solver"), layout)
    for version, info in enumerate(found["infos"]):
        tensors = found[f"version {version}"]
        for key, bits in tensors.items():
            rows = [rank[f"shard {version}"][key] for rank in ranks]
            assert np.array_equal(np.concatenate(rows), bits)
        expected = whole.publish(version, tensors, step=version)
        assert info.content_digest == expected.content_digest
        assert {patch.shard_rank for patch in info.patches} == {*range(RANKS)}
    last = [*tensors][-1]
    assert not np.array_equal(*(found[f"version {v}"][last] for v in (0, 2)))
    assert all(key.startswith("base_model.") for key in tensors) == (name == "lora")


def test_a_version_of_which_one_rank_has_no_patch_can_be_had_whole_from_all(ran):
    """Noise is no smaller as a patch; the other rank's rows have not even changed."""
    ways = {
        (patch.base_version, patch.shard_rank)
        for patch in ran.found["plain published"]["noise"].patches
    }
    assert {rank for base, rank in ways if base is None} == {*range(RANKS)}


@pytest.mark.parametrize("name", few(WHOLE))
def test_one_process_goes_on_from_the_checkpoint_of_two_ranks(run_of, name):
    ran = run_of(name)
    directory = ran.folder / f"{name} by ranks"
    own = ["adapter_config.json", "adapter_model.safetensors"]
    model = ["config.json", "generation_config.json", "model.safetensors"]
    assert {path.name for path in directory.iterdir()} == {
        *(own if name == "lora" else model),
        "optimizer",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    engine = alone_engine(ran.folder, name)
    engine.restore(directory)
    assert engine.step_count == HALF
    for key, parameter in engine.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), ran.found[f"{name} saved"][key])
    rest = [dict(engine.train_step(each)) for each in ran.given(name)[AFTER_HALF]]
    assert furthest(rest, ran.found[name][AFTER_HALF]) < 1e-4


@pytest.mark.parametrize("name", few(WHOLE))
def test_two_ranks_go_on_from_the_checkpoint_of_one_process(run_of, name):
    ran = run_of(name)
    resumed = ran.found[f"{name} resumed"]
    assert furthest(resumed, ran.found[name][AFTER_HALF]) < 1e-4
    assert furthest(resumed, ran.alone(name)[AFTER_HALF]) < 1e-4


@pytest.mark.long
def test_peft_reads_the_adapters_of_two_ranks(run_of):
    ran = run_of("lora")
    directory = ran.folder / "lora by ranks"
    lora = read_lora(directory)
    assert (lora.rank, lora.alpha) == (3, 6)
    tensors = load_file(directory / "adapter_model.safetensors")
    assert {key: value.shape for key, value in tensors.items()} == {
        key: value.shape for key, value in ran.found["lora saved"].items()
    }


def test_a_critic_that_a_checkpoint_does_not_have_is_missed(ran):
    engine = alone_engine(ran.folder, "critic")
    for writer in ("ranks", "one"):
        with pytest.raises(AstraflowError, match="has no critic; leave out"):
            engine.restore(ran.folder / f"plain by {writer}")

"""The policies of a recipe: models, and how they are trained."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from astraflow.config.lora import Lora
from astraflow.config.losses import Advantages, CriticConfig, Loss, Optimizer
from astraflow.config.strict import (
    Algorithm,
    Count,
    Finite,
    LaneChoice,
    Nbytes,
    Options,
    OwnEngine,
    Strict,
)
from astraflow.core.errors import AstraflowError
from astraflow.core.tasks import SamplingParams

RouterReplay = Literal["told", "required", "never"]

SharePrefixes = Literal["auto", "always", "never"]
Packing = Literal["auto", "always", "never"]


class WarmUp(Strict):
    """Supervised steps before the training, made once and cached.

    On pairs of a tutor, which makes a small model of its own, or on demonstrations for any model.
    """

    tutor: str | None = None
    """Tutor of yours, such as letter_sort:SortTutor of the recipe `sort`; the model is its own."""
    options: Options = Field(default={})
    """Checked by the tutor."""
    demonstrations: Path | None = None
    """JSONL file. A row is {"messages": [...]}, of which the assistant's turns are learned, or
    {"prompt": ..., "completion": ...}. See models.md."""
    step_count: Count | None = Field(default=None, ge=1)
    """Optimizer steps. Unset: 300, or three passes over the demonstrations for a model that is
    given."""
    batch_size: Count | None = Field(default=None, ge=1)
    """Rows per step. Unset: 64, or 8 for a model that is given."""
    learning_rate: Finite | None = Field(default=None, gt=0)
    """Peak rate; rises over the first tenth of the steps, then falls to a tenth. Unset: 2e-3, or
    1e-4 for a model that is given."""
    max_length: Count = Field(default=1024, ge=2)
    """Demonstrations of more tokens are left out, and counted."""

    @model_validator(mode="after")
    def _one_teacher(self) -> Self:
        if (self.tutor is None) == (self.demonstrations is None):
            raise ValueError("give exactly one of 'tutor' and 'demonstrations'")
        if self.options and self.tutor is None:
            raise ValueError("'options' are those of a tutor")
        return self


class Tiny(Strict):
    """A small Llama with random weights, for demonstrations to warm up.

    Its tokenizer is trained on them: byte pairs, so it can say any text. It speaks ChatML.
    """

    hidden_size: Count = Field(default=128, ge=32, multiple_of=32)
    """Width; a head has 32 of it."""
    layer_count: Count = Field(default=3, ge=1)
    """Transformer blocks."""
    vocabulary_size: Count = Field(default=1024, ge=300)
    """Tokens, at most: 256 bytes, and what the demonstrations repeat."""
    context: Count = Field(default=1024, ge=16)
    """Longest sequence."""


class ModelConfig(Strict):
    """Where a policy's first weights, its architecture and its tokenizer come from.

    Exactly one of path, name, hub, tiny, or a warm_up by a tutor.
    """

    path: Path | None = None
    """Hugging Face directory (config.json, tokenizer.json, *.safetensors), or .gguf file."""
    name: str | None = None
    """Of a model that `astraflow models ls` lists, such as smollm2-135m; got on first use."""
    hub: str | None = Field(default=None, pattern=r"^[\w.-]+(/[\w.-]+)?$")
    """org/name on the Hugging Face hub; downloaded on first use."""
    revision: str | None = None
    """Of hub: branch, tag or commit. A run keeps the commit in its recipe. Unset: main."""
    tiny: Tiny | None = None
    """A small model with random weights; needs warm_up.demonstrations."""
    warm_up: WarmUp | None = None
    """Unset: the model is taken as it is."""
    lora: Lora | None = None
    """Unset: all weights are trained and published."""
    chat_template: Path | None = None
    """Jinja file that renders chats; unset: the directory's own chat template."""
    chat_template_kwargs: Options = Field(default={})
    """Variables of the chat template, such as enable_thinking: false."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        has_tutor = self.warm_up is not None and self.warm_up.tutor is not None
        origins = [each for each in (self.path, self.name, self.hub, self.tiny) if each is not None]
        if len(origins) + has_tutor != 1:
            raise ValueError(
                "give exactly one of 'path', 'name', 'hub', 'tiny' and 'warm_up.tutor'"
            )
        if self.tiny is not None and self.warm_up is None:
            raise ValueError("'tiny' has random weights; give it warm_up.demonstrations")
        if self.revision is not None and self.hub is None:
            raise ValueError("'revision' is one of 'hub'")
        return self


class Sampling(Strict):
    """Defaults of every generation of a policy; see `rollout/v1/sampling.proto`."""

    temperature: Finite = Field(default=1.0, ge=0)
    """0, greedy, is for evaluations alone, as are top_p, top_k, min_p and min_new_tokens: the
    trainer scores tokens under the softmax over the whole vocabulary (docs/losses.md)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Fewest tokens whose probabilities add up to so much; 1: all."""
    top_k: Count | None = Field(default=None, ge=1)
    """The likeliest so many; unset: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Tokens at least so likely as this share of the likeliest one; 0: all."""
    max_new_tokens: Count = Field(default=256, ge=1)
    """Tokens of one generation, at most; one that is cut there is truncated."""
    min_new_tokens: Count = Field(default=0, ge=0)
    """No end before so many tokens."""
    stop_strings: tuple[str, ...] = ()
    """A generation ends after any of these."""

    @property
    def params(self) -> SamplingParams:
        """The same, as tasks have it."""
        return SamplingParams(**self.model_dump())


class Buffer(Strict):
    """Whole groups that wait for the trainer."""

    order: Literal["edf", "fifo"] = "edf"
    """Earliest deadline first: what turns stale first; or first in, first out."""
    max_groups: Count | None = Field(default=None, ge=1)
    """Groups beyond it are dropped, first those that come first; unset: as many as may be open."""
    max_nbytes: Nbytes | None = Field(default=None, ge=1)
    """The same for bytes of tokens and columns; groups of one batch are kept whatever they take."""


class ReplayConfig(Strict):
    """Groups that are trained on again."""

    ratio: float = Field(gt=0, lt=1)
    """Of a batch's groups, at most, on average; 0.3 uses a group 1.43 times on average."""
    order: Algorithm = Algorithm(name="latest")
    """Which of those that may be: latest, uniform, prioritised, or your own."""
    max_uses: Count = Field(default=2, ge=2)
    """Batches that a group is in, the first one included."""
    max_staleness: Count | None = Field(default=None, ge=0)
    """Versions between sampling and the last use, at most; unset: the trainer's."""
    max_groups: Count = Field(default=1024, ge=1)
    """Groups that are kept; then the oldest ones are forgotten."""
    max_nbytes: Nbytes = Field(default=256 << 20, ge=1)
    """Bytes of tokens and columns that they may take."""


class Sync(Strict):
    """When the weights of a policy become a version, and who decides so."""

    style: Literal["steps", "asked"] = "steps"
    """steps: the trainer, after every so many optimizer steps. asked: the rollout nodes, which ask
    for a newer version; the trainer publishes after the step in progress, or says that there is
    nothing newer."""
    every: Count = Field(default=1, ge=1)
    """steps: optimizer steps per version. asked: groups that a node finishes before it asks."""

    @property
    def steps_per_version(self) -> int | None:
        """Optimizer steps between versions; None: one comes when it is asked for."""
        return self.every if self.style == "steps" else None


class Broadcast(Strict):
    """Versions go to a fixed number of nodes at once, over torch.distributed.

    For nodes that share a fast fabric with the trainer. Others pull, and all do when it breaks.
    """

    node_count: Count = Field(ge=1)
    """Nodes of the group: the first that take a seat. It meets once all are there, and anew once
    one that died was replaced."""
    port: int = Field(ge=1, le=65535)
    """Where the trainer listens for them, on the host of its weights; each policy needs its own."""
    device: str = "cpu"
    """What it goes through, on both ends: cpu is gloo, cuda[:N] is NCCL."""
    deadline_s: float = Field(default=30.0, gt=0)
    """A member that is silent for so long ends the group."""


class Keep(Strict):
    """Which checkpoints stay. Beside these do the first weights, and what was asked for by name."""

    last: Count = Field(default=2, ge=2)
    """The newest so many. Two at least: the newest may not be acknowledged yet."""
    every: Count | None = Field(default=None, ge=1)
    """Those whose step is a multiple of it; unset: none for that."""
    best: str | None = Field(default=None, min_length=1)
    """The one with the highest value of this: a number of metrics.jsonl, such as reward/mean, or
    eval/SUITE for avg@k of that evaluation of its version. Read from the run's folder, so the
    trainer must share it with the hub. Unset: none for that."""


class SaveConfig(Strict):
    """What becomes of checkpoints."""

    keep: Keep | None = None
    """Unset: all that checkpoint_every asks for, and without it the newest two."""


class Fsdp(Strict):
    """How the ranks of one trainer share its model out (FSDP2), and how each computes.

    `compute`, `checkpointing` and `compile` hold for one rank, too.
    """

    replicas: Count = Field(default=1, ge=1)
    """Groups of ranks that have the whole model each (HSDP); divides ranks. With 2 replicas of 8
    ranks weights are gathered among 8, and gradients are summed over both groups."""
    compute: Literal["auto", "f32", "bf16"] = "auto"
    """In which the blocks compute; master weights, sums of gradients, embeddings and the output
    layer are f32. Beside bf16 the output layer of a GPU multiplies bf16 and sums in f32. auto: bf16
    on a GPU, f32 on the CPU."""
    checkpointing: bool | None = None
    """Keep the inputs of blocks alone, and compute the rest again for the gradient. Unset: on a
    GPU, but for passes of one rank that fit three quarters of its part of the memory."""
    compile: bool | None = None
    """Run the blocks as torch compiles them, which takes a C compiler, and seconds of the first
    step; false helps where the compiler fails at a model. Unset: on a GPU, with one rank, where the
    model has 64 million parameters or more, and no experts."""
    offload: bool = False
    """Keep weights, gradients and optimizer on the host while they are not used; needs ranks."""
    context_parallel: Count = Field(default=1, ge=1)
    """Ranks, one after the other, that have a part of every row each, and exchange heads for tokens
    in attention (Ulysses); divides the model's heads."""
    tensor_parallel: Count = Field(default=1, ge=1)
    """Ranks, one after the other, that have a part of every matrix of a block each, and the same
    rows; divides the model's heads and key heads. For ranks of one machine."""
    expert_parallel: Count = Field(default=1, ge=1)
    """Ranks, one after the other, that have a part of the experts of every layer each, and exchange
    tokens for them (all-to-all); replicas times it divides ranks, and it the number of experts. Not
    beside tensor_parallel."""


class TrainerConfig(Strict):
    """How one policy is trained."""

    engine: OwnEngine | None = None
    """Unset: the built-in one, for models of transformers."""
    step_count: Count | None = Field(default=None, ge=1)
    """Optimizer steps, one batch each; unset: until the data ends."""
    groups_per_batch: Count = Field(default=16, ge=1)
    """Groups (prompts) per batch; rollouts per batch are this times group_size."""
    minibatches: Count = Field(default=1, ge=1)
    """Parts that a batch is trained on in, one optimizer update each; rows of one prompt stay
    together where that is even."""
    epochs: Count = Field(default=1, ge=1)
    """Times that a batch goes through all its parts, which are other ones each time. However many
    updates it makes, a batch is one step: one version, one learning rate, one ack."""
    max_staleness: Count = Field(default=2, ge=0)
    """Versions between sampling and training, at most. 0 is synchronous."""
    sync: Sync = Sync()
    lanes: LaneChoice = "auto"
    """Over which weights are served, gRPC in any case: auto is shared memory and TCP; or a list of
    grpc, tcp, shm, ucx."""
    encrypt_lanes: bool | None = None
    """Whether the lanes that leave the host are encrypted; unset: beside TLS."""
    copy_on_device: bool | None = None
    """Whether published weights are compared where they are, on the GPU, and only what changed is
    moved to the host. The copy takes as much of its memory as a version has. Unset: where that is a
    twentieth at most, and free."""
    broadcast: Broadcast | None = None
    """Unset: versions are pulled alone."""
    prefetch: int = Field(default=1, ge=1, le=8)
    """Batches held at once. 1 is strict: the next one follows the ack."""
    buffer: Buffer = Buffer()
    replay: ReplayConfig | None = None
    """Unset: every group is trained on once."""
    guards: tuple[Algorithm, ...] = ()
    """Refuse batches: distinct_prompts, useful_share, or your own. What is at fault is dropped."""
    max_refusals: Count = Field(default=4, ge=0)
    """After so many refusals in a row a batch is served as it is."""
    max_failed_steps: Count = Field(default=0, ge=0)
    """Steps in a row that may fail, as on a gradient that is not finite: the batch is discarded and
    the run goes on. One more, and the trainer stops; 0: it stops at the first."""
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    advantages: Advantages = Advantages()
    critic: CriticConfig | None = None
    """Unset: advantages come from groups."""
    router_replay: RouterReplay = "told"
    """Of mixtures of experts. told: tokens take the experts that the engine told of, and their own
    where it did not tell. required: nodes that do not tell are refused. never: all take their
    own."""
    max_tokens_per_pass: Count = Field(default=16384, ge=1)
    """Tokens of one forward and backward pass; gradients of a batch add up over passes."""
    share_prefixes: SharePrefixes = "auto"
    """Compute once what rows of a batch begin with in common, such as the prompt of a group, where
    the model can and it pays. auto: on the CPU; on a GPU attention under a mask is not bit for bit
    the same from run to run. always: on a GPU too. never: every row is computed by itself."""
    packing: Packing = "auto"
    """Lay the rows of a pass end to end, without padding; attention ends where a row does. auto: on
    a GPU, for models that take it. always: on the CPU too, and other models are refused. never:
    rows of like length are padded to one."""
    export_dtype: Literal["bf16", "f32"] = "bf16"
    """What is published. Master weights are always f32."""
    checkpoint_every: Count | None = Field(default=None, ge=1)
    """Steps between checkpoints. Unset: one when ten minutes have passed since the last one, and
    of these the newest two are kept. The first and last weights are always saved."""
    save: SaveConfig = SaveConfig()
    device: str = "auto"
    """auto, cpu or cuda[:N]."""
    thread_count: Count = Field(default=1, ge=1)
    """CPU threads for torch, of each rank."""
    mismatch_every: Count | None = Field(default=10, ge=1)
    """Versions from one whose likelihoods are compared with its samplers', over 16 rows at most, to
    the next; null: none is."""
    deterministic: bool | None = None
    """Take kernels that give the same bits for the same batches where torch has them; they may be
    slower. Unset: on the CPU."""
    ranks: Count = Field(default=1, ge=1)
    """Processes that share the model and every batch; `astraflow run` starts them on its machine
    with torchrun. docs/ranks.md says how to start them on many."""
    fsdp: Fsdp = Fsdp()
    """How the model lies over the ranks, and how it computes."""
    store: str | None = None
    """URL of a bucket or shared directory, such as s3://bucket/runs or file:///shared/runs, to
    which versions also go, in a folder of the run's own; needs the extra `store`."""

    @model_validator(mode="after")
    def _critic_sees_all_rewards(self) -> Self:
        if self.critic is None:
            return self
        if self.loss.kl is not None and self.loss.kl.where != "loss":
            raise ValueError("a critic does not see a KL term in the reward; take kl.where: loss")
        if self.loss.surrogate == "sft" or self.loss.is_paired:
            raise ValueError(
                f"a critic makes advantages, which {self.loss.surrogate} does not know; leave one "
                "out"
            )
        return self

    @model_validator(mode="after")
    def _length_costs_advantages(self) -> Self:
        advantages, loss = self.advantages, self.loss
        is_shaped = any(each.overlong for each in (advantages, *advantages.agents.values()))
        if is_shaped and (self.critic or loss.surrogate == "sft" or loss.is_paired):
            where = "beside a critic" if self.critic else f"by {loss.surrogate}"
            raise ValueError(
                "advantages.overlong is taken off the advantages of groups, which are not used "
                f"{where}; leave it out, and have the scorer take it off"
            )
        return self

    @model_validator(mode="after")
    def _pairs_stay_together(self) -> Self:
        if self.loss.is_paired and self.minibatches > 1:
            raise ValueError(
                f"{self.loss.surrogate} compares the rows of a group, which minibatches would "
                "part; take minibatches: 1 and a smaller groups_per_batch"
            )
        return self

    @model_validator(mode="after")
    def _ranks_do_what_they_can(self) -> Self:
        fsdp = self.fsdp
        if self.ranks % (fsdp.replicas * fsdp.context_parallel * fsdp.tensor_parallel):
            raise ValueError("replicas times context_parallel times tensor_parallel divides ranks")
        if self.ranks % (fsdp.replicas * fsdp.expert_parallel):
            raise ValueError("replicas times expert_parallel divides ranks")
        if fsdp.expert_parallel > 1 and fsdp.tensor_parallel > 1:
            raise ValueError(
                "ranks that share every matrix have no experts of their own; take expert_parallel: "
                "1 or tensor_parallel: 1"
            )
        if fsdp.context_parallel * fsdp.tensor_parallel > 1 and self.critic is not None:
            raise ValueError(
                "a critic sees whole rows; take context_parallel and tensor_parallel 1"
            )
        if fsdp.context_parallel > 1 and self.loss.router_balance_coefficient:
            raise ValueError("the balance of experts sees whole rows; take context_parallel: 1")
        if self.ranks == 1 and self.fsdp.offload:
            raise ValueError("fsdp.offload needs ranks above 1; on one rank all is on its device")
        if self.ranks > 1 and self.broadcast is not None:
            raise ValueError(
                "a broadcast has one sender, so it needs ranks: 1; leave it out, nodes pull from "
                "all ranks at once and from each other"
            )
        if self.ranks > 1 and self.engine is not None:
            raise ValueError("an engine of your own needs ranks: 1; what it starts is its own")
        return self

    @model_validator(mode="after")
    def _versions_on_request_come_between_batches(self) -> Self:
        if self.sync.style == "asked" and self.prefetch > 1:
            raise ValueError(
                "sync.style asked needs prefetch 1: a version that is asked for comes before the "
                "next batch is drawn"
            )
        return self


class PolicyConfig(Strict):
    """One model that is trained."""

    model: ModelConfig
    sampling: Sampling = Sampling()
    trainer: TrainerConfig = TrainerConfig()

    @model_validator(mode="after")
    def _what_is_sampled_can_be_scored(self) -> Self:
        try:
            self.sampling.params.require_trainable()
        except AstraflowError as error:
            raise ValueError(f"sampling: {error.message}") from error
        return self

    @model_validator(mode="after")
    def _reward_models_are_whole(self) -> Self:
        if self.trainer.loss.makes_reward_model and self.model.lora is not None:
            raise ValueError("bradley_terry trains a new head, which adapters lack; leave out lora")
        return self

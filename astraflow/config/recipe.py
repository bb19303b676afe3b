"""The schema of a recipe. Every field has a default that runs or no default at all.

A recipe is read by `astraflow.config.loader`; an unknown key is an error that names the
nearest known one.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
Options = dict[str, Any]


class Strict(BaseModel):
    """Base of all parts: unknown keys fail, values do not change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class WarmUp(Strict):
    """A small model made on first use by supervised steps on pairs of a tutor, then cached."""

    tutor: str
    """Registered tutor, such as letter_sort."""
    options: Options = {}
    """Checked by the tutor."""
    step_count: int = Field(default=300, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(default=64, ge=1)
    """Pairs per step."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Peak rate; rises over the first tenth of the steps, then falls to a tenth."""


class Model(Strict):
    """Where a policy's first weights, its architecture and its tokenizer come from."""

    path: Path | None = None
    """Hugging Face directory: config.json, tokenizer.json, *.safetensors. Never downloaded."""
    warm_up: WarmUp | None = None
    """Makes the directory instead."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.warm_up is None):
            raise ValueError("give exactly one of 'path' and 'warm_up'")
        return self


class Sampling(Strict):
    """Defaults of every generation of a policy; see `rollout/v1/sampling.proto`."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1)
    min_p: float = Field(default=0.0, ge=0, lt=1)
    max_new_tokens: int = Field(default=256, ge=1)
    min_new_tokens: int = Field(default=0, ge=0)
    stop_strings: tuple[str, ...] = ()


class Advantages(Strict):
    """Group-relative advantages, stamped by the hub."""

    scale_by_std: bool = False
    """Divide by the group's standard deviation (GRPO as published); off: Dr. GRPO."""


class Loss(Strict):
    """GRPO's clipped surrogate, a mean over the tokens of the whole batch."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is not rewarded below 1 - clip_low."""
    clip_high: float = Field(default=0.28, gt=0)
    """The ratio is not rewarded above 1 + clip_high (DAPO's clip-higher)."""


class Optimizer(Strict):
    """AdamW with fp32 master weights."""

    learning_rate: float = Field(default=1e-6, gt=0)
    warm_up_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises linearly to learning_rate."""
    decay: tuple[int, int] | None = None
    """Last step at learning_rate, and the step from which on the rate is a tenth of it; it falls
    linearly between them. Unset: it does not fall."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _decay_goes_on(self) -> Self:
        if self.decay is not None and not self.warm_up_steps <= self.decay[0] < self.decay[1]:
            raise ValueError("decay needs two steps, the first not before warm_up_steps ends")
        return self


class Algorithm(Strict):
    """A data algorithm; its name alone will do where it needs no options. See algorithms.md."""

    name: str
    """Built in, an entry point of an installed package, or module:Class."""
    options: Options = {}
    """Checked by the algorithm when the hub starts."""

    @model_validator(mode="before")
    @classmethod
    def _named_only(cls, said: Any) -> Any:
        return {"name": said} if isinstance(said, str) else said


class Buffer(Strict):
    """Whole groups that wait for the trainer."""

    order: Literal["edf", "fifo"] = "edf"
    """Earliest deadline first: what turns stale first; or first in, first out."""
    max_groups: int | None = Field(default=None, ge=1)
    """Groups beyond it are dropped, first those that come first; unset: as many as may be open."""
    max_nbytes: int | None = Field(default=None, ge=1)
    """The same for bytes of tokens; the groups of one batch are kept whatever they take."""


class Replay(Strict):
    """Groups that are trained on again."""

    ratio: float = Field(gt=0, lt=1)
    """Of a batch's groups, at most, rounded down; 0.3 uses a group 1.43 times on average."""
    order: Algorithm = Algorithm(name="latest")
    """Which of those that may be: latest, uniform, prioritised, or your own."""
    max_uses: int = Field(default=2, ge=2)
    """Batches that a group is in, the first one included."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Versions between sampling and the last use, at most; unset: the trainer's."""
    max_groups: int = Field(default=1024, ge=1)
    """Groups that are kept; then the oldest ones are forgotten."""
    max_nbytes: int = Field(default=256 << 20, ge=1)
    """Bytes of tokens that they may take."""


LaneChoice = Literal["auto"] | tuple[Literal["grpc", "tcp", "shm", "ucx"], ...]


class Sync(Strict):
    """When the weights of a policy become a version, and who decides so."""

    style: Literal["steps", "asked"] = "steps"
    """steps: the trainer, after every so many optimizer steps. asked: the rollout nodes, which ask
    for a newer version; the trainer publishes after the step in progress, or says that there is
    nothing newer."""
    every: int = Field(default=1, ge=1)
    """steps: optimizer steps per version. asked: groups that a node finishes before it asks."""

    @property
    def steps_per_version(self) -> int | None:
        """Optimizer steps between versions; None: one comes when it is asked for."""
        return self.every if self.style == "steps" else None


class Trainer(Strict):
    """How one policy is trained."""

    step_count: int | None = Field(default=None, ge=1)
    """Optimizer steps, one batch each; unset: until the data ends."""
    groups_per_batch: int = Field(default=16, ge=1)
    """Groups (prompts) per batch; rollouts per batch are this times group_size."""
    max_staleness: int = Field(default=2, ge=0)
    """Versions between sampling and training, at most. 0 is synchronous."""
    sync: Sync = Sync()
    lanes: LaneChoice = "auto"
    """Over which weights are served, gRPC in any case: auto is shared memory and TCP, beside TLS
    shared memory alone; or a list of grpc, tcp, shm, ucx."""
    prefetch: int = Field(default=1, ge=1, le=8)
    """Batches held at once. 1 is strict: the next one follows the ack."""
    buffer: Buffer = Buffer()
    replay: Replay | None = None
    """Unset: every group is trained on once."""
    guards: tuple[Algorithm, ...] = ()
    """Refuse batches: distinct_prompts, useful_share, or your own. What is at fault is dropped."""
    max_refusals: int = Field(default=4, ge=0)
    """After so many refusals in a row a batch is served as it is."""
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    advantages: Advantages = Advantages()
    max_tokens_per_pass: int = Field(default=16384, ge=1)
    """Tokens of one forward and backward pass; gradients of a batch add up over passes."""
    export_dtype: Literal["bf16", "f32"] = "bf16"
    """What is published. Master weights are always f32."""
    checkpoint_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints. Unset: one when ten minutes have passed since the last one, and
    of these the newest two are kept. The first and last weights are always saved."""
    device: str = "auto"
    """auto, cpu or cuda[:N]."""
    thread_count: int = Field(default=1, ge=1)
    """CPU threads for torch."""
    store: str | None = None
    """URL of a bucket or shared directory, such as s3://bucket/runs or file:///shared/runs, to
    which versions also go, in a folder of the run's own; needs `astraflow[store]`."""

    @model_validator(mode="after")
    def _asked_versions_come_between_batches(self) -> Self:
        if self.sync.style == "asked" and self.prefetch > 1:
            raise ValueError(
                "sync.style asked needs prefetch 1: a version that is asked for comes before the "
                "next batch is drawn"
            )
        return self


class Policy(Strict):
    """One model that is trained."""

    model: Model
    sampling: Sampling = Sampling()
    trainer: Trainer = Trainer()


class DataSet(Strict):
    """Rows that become prompts."""

    path: Path
    """JSONL or Parquet file, or a directory written by datasets.save_to_disk. Relative
    paths start at the recipe's folder."""
    format: Literal["auto", "jsonl", "parquet", "datasets"] = "auto"
    id_field: str | None = None
    """Field with a stable id; unset: a digest of the row."""
    shuffle: bool = True
    """Another order in every epoch, from the run's seed."""
    max_prompt_chars: int | None = Field(default=None, ge=1)
    """Rows whose length_field is longer are left out and counted."""
    length_field: str = "prompt"
    """The field whose length counts."""
    limit: int | None = Field(default=None, ge=1)
    """Only the first so many rows."""


class Workflow(Strict):
    """Code that turns a prompt into a rollout."""

    name: str
    """Registered workflow, or module:Class."""
    options: Options = {}
    """Checked by the workflow."""
    scorer: str | None = None
    """Registered scorer, or module:function; unset: the workflow scores."""
    scorer_options: Options = {}
    """Checked by the scorer."""
    policies: tuple[Name, ...] = ()
    """Policies that it samples from; empty: all of the recipe."""


class MixPhase(Strict):
    """How data sets are mixed from a version on."""

    weights: dict[Name, Annotated[float, Field(ge=0)]] = Field(min_length=1)
    """Shares by data set; they need not add up to 1."""
    from_version: int = Field(default=0, ge=0)
    """First version of the workflow's first policy that it is for."""


class Rollouts(Strict):
    """What is asked for in training."""

    data_set: Name | dict[Name, Annotated[float, Field(ge=0)]] | tuple[MixPhase, ...]
    """One data set, several by weight, or a schedule of weights by version."""
    workflow: Name
    group_size: int = Field(default=8, ge=1)
    """Rollouts per prompt."""
    min_group_size: int = Field(default=2, ge=1)
    """A group with fewer rewarded rollouts is dropped."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the data set; unset: until the steps are done."""
    timeout_s: float = Field(default=120.0, gt=0)
    """For one rollout, from its start."""
    max_attempts: int = Field(default=3, ge=1)
    """Of one sample, when engines or environments fail."""
    keep_together: bool = True
    """One node samples a whole group, so that it reads the prompt once. Off: a group is spread over
    the pool, and is whole sooner when few groups are open."""
    max_failed_groups: int = Field(default=32, ge=1)
    """The run fails after so many groups in a row of which every rollout failed."""
    selectors: tuple[Algorithm, ...] = ()
    """Decide which prompts are asked for: uniform, filter_solved, curriculum, greso, or your own.
    All of them have to admit a prompt; none: every prompt is asked for."""
    max_skips: int = Field(default=256, ge=1)
    """After so many prompts in a row that were not admitted the next one is asked for."""
    filters: tuple[Algorithm, ...] = ()
    """Decide, in this order, what of a whole group is trained on: zero_advantage (dynamic
    sampling), reward_range, length, truncated, route, or your own."""

    @model_validator(mode="after")
    def _group_can_be_whole(self) -> Self:
        if self.min_group_size > self.group_size:
            raise ValueError("min_group_size is larger than group_size")
        return self

    @model_validator(mode="after")
    def _mix_has_weights(self) -> Self:
        if not self.mix or self.mix[0].from_version:
            raise ValueError("data_set: the first phase has to begin with from_version 0")
        versions = [phase.from_version for phase in self.mix]
        if sorted(set(versions)) != versions:
            raise ValueError("data_set: from_version has to rise from phase to phase")
        if not all(any(phase.weights.values()) for phase in self.mix):
            raise ValueError("data_set: every phase needs a weight above 0")
        return self

    @property
    def mix(self) -> tuple[MixPhase, ...]:
        """How data sets are mixed, phase by phase."""
        match self.data_set:
            case str(name):
                return (MixPhase(weights={name: 1.0}),)
            case dict(weights):
                return (MixPhase(weights=weights),)
            case phases:
                return phases

    @property
    def data_sets(self) -> tuple[str, ...]:
        """All data sets that prompts come from."""
        return tuple(dict.fromkeys(name for phase in self.mix for name in phase.weights))


class Relation(Strict):
    """How the versions of several policies go together."""

    kind: Literal["independent", "bounded_skew", "lockstep"] = "independent"
    """independent: each trains at its own pace. bounded_skew: none is more than max_skew versions
    ahead of another. lockstep: one version at a time, and the pool sees new versions of all
    policies together."""
    max_skew: int = Field(default=1, ge=1)
    """Versions that one policy may be ahead of another; of bounded_skew."""
    timeout_s: float = Field(default=60.0, gt=0)
    """For how long the others wait for a policy whose trainer is gone, from its last sign of life;
    a slow trainer is waited for."""
    on_timeout: Literal["go_on", "stop"] = "go_on"
    """go_on: the others train without it until it is back. stop: the run fails and says why."""


class EvalSet(Strict):
    """One data set of a suite."""

    data_set: Name
    workflow: Name
    repeats: int = Field(default=1, ge=1)
    """Rollouts per prompt."""
    correct_reward: float = 1.0
    """A rollout is correct when its reward is at least this."""


class EvalSuite(Strict):
    """An evaluation, run beside training on pinned versions."""

    data_sets: tuple[EvalSet, ...] = Field(min_length=1)
    at_start: bool = True
    at_end: bool = True
    every: int | None = Field(default=None, ge=1)
    """Versions of the first policy between evaluations."""
    pool_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the pool's capacity that it may take while training goes on."""


class Engine(Strict):
    """The inference engine of a RaaS, one per policy."""

    kind: Literal["embedded"] = "embedded"
    max_batch: int = Field(default=128, ge=1)
    """Sequences decoded together."""
    max_context: int | None = Field(default=None, ge=1)
    """Tokens of prompt and completion; unset: the model's own limit."""
    device: str = "auto"
    """auto, cpu or cuda[:N]."""
    dtype: Literal["f32", "bf16"] = "f32"
    """Of the computation."""
    thread_count: int = Field(default=1, ge=1)
    """CPU threads for torch."""
    kv: Literal["keep", "recompute"] = "keep"
    """What a new version does to the cache of running generations: nothing, or they are read
    anew with the new weights before they go on; trajectories say which it was."""


class Relay(Strict):
    """Rollout nodes pass on what they pull, so that a region costs the trainer one transfer."""

    mode: Literal["auto", "off"] = "auto"
    """auto: where others can dial the node, which is when `listen` is set or the hub is on
    loopback. Off: never."""
    listen: str | None = None
    """host:port; port 0 takes a free one. Set it with a hub that is not on loopback."""
    advertise: str | None = None
    """How others dial it: auto, fqdn, or a host or IP; unset: as listened on."""


class Raas(Strict):
    """The rollout nodes that the launcher starts; more can join at any time."""

    count: int = Field(default=1, ge=0)
    capacity: int = Field(default=128, ge=1)
    """Rollouts that one node runs at once."""
    engine: Engine = Engine()
    relay: Relay = Relay()
    lanes: LaneChoice = "auto"
    """Over which weights are pulled, the most wanted first; gRPC is the way out in any case."""
    sources: Literal["auto", "store"] = "auto"
    """Where weights come from. auto: whoever has them, nearest first. store: the object store
    alone, for pools that cannot reach the trainer."""
    cache: Path | None = None
    """Folder in which a node keeps its newest weights, so that one that was killed rejoins by a
    patch; it takes up to two and a half times the exported bytes per policy. Unset: none."""


class Autoscale(Strict):
    """How large the pool may be, and how `astraflow autoscale` changes it."""

    min: int = Field(default=1, ge=0)
    """Nodes, at least."""
    max: int = Field(default=64, ge=1)
    """Nodes, at most."""
    window_s: float = Field(default=300.0, gt=0)
    """Waits, production and consumption are measured over this time; it is also the least time
    between two changes. Several batches long is good."""
    cooldown_s: float = Field(default=0.0, ge=0)
    """After a change of the pool nothing is measured for so long: what new nodes take to warm
    up."""
    drain_s: float | None = Field(default=None, gt=0)
    """For how long a node that leaves may finish what it holds; unset: as long as it takes."""
    start: str | None = None
    """Shell command that starts one node, such as `sbatch node.sh {name}`; unset: a process on
    the machine of `astraflow autoscale`. {name}, {hub}, {recipe} and {run} are filled in, quoted;
    ASTRAFLOW_JOIN_TOKEN is in its environment."""
    stop: str | None = None
    """Shell command for a node that has left, such as `scancel --name {name}`; unset: a node that
    was drained ends by itself."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError("min is larger than max")
        if self.stop is not None and self.start is None:
            raise ValueError("stop without start: give both, or neither for local processes")
        return self


class Tls(Strict):
    """PEM files; all unset: plain text, which suits loopback only."""

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None


class Journal(Strict):
    """What of the run outlives the hub's process."""

    kind: Literal["sqlite", "none"] = "sqlite"
    """sqlite: a hub that died goes on where it was. none: its run dies with it."""
    durability: Literal["process", "power"] = "process"
    """What an acknowledgement survives: the death of the hub, or of the machine's power too."""
    compact_nbytes: int = Field(default=256 << 20, ge=1 << 16)
    """Bytes of records after which a snapshot takes their place."""


class Metrics(Strict):
    """What every process tells Prometheus; see observability.md."""

    listen: str = "127.0.0.1:0"
    """host:port of the hub's endpoint, or off; `astraflow run` gives its other processes the ports
    after it. Port 0 takes a free one: the log and `astraflow status` say which."""

    @field_validator("listen")
    @classmethod
    def _is_place(cls, listen: str) -> str:
        host, _, port = listen.rpartition(":")
        if listen != "off" and not (host and port.isdecimal() and int(port) < 1 << 16):
            raise ValueError(f"'{listen}' is neither host:port nor off")
        return listen


class Tracing(Strict):
    """A trace per group, over all processes; see observability.md."""

    exporter: str = "off"
    """off; file or console: JSON lines; or the name of an installed OpenTelemetry exporter, such as
    otlp, which reads its own OTEL_ variables. Needs `astraflow[otel]`."""
    path: Path | None = None
    """Folder of the exporter `file`; unset: traces, in the run's folder."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Of the groups, which are traced."""


class Hub(Strict):
    """The Dataflow process."""

    listen: str = "127.0.0.1:0"
    """host:port; port 0 takes a free one."""
    advertise: str | None = None
    """How others dial it: auto, fqdn, or a host or IP; unset: as listened on."""
    session_ttl_s: float = Field(default=10.0, ge=0.5)
    """A member that says nothing for so long is gone, and what it held is issued again."""
    tls: Tls = Tls()
    journal: Journal = Journal()


class Recipe(Strict):
    """One run: what is trained, on what, by which processes."""

    name: Name
    seed: int = 0
    policies: dict[Name, Policy] = Field(min_length=1)
    data: dict[Name, DataSet] = Field(min_length=1)
    workflows: dict[Name, Workflow] = Field(min_length=1)
    rollouts: Rollouts
    relation: Relation = Relation()
    evals: dict[Name, EvalSuite] = {}
    raas: Raas = Raas()
    autoscale: Autoscale = Autoscale()
    hub: Hub = Hub()
    metrics: Metrics = Metrics()
    tracing: Tracing = Tracing()

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        sets = [("rollouts", name, self.rollouts.workflow) for name in self.rollouts.data_sets]
        for suite, settings in self.evals.items():
            sets += [
                (f"evals.{suite}", part.data_set, part.workflow) for part in settings.data_sets
            ]
        for where, data_set, workflow in sets:
            _must_name(where, "data_set", data_set, self.data)
            _must_name(where, "workflow", workflow, self.workflows)
        for name, workflow in self.workflows.items():
            for policy in workflow.policies:
                _must_name(f"workflows.{name}", "policies", policy, self.policies)
        return self

    @model_validator(mode="after")
    def _policies_that_wait_publish_by_themselves(self) -> Self:
        asked = [name for name, each in self.policies.items() if each.trainer.sync.style == "asked"]
        if asked and self.relation.kind != "independent":
            raise ValueError(
                f"relation.kind {self.relation.kind} waits for versions of every policy, but "
                f"{', '.join(asked)} publishes only when asked; choose sync.style steps, or "
                "relation.kind independent"
            )
        return self

    @model_validator(mode="after")
    def _dead_trainer_is_noticed_in_time(self) -> Self:
        relation, ttl_s = self.relation, self.hub.session_ttl_s
        if relation.kind != "independent" and relation.timeout_s < ttl_s:
            raise ValueError(
                f"relation.timeout_s is {relation.timeout_s:g} s, but who is gone is known after "
                f"hub.session_ttl_s, {ttl_s:g} s; lower that, or wait longer"
            )
        return self

    def policies_of(self, workflow: str) -> tuple[str, ...]:
        """Return the policies that a workflow samples from."""
        return self.workflows[workflow].policies or tuple(self.policies)


def _must_name(where: str, key: str, name: str, known: dict[str, Any]) -> None:
    if name not in known:
        raise ValueError(f"{where}.{key}: '{name}' is none of {', '.join(known)}")

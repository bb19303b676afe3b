"""The processes of a recipe: hub, rollout nodes and how many of them, engines, gateway."""

import re
from math import ceil
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from astraflow.config.strict import Count, LaneChoice, Name, Named, Nbytes, Options, Seconds, Strict


class TlsConfig(Strict):
    """PEM files; all unset: plain text, which suits loopback only."""

    certificate: Path | None = None
    """Of this process, with its chain."""
    key: Path | None = None
    """Private key of the certificate."""
    ca: Path | None = None
    """Of the authority that peers' certificates must come from; unset: they show none."""

    def to_dial(self) -> dict[str, str]:
        """Return the files that this server is dialled with on its own machine, by name.

        Where it has a `ca`, callers show the server's own certificate; without one they show none,
        and trust that certificate.
        """
        if self.certificate is None:
            return {}
        if self.ca is None:
            return {"ca": str(self.certificate)}
        return {"certificate": str(self.certificate), "key": str(self.key), "ca": str(self.ca)}


class JournalConfig(Strict):
    """What of the run outlives the hub's process."""

    kind: Literal["sqlite", "postgres", "none"] = "sqlite"
    """sqlite: a hub that died goes on where it was. postgres: on another host, too. none: its run
    dies with it."""
    durability: Literal["process", "power"] = "process"
    """What an acknowledgement survives: the death of the hub, or of the machine's power too; a
    database does as it is set up, and waits for its disk with power."""
    compact_nbytes: Nbytes = Field(default=256 << 20, ge=1 << 16)
    """Bytes of records after which a snapshot takes their place."""
    url: str | None = None
    """postgres: of the database, as libpq takes it, such as postgresql://astra@db/runs; the
    password comes from PGPASSWORD or a password file."""
    schema_name: str | None = Field(default=None, min_length=1, max_length=63)
    """postgres: of the run's own schema; unset: the name of the run's folder."""
    lease_s: Seconds = Field(default=5.0, ge=1)
    """postgres: a hub that is silent for so long may be taken over from."""
    standby: bool = False
    """postgres: wait until the hub that serves the run is gone, then go on with it (--standby)."""

    @model_validator(mode="after")
    def _url_fits_the_kind(self) -> Self:
        if (self.kind == "postgres") != (self.url is not None):
            raise ValueError("url says where the database of kind postgres is; give both or none")
        if self.url is not None and re.search(r"password\s*=|://[^/@:]*:[^/@]*@", self.url):
            raise ValueError(
                "url holds a password, and recipes are shown; give it in PGPASSWORD, or in a file"
                " that PGPASSFILE or passfile= names"
            )
        return self


class Metrics(Strict):
    """What every process tells Prometheus; see metrics.md."""

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
    """A trace per group, over all processes; see metrics.md."""

    exporter: str = "off"
    """off; file or console: JSON lines; or the name of an installed OpenTelemetry exporter, such as
    otlp, which reads its own OTEL_ variables. Needs the extra `otel`."""
    path: Path | None = None
    """Folder of the exporter `file`; unset: traces, in the run's folder."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Of the groups, which are traced."""


class HubConfig(Strict):
    """The Dataflow process."""

    listen: str = "127.0.0.1:0"
    """host:port; port 0 takes a free one."""
    advertise: str | None = None
    """How others dial it: auto, fqdn, a host or IP, or the host:port of all hubs with commas
    between them; unset: as listened on."""
    session_ttl_s: Seconds = Field(default=10.0, ge=0.5)
    """A member that says nothing for so long is gone, and what it held is issued again."""
    patience_s: float = Field(default=30.0, gt=0)
    """A member that hears nothing from the hub for so long gives up. A hub that comes and goes is
    borne while it answers anything in between."""
    tls: TlsConfig = TlsConfig()
    identities: dict[str, str] = Field(default_factory=dict[str, str])
    """With tls.ca: names in certificates (alternative or common ones) and the role that each may
    have without a token: node, relay, trainer, trainer:POLICY, reader or operator."""
    journal: JournalConfig = JournalConfig()


_OF_SERVERS = (
    *("python", "url", "args", "tensor_parallel", "memory", "cache_gib", "start_s"),
    "routed_experts",
)


class EngineSettings(Strict):
    """The inference engine of a RaaS, one per policy, or per model that several policies adapt."""

    kind: Literal["embedded", "vllm", "sglang", "none"] = "embedded"
    """embedded: in the node's own process, for small models. vllm, sglang: a server that the node
    starts and supervises, or attaches to; see engines.md. none: nothing is sampled, for workflows
    that take answers from their rows."""
    max_batch: Count = Field(default=128, ge=1)
    """Sequences decoded together."""
    max_context: Count | None = Field(default=None, ge=1)
    """Tokens of prompt and completion; unset: the model's own limit."""
    device: str = "auto"
    """auto, cpu or cuda[:N]. Servers with auto are spread over the GPUs that the node sees."""
    dtype: Literal["auto", "f32", "bf16"] = "auto"
    """Of the computation. auto: that of the model, as its config.json names it; half precision of
    any kind is bf16, and the embedded engine computes in f32 on a CPU."""
    thread_count: Count = Field(default=1, ge=1)
    """CPU threads for torch."""
    kv: Literal["keep", "recompute"] = "keep"
    """What a new version does to the cache of running generations: nothing, or they are read
    anew with the new weights before they go on; trajectories say which it was."""
    python: Path | None = None
    """Servers: interpreter of the environment that the server is installed in; unset: what
    ASTRAFLOW_VLLM_PYTHON or ASTRAFLOW_SGLANG_PYTHON says."""
    url: str | None = None
    """Servers: attach to one that runs on this host already, such as http://127.0.0.1:8000, in
    place of starting one."""
    args: tuple[str, ...] = ()
    """Servers: further arguments of the command that starts it."""
    tensor_parallel: Count = Field(default=1, ge=1)
    """Servers: GPUs that share one copy of the model."""
    memory: float | None = Field(default=None, gt=0, le=1)
    """Servers: share of a GPU's memory for weights and cache; unset: the server's own, or an equal
    part of .9 where servers of several policies share it."""
    cache_gib: float = Field(default=1.0, gt=0)
    """Servers on a CPU: GiB for keys and values."""
    routed_experts: bool = False
    """Servers on GPUs: they tell which experts every token went through, for mixtures of experts
    that are trained with router replay. The embedded engine always does."""
    start_s: float = Field(default=600.0, gt=0)
    """Servers: seconds that a start may take until the first token."""

    @property
    def is_server(self) -> bool:
        """Whether it is a process of its own."""
        return self.kind in ("vllm", "sglang")

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> Self:
        fields = type(self).model_fields
        strange = [name for name in _OF_SERVERS if getattr(self, name) != fields[name].default]
        if strange and not self.is_server:
            raise ValueError(f"{strange[0]} is for kind vllm or sglang; the engine is {self.kind}")
        if self.url is not None and self.python is not None:
            raise ValueError("url attaches to a server and python starts one: give one of them")
        return self


class RelayConfig(Strict):
    """Rollout nodes pass on what they pull, so that a region costs the trainer one transfer.

    Over gRPC and, where `raas.lanes` has tcp, over TCP.
    """

    mode: Literal["auto", "off"] = "auto"
    """auto: where others can dial the node, which is when `listen` is set or the hub is on
    loopback. Off: never."""
    listen: str | None = None
    """host:port; port 0 takes a free one. Set it with a hub that is not on loopback. TCP is on the
    port above it, when that is free."""
    advertise: str | None = None
    """How others dial it: auto, fqdn, or a host or IP; unset: as listened on."""


class Agents(Strict):
    """How agents of any make reach the policies of a node, over OpenAI's API."""

    listen: str = "127.0.0.1:0"
    """host:port of each node; port 0 takes a free one. It is listened on when a workflow needs
    it. What it serves needs no more than the key of an episode: leave it on loopback unless the
    network is yours."""
    advertise: str | None = None
    """How agents dial it: auto, fqdn, or a host or IP; unset: as listened on."""
    max_requests: Count = Field(default=1024, ge=1)
    """Generations at once; more are answered with 429 and Retry-After."""
    max_body_nbytes: Nbytes = Field(default=8 * 2**20, ge=1024)
    """Bytes of a request; a larger one is answered with 413."""
    patience_s: float = Field(default=20.0, gt=0)
    """Seconds that a client may take for the head of a request, and again for its body."""
    tls: TlsConfig = TlsConfig()
    """Of what agents dial; with `ca`, they must show a certificate of it."""


class Raas(Strict):
    """The rollout nodes that the launcher starts; more can join at any time."""

    count: Count = Field(default=1, ge=0)
    """Nodes to start; 0: none, for nodes that join from elsewhere."""
    capacity: Count = Field(default=128, ge=1)
    """Rollouts that one node runs at once."""
    eval_extra: Count | None = Field(default=None, ge=0)
    """Rollouts of evaluations that one node runs beyond `capacity`, so that training keeps all of
    it. An engine that decodes many at once does a few more at little cost, if it has the memory for
    them. Unset: a tenth of `capacity`, rounded up."""
    engine: EngineSettings = EngineSettings()
    relay: RelayConfig = RelayConfig()
    agents: Agents = Agents()
    lanes: LaneChoice = "auto"
    """Over which weights are pulled, the most wanted first, and relayed; gRPC is the way out in any
    case."""
    encrypt_lanes: bool | None = None
    """Whether the lanes that leave the host are encrypted, those of the relay too, and sources in
    the clear asked over gRPC; unset: beside TLS."""
    sources: Literal["auto", "store"] = "auto"
    """Where weights come from. auto: whoever has them, nearest first. store: the object store
    alone, for pools that cannot reach the trainer."""
    cache: Path | None = None
    """Folder in which a node keeps its newest weights, so that one that was killed rejoins by a
    patch; it takes up to two and a half times the exported bytes per policy. Unset: none."""

    @property
    def eval_place_count(self) -> int:
        """Rollouts of evaluations beyond the capacity."""
        return ceil(self.capacity / 10) if self.eval_extra is None else self.eval_extra


class Gpus(Strict):
    """How `astraflow run` shares the GPUs out among its processes; see gpus.md."""

    layout: Literal["auto", "apart", "colocated"] = "auto"
    """apart: every rank of a trainer and every server has GPUs of its own. colocated: they share
    GPUs, each with a part of the memory. auto: apart where that fits."""
    count: Count | None = Field(default=None, ge=0)
    """GPUs of each machine that may be used; unset: those that are found, within
    CUDA_VISIBLE_DEVICES. 0: nothing is planned, and processes see what the launcher sees."""
    machines: Count = Field(default=1, ge=1)
    """Machines with so many GPUs each. What the plan has on others is started there, by the
    commands that the launcher prints."""
    trainer_memory: float | None = Field(default=None, gt=0, lt=1)
    """colocated: part of the memory of a GPU that trainers have beside servers; unset: half of .9,
    or what raas.engine.memory leaves of that."""


class ExecutorConfig(Named):
    """Where trainers and nodes are started; its name alone will do. See clusters.md."""

    name: str = "local"
    """local, ssh, slurm, kubernetes, ray, skypilot, or an entry point astraflow.executors."""
    options: Options = Field(default={})
    """Of that executor, such as partition."""


class Restarts(Strict):
    """How often `astraflow run` starts what died again within a window; beyond that it gives up."""

    raas: Count = Field(default=3, ge=0)
    """Of all nodes together; where one is given up the others go on, and without any the run
    fails."""
    trainer: Count = Field(default=16, ge=0)
    """Of each trainer that a signal ended; else the run fails."""
    hub: Count = Field(default=16, ge=0)
    """Of a hub that a signal killed; else the run fails."""
    window_s: float = Field(default=600.0, gt=0)
    """Restarts that are longer ago do not count."""


class AutoscaleConfig(Strict):
    """How large the pool may be, and how `astraflow autoscale` changes it."""

    min: Count = Field(default=1, ge=0)
    """Nodes, at least."""
    max: Count = Field(default=64, ge=1)
    """Nodes, at most."""
    window_s: Seconds = Field(default=300.0, gt=0)
    """Waits, production and consumption are measured over this time; it is also the least time
    between two changes. Several batches long is good."""
    cooldown_s: Seconds = Field(default=0.0, ge=0)
    """After a change of the pool nothing is measured for so long: what new nodes take to warm
    up."""
    drain_s: Seconds | None = Field(default=None, gt=0)
    """For how long a node that leaves may finish what it holds; unset: as long as it takes."""
    start: str | None = None
    """Shell command that starts one node, such as `sbatch node.sh {name}`; unset: one more
    where the executor starts those of the run. {name}, {hub}, {recipe} and {run} are filled in,
    quoted; ASTRAFLOW_JOIN_TOKEN is in its environment."""
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


class Http(Strict):
    """Endpoints for peers that speak AstraFlow's published HTTP; see http.md."""

    port: int | None = Field(default=None, ge=0, lt=1 << 16)
    """`astraflow run` starts a gateway on it; 0 takes a free one. Unset: it starts none."""
    host: str = "127.0.0.1"
    """On which the gateway listens, and under which peers dial back. Beyond loopback give it a
    token (ASTRAFLOW_HTTP_TOKEN) and `tls`, or a network in which everybody may train."""
    tls: TlsConfig = TlsConfig()
    """Of these endpoints; with `ca`, callers must show a certificate of it."""
    dial: tuple[str, ...] = ("127.0.0.0/8", "::1", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
    """Weight senders and RaaS that may be dialled: names, addresses and networks. The host that a
    request came from may be dialled too."""
    legacy_pickle: bool = False
    """Whether pickled requests are read, as existing peers send them; nothing in them is run."""
    trainers: tuple[Name, ...] = ()
    """Policies whose trainers come over HTTP: `astraflow run` starts none for them."""
    max_body_nbytes: Nbytes = Field(default=64 << 20, ge=1 << 10)
    """Of one request. One host may send so much at once, all together twice of it."""
    max_answer_nbytes: Nbytes = Field(default=128 << 20, ge=1 << 10)
    """Of one answer of a peer that is dialled, such as the rollouts of a RaaS."""
    max_weights_nbytes: Nbytes | None = Field(default=None, ge=1)
    """Of the weights that a sender names; unset: the memory of this machine or container."""
    clear_weights: bool = False
    """Whether weights go to published receivers on other hosts, and come from published senders
    there, in a run with TLS: that protocol carries them in the clear."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds in which all of a request must come."""
    batch_timeout_s: float = Field(default=3500.0, gt=0)
    """Seconds after which /batch says 504; peers wait for 3600."""
    transfer_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for one transfer of weights, from or to a peer."""
    silence_s: float = Field(default=3600.0, gt=0)
    """A trainer that asks nothing for so long has gone, and what it held returns to the run."""

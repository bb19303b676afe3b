"""Members: who takes part in a run, on what, and how busy they are."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Self

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.ids import BatchId, MemberId, PolicyId, RunId, TaskId
from astraflow.core.tasks import RegisteredCode, WorkflowSpec
from astraflow.core.versions import WeightEndpoint

CONTRACT_VERSION = 2


class MemberRole(StrEnum):
    """What a member does."""

    TRAINER = "trainer"
    RAAS = "raas"


class Capability(StrEnum):
    """Something a peer may leave out."""

    RELAY = "relay"
    PIN_VERSION = "pin_version"
    CONTINUE = "continue"
    ADAPTER = "adapter"
    ROUTED_EXPERTS = "routed_experts"
    BLOBS = "blobs"
    OBJECT_STORE = "object_store"
    PAYLOADS = "payloads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What a peer understands."""

    contract_version: int = CONTRACT_VERSION
    capabilities: frozenset[Capability] = frozenset()
    software: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a member runs on."""

    accelerator: str = ""
    accelerator_count: int = 0
    core_count: int = 0
    memory_nbytes: int = 0
    price_per_hour: float | None = None
    currency: str = ""
    metrics_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Tells whether two members mean the same model; an empty digest is not compared."""

    name: str = ""
    config_digest: bytes = b""
    tokenizer_digest: bytes = b""
    chat_template_digest: bytes = b""

    def merged(self, named: Self) -> Self:
        """Return what is known of a model by both.

        Raises:
            AstraflowError: MODEL_MISMATCH when a digest that both give differs.
        """
        for part in ("config_digest", "tokenizer_digest", "chat_template_digest"):
            one, other = getattr(self, part), getattr(named, part)
            if one and other and one != other:
                raise AstraflowError(
                    Reason.MODEL_MISMATCH,
                    f"the {part.removesuffix('_digest')} of model '{named.name}' differs from that "
                    "of the members that joined before; give all the same model directory",
                )
        return replace(
            self,
            name=self.name or named.name,
            config_digest=self.config_digest or named.config_digest,
            tokenizer_digest=self.tokenizer_digest or named.tokenizer_digest,
            chat_template_digest=self.chat_template_digest or named.chat_template_digest,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RaasLoad:
    """How busy a RaaS is; rates are means since the last report."""

    inflight_count: int = 0
    queued_count: int = 0
    capacity: int = 0
    tokens_per_s: float = 0.0
    kv_fraction: float = 0.0
    engine_queued_count: int = 0
    relay_bytes_per_s: float = 0.0
    wait_fraction: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLoad:
    """How busy a trainer is; rates are means since the last report."""

    step: int = 0
    held_batch_count: int = 0
    tokens_per_s: float = 0.0
    wait_fraction: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionResume:
    """Continues an earlier session; see `common/v1/session.proto`."""

    resume_token: bytes
    incarnation: int
    held_task_ids: tuple[TaskId, ...] = ()
    held_batch_ids: tuple[BatchId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One member's lease on the run; `token` and `transfer_token` are secrets."""

    member_id: MemberId
    token: bytes = field(repr=False)
    ttl: timedelta
    keep_alive_interval: timedelta
    transfer_token: bytes = field(repr=False)
    max_message_nbytes: int
    held_task_ids: tuple[TaskId, ...] = ()
    held_batch_ids: tuple[BatchId, ...] = ()


class DirectiveKind(StrEnum):
    """What the run asks of a member."""

    CONTINUE = "continue"
    DRAIN = "drain"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """An order to a member; grace None: no limit."""

    kind: DirectiveKind
    grace: timedelta | None = None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """A policy that a RaaS has an engine for.

    Attributes:
        version: What the engine holds; None: nothing of this run.
        identity: The model.
        max_context_token_count: Prompt and completion together.
    """

    policy_id: PolicyId
    version: int | None = None
    identity: ModelIdentity = field(default_factory=ModelIdentity)
    max_context_token_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPool:
    """What a RaaS says of itself when it joins."""

    name: str
    contract: Contract
    resume: SessionResume | None = None
    capacity: int
    policies: tuple[ServedPolicy, ...]
    codes: tuple[RegisteredCode, ...] = ()
    resources: Resources = field(default_factory=Resources)
    region: str = ""
    relay_endpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMembership:
    """What a RaaS gets when it is admitted."""

    session: Session
    run_id: RunId
    workflows: tuple[WorkflowSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterTrainer:
    """What a trainer says of itself; see RegisterTrainerRequest."""

    policy_id: PolicyId
    name: str
    contract: Contract
    resume: SessionResume | None = None
    identity: ModelIdentity = field(default_factory=ModelIdentity)
    groups_per_batch: int
    checkpoint_id: str = ""
    last_step: int = 0
    version: int | None = None
    weight_endpoints: tuple[WeightEndpoint, ...] = ()
    resources: Resources = field(default_factory=Resources)
    region: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRegistration:
    """What a trainer gets when it is admitted; see RegisterTrainerResponse.

    `signing_seed` is a secret that the state machine does not know.
    """

    session: Session
    run_id: RunId
    max_staleness: int
    next_version: int
    rolled_back_batch_count: int = 0
    signing_seed: bytes = field(default=b"", repr=False)


class MemberState(StrEnum):
    """Where a member stands."""

    JOINING = "joining"
    LIVE = "live"
    DRAINING = "draining"
    SUSPECT = "suspect"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """One live session, as its operator sees it; see `control/v1/run.proto`."""

    member_id: MemberId
    name: str
    role: MemberRole
    state: MemberState
    region: str = ""
    versions: Mapping[PolicyId, int] = field(default_factory=dict[PolicyId, int])
    resources: Resources = field(default_factory=Resources)
    load: RaasLoad | TrainerLoad | None = None
    accepted_count: int = 0
    reissued_count: int = 0
    outstanding_count: int = 0
    max_outstanding: int = 0
    join_time: datetime
    keep_alive_time: datetime

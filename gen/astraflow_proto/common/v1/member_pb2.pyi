from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_TRAINER: _ClassVar[Role]
    ROLE_RAAS: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_TRAINER: Role
ROLE_RAAS: Role

class Resources(_message.Message):
    __slots__ = ("accelerator", "accelerator_count", "core_count", "memory_nbytes", "price_per_hour", "currency", "metrics_address")
    ACCELERATOR_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    CORE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_NBYTES_FIELD_NUMBER: _ClassVar[int]
    PRICE_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    CURRENCY_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    accelerator: str
    accelerator_count: int
    core_count: int
    memory_nbytes: int
    price_per_hour: float
    currency: str
    metrics_address: str
    def __init__(self, accelerator: _Optional[str] = ..., accelerator_count: _Optional[int] = ..., core_count: _Optional[int] = ..., memory_nbytes: _Optional[int] = ..., price_per_hour: _Optional[float] = ..., currency: _Optional[str] = ..., metrics_address: _Optional[str] = ...) -> None: ...

class RaasLoad(_message.Message):
    __slots__ = ("inflight_count", "queued_count", "capacity", "tokens_per_s", "kv_fraction", "engine_queued_count", "relay_bytes_per_s", "wait_fraction")
    INFLIGHT_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    KV_FRACTION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_QUEUED_COUNT_FIELD_NUMBER: _ClassVar[int]
    RELAY_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_FRACTION_FIELD_NUMBER: _ClassVar[int]
    inflight_count: int
    queued_count: int
    capacity: int
    tokens_per_s: float
    kv_fraction: float
    engine_queued_count: int
    relay_bytes_per_s: float
    wait_fraction: float
    def __init__(self, inflight_count: _Optional[int] = ..., queued_count: _Optional[int] = ..., capacity: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., kv_fraction: _Optional[float] = ..., engine_queued_count: _Optional[int] = ..., relay_bytes_per_s: _Optional[float] = ..., wait_fraction: _Optional[float] = ...) -> None: ...

class TrainerLoad(_message.Message):
    __slots__ = ("step", "held_batch_count", "tokens_per_s", "wait_fraction")
    STEP_FIELD_NUMBER: _ClassVar[int]
    HELD_BATCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_FRACTION_FIELD_NUMBER: _ClassVar[int]
    step: int
    held_batch_count: int
    tokens_per_s: float
    wait_fraction: float
    def __init__(self, step: _Optional[int] = ..., held_batch_count: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., wait_fraction: _Optional[float] = ...) -> None: ...

"""Every core type survives the wire: what is encoded, sent and decoded is what it was.

The pairs are found, not listed: a new `encode_x` with its `decode_x` is tested as it stands.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import astraflow.wire
from astraflow.core.autoscale import ScaleAdvice
from astraflow.core.batches import AckBatch, BatchHeader, BatchPart, RowSource, StreamBatches
from astraflow.core.ids import NOBODY
from astraflow.core.members import JoinPool, ServedPolicy
from astraflow.core.rollouts import (
    LARGEST,
    REWARDED,
    Column,
    ColumnAxis,
    Outcome,
    Payload,
    PayloadColumn,
    Rollout,
    Trajectory,
    spans_of,
)
from astraflow.core.tasks import RolloutTask, SamplingParams, TaskCredit, TaskPurpose, VersionRange
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import PatchInfo, VersionInfo
from astraflow.wire.transfers import ChunkSet
from astraflow.wire.weights import PatchIndex

NUMBERS = st.integers(0, 2**31 - 1)
TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
REALS = st.floats(allow_nan=False, allow_infinity=False)
REWARDS = st.floats(-LARGEST, LARGEST)
JSON = st.dictionaries(TEXTS, st.none() | st.booleans() | NUMBERS | TEXTS, max_size=3)
PRIMITIVES: Mapping[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: NUMBERS,
    float: REALS,
    str: TEXTS,
    bytes: st.binary(max_size=8),
    memoryview: st.binary(max_size=8).map(memoryview),
    datetime: st.datetimes(datetime(1, 1, 1), datetime(9999, 1, 1), timezones=st.just(UTC)),
    timedelta: st.timedeltas(timedelta(), timedelta(days=3650)),
    NoneType: st.none(),
}
NAMED: Mapping[str, st.SearchStrategy[Any]] = {
    # It does not travel.
    "bound": st.none(),
    "content_digest": st.binary(min_size=16, max_size=16),
    "signature": st.just(b"") | st.binary(min_size=64, max_size=64),
    "signing_key": st.just(b"") | st.binary(min_size=32, max_size=32),
    "fields": JSON,
    "options": JSON,
    "scorer_options": JSON,
    "nbytes": st.integers(1, 2**31 - 1),
    "indexes": st.sets(st.integers(0, 9)).map(lambda each: ChunkSet.of(bytes(32), each).indexes),
    "incarnation": st.integers(1, 2**31 - 1),
    "max_outstanding": st.integers(1, 2**31 - 1),
    "delivery_count": st.integers(1, 2**31 - 1),
    "capacity": st.integers(1, 2**31 - 1),
    "groups_per_batch": st.integers(1, 2**31 - 1),
    "max_context_token_count": st.integers(1, 2**31 - 1),
    "model_bytes_per_s": st.floats(1, 1e12),
    "payload_bytes_per_s": st.floats(1, 1e12),
    "whole_bytes_per_s": st.floats(1, 1e12),
}
DIGESTS = st.binary(min_size=32, max_size=32)


@cache
def strategy_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return values of a type."""
    if hint in SPECIAL:
        return SPECIAL[hint]()
    if hint in PRIMITIVES:
        return PRIMITIVES[hint]
    if hasattr(hint, "__supertype__"):
        return strategy_of(hint.__supertype__)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if is_dataclass(hint):
        return built(hint)
    return _generic(get_origin(hint), get_args(hint))


def _generic(origin: Any, parts: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    if origin in (Union, UnionType):
        return st.one_of(*map(strategy_of, parts))
    if origin is tuple:
        return st.lists(strategy_of(parts[0]), max_size=2).map(tuple)
    if origin is frozenset:
        return st.frozensets(strategy_of(parts[0]), max_size=3)
    key, value = parts
    return st.dictionaries(strategy_of(key), strategy_of(value), max_size=2)


def built(kind: Any, **given_fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return instances of a dataclass, every field filled."""
    hints = get_type_hints(kind)
    rest = [field.name for field in fields(kind) if field.init and field.name not in given_fields]
    return st.builds(kind, **{name: _field(name, hints[name]) for name in rest}, **given_fields)


def _field(name: str, hint: Any) -> st.SearchStrategy[Any]:
    if name in NAMED:
        return NAMED[name]
    return DIGESTS if name.endswith("_digest") else strategy_of(hint)


@st.composite
def columns(draw: st.DrawFn, row_count: int = 1, token_count: int = 3) -> Column:
    lengths = {ColumnAxis.ROW: row_count, ColumnAxis.TOKEN: token_count}
    axis = draw(st.sampled_from(ColumnAxis))
    dtype = draw(st.sampled_from([d for d in Dtype if d.numpy != d.bits or d.value[0] == "u"]))
    shape = (lengths[axis], *draw(st.lists(st.integers(0, 3), max_size=1)))
    return Column(
        axis=axis,
        values=np.arange(np.prod(shape)).reshape(shape).astype(dtype.numpy),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    mask = np.array(draw(st.lists(st.booleans(), min_size=1, max_size=6)))
    sampled = int(mask.sum())
    versions = draw(st.lists(st.integers(0, 3), min_size=sampled, max_size=sampled))
    logprobs = np.where(mask, -draw(st.floats(0, 9, width=32)), 0).astype(np.float32)
    drawn = built(
        Trajectory,
        tokens=st.just(np.arange(len(mask), dtype=np.int32)),
        sampled_mask=st.just(mask),
        logprobs=st.just(logprobs),
        version_spans=st.just(spans_of(np.array(versions, np.int64))),
        columns=st.dictionaries(TEXTS, columns(token_count=len(mask)), max_size=2),
        parent_trajectory_id=st.none(),
        branch_offset=st.just(0),
        reward=st.none() | REWARDS,
        payload=st.none() | payloads(len(mask)),
    )
    return draw(drawn)


def chunk_sets() -> st.SearchStrategy[tuple[ChunkSet, ...]]:
    sets = st.lists(strategy_of(ChunkSet), max_size=2, unique_by=lambda each: each.root_digest)
    return sets.map(tuple)


NAMED |= dict.fromkeys(("want_chunks", "have_chunks"), st.deferred(chunk_sets))


def payloads(token_count: int = 1) -> st.SearchStrategy[Payload]:
    return built(
        Payload,
        name=st.from_regex(r"[a-z0-9-]{1,64}", fullmatch=True),
        digest=DIGESTS,
        token_count=st.just(token_count),
        columns=st.lists(built(PayloadColumn, shape=st.just((3,)), name=st.just("own"))).map(tuple),
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    outcome = draw(st.sampled_from(Outcome))
    is_finished = outcome in (Outcome.SCORED, Outcome.TRUNCATED)
    parts = draw(
        st.lists(
            trajectories(), min_size=is_finished, max_size=2, unique_by=lambda t: t.trajectory_id
        )
    )
    failure = st.none() if is_finished else strategy_of(get_type_hints(Rollout)["failure"])
    drawn = built(
        Rollout,
        outcome=st.just(outcome),
        reward=REWARDS if outcome in REWARDED else st.none(),
        failure=failure.filter(lambda each: is_finished or each is not None),
        trajectories=st.just(tuple(parts)),
    )
    return draw(drawn)


@st.composite
def parts(draw: st.DrawFn) -> BatchPart:
    lengths = draw(st.lists(st.integers(1, 3), max_size=3))
    sources = draw(st.just(()) | st.tuples(*[strategy_of(RowSource)] * len(lengths)))
    names = tuple(f"r{i}" for i in range(len(lengths)))
    total = sum(lengths)
    return BatchPart(
        batch_id=draw(TEXTS),
        index=draw(NUMBERS),
        row_offsets=np.cumsum([0, *lengths], dtype=np.int64),
        trajectory_ids=names,
        rollout_ids=names,
        columns={
            "tokens": Column(axis=ColumnAxis.TOKEN, values=np.arange(total, dtype=np.int32)),
            "rewards": Column(axis=ColumnAxis.ROW, values=np.ones(len(lengths), np.float32)),
        },
        sources=sources,
    )


def layouts() -> st.SearchStrategy[Layout]:
    tensor = st.tuples(
        TEXTS, st.sampled_from(Dtype), st.lists(st.integers(0, 4), max_size=3).map(tuple)
    )
    return st.lists(tensor, max_size=4, unique_by=lambda each: each[0]).map(Layout.of)


def tasks() -> st.SearchStrategy[RolloutTask]:
    indexes = st.lists(NUMBERS, min_size=1, max_size=3, unique=True).map(tuple)
    drawn = built(RolloutTask, sample_indexes=indexes, eval_run_id=st.just("e1"))
    is_eval = TaskPurpose.EVAL
    return drawn.map(lambda t: t if t.purpose is is_eval else replace(t, eval_run_id=None))


def sampling() -> st.SearchStrategy[SamplingParams]:
    return built(
        SamplingParams,
        temperature=st.floats(0, 2),
        top_p=st.floats(0.01, 1),
        min_p=st.floats(0, 0.99),
        top_k=st.none() | st.integers(1, 99),
        repetition_penalty=st.floats(0.1, 2),
        seed=st.none() | st.integers(0, 2**63 - 1),
        # Wishes of an agent for one completion; they stay with the node.
        grammar=st.none(),
        top_logprobs=st.just(0),
    )


def patches(version: int) -> st.SearchStrategy[PatchInfo]:
    return built(
        PatchInfo,
        version=st.just(version),
        base_version=st.none() | st.integers(0, version - 1),
        shard_rank=st.just(1),
        shard_count=st.just(2),
    )


@st.composite
def indexes(draw: st.DrawFn) -> PatchIndex:
    digests = draw(st.lists(DIGESTS, max_size=2).map(tuple))
    patch = replace(draw(patches(5)), chunk_count=len(digests))
    return PatchIndex(patch=patch, chunk_digests=digests, shared_tables=draw(PRIMITIVES[bytes]))


def versions() -> st.SearchStrategy[VersionInfo]:
    return built(
        VersionInfo, version=st.just(7), patches=st.lists(patches(7), max_size=2).map(tuple)
    )


def ranges() -> st.SearchStrategy[VersionRange]:
    low, high = st.none() | st.integers(0, 5), st.none() | st.integers(5, 9)
    return st.builds(VersionRange, min=low, max=high)


def shares(kind: Any, **more: Any) -> Callable[[], st.SearchStrategy[Any]]:
    return lambda: built(kind, rank=st.integers(0, 3), world_size=st.integers(4, 8), **more)


@st.composite
def advices(draw: st.DrawFn) -> ScaleAdvice:
    """Without the hub's own measures, which are not on the wire."""
    drawn = draw(built(ScaleAdvice, retired=st.just(frozenset())))
    members = {member.member_id: member for member in drawn.members}
    balance = replace(
        drawn.balance,
        accelerator_count=float(drawn.accelerator_count),
        token_rate=0.0,
        full_token_rate=0.0,
        used_token_rate=0.0,
    )
    retired = draw(st.frozensets(st.sampled_from([*members]))) if members else frozenset()
    return replace(drawn, balance=balance, members=tuple(members.values()), retired=retired)


SPECIAL: Mapping[Any, Callable[[], st.SearchStrategy[Any]]] = {
    Column: columns,
    Trajectory: trajectories,
    Payload: payloads,
    Rollout: rollouts,
    BatchPart: parts,
    Layout: layouts,
    RolloutTask: tasks,
    SamplingParams: sampling,
    PatchInfo: lambda: patches(5),
    PatchIndex: indexes,
    VersionInfo: versions,
    VersionRange: ranges,
    JoinPool: lambda: built(JoinPool, policies=st.tuples(built(ServedPolicy))),
    BatchHeader: shares(BatchHeader),
    ScaleAdvice: advices,
    # On the wire the call's session says who; an ack's seconds are there to the microsecond.
    StreamBatches: shares(StreamBatches, member_id=st.just(NOBODY)),
    TaskCredit: lambda: built(TaskCredit, member_id=st.just(NOBODY)),
    AckBatch: lambda: built(
        AckBatch, member_id=st.just(NOBODY), wait_s=st.just(0.25), train_s=st.just(0.0)
    ),
}


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal, arrays and dataclasses inside included."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if is_dataclass(left):
        # The arrays of a trajectory may be elsewhere, and a value has come in a message or not.
        names = [f.name for f in fields(left) if hasattr(left, f.name) and f.name != "received"]
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in names
        )
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def pairs() -> list[Any]:
    """Return (encode, decode, core type) of every pair in wire/."""
    found: dict[str, Any] = {}
    for module in pkgutil.iter_modules(astraflow.wire.__path__):
        names = vars(importlib.import_module(f"astraflow.wire.{module.name}"))
        for name, decode in names.items():
            encode = names.get(name.replace("decode_", "encode_"))
            if not name.startswith("decode_") or encode is None:
                continue
            kind = get_type_hints(decode)["return"]
            if len(inspect.signature(decode).parameters) == 1:
                found[name] = pytest.param(encode, decode, kind, id=name.removeprefix("decode_"))
    return list(found.values())


def test_every_file_has_pairs():
    assert len(pairs()) > 40


@pytest.mark.parametrize(("encode", "decode", "kind"), pairs())
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_is_sent_is_what_arrives(encode, decode, kind, data):
    value = data.draw(strategy_of(kind))

    message = encode(value)
    if hasattr(message, "SerializeToString"):
        message = type(message).FromString(message.SerializeToString())

    assert same(value, decode(message))

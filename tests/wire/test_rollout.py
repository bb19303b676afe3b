from bisect import bisect_left
from dataclasses import fields, is_dataclass, replace
from random import Random

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from astraflow.core.batches import BatchPart, RowSource
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.rollouts import (
    ROUTED_EXPERTS,
    FinishReason,
    Trajectory,
    VersionSpan,
)
from astraflow.wire import rollout as rollout_module
from astraflow.wire._rollouts import fits, scan, split
from astraflow.wire.fields import encode_tensor, varint
from astraflow.wire.rollout import (
    batch_part_pieces,
    decode_rollout,
    decode_trajectory,
    encode_rollout,
    fits_in_python,
    read_items,
    read_rollout,
)
from astraflow_proto.dataflow.v1 import raas_service_pb2
from astraflow_proto.rollout.v1 import batch_pb2, column_pb2, rollout_pb2, trajectory_pb2
from made_up import made_up_rollout


def refused(reason, message):
    return pytest.raises(AstraflowError, match=f"{reason}: .*{message}")


@pytest.fixture
def message() -> rollout_pb2.Rollout:
    trajectory = Trajectory(
        trajectory_id="t1",
        policy_id="solver",
        tokens=np.array([5, 6, 7], np.int32),
        sampled_mask=np.array([False, True, True]),
        logprobs=np.array([0, -1, -2], np.float32),
        version_spans=(VersionSpan(version=3, length=2),),
        finish_reason=FinishReason.STOP,
    )
    return encode_rollout(made_up_rollout(trajectory))


class TestRollout:
    def test_carries_the_oldest_version_of_each_policy(self, message):
        assert dict(message.policy_versions) == {"solver": 3}

    def test_a_reward_of_0_is_a_reward(self, message):
        message.reward = 0.0

        assert decode_rollout(message).reward == 0.0

    def test_no_reward_is_none(self, message):
        message.outcome = rollout_pb2.OUTCOME_TRUNCATED
        message.ClearField("reward")

        assert decode_rollout(message).reward is None

    def test_a_token_without_a_version_is_refused(self, message):
        message.trajectories[0].version_spans[0].length = 1

        with refused(Reason.ROLLOUT_INVALID, "do not cover"):
            decode_rollout(message)

    @pytest.mark.parametrize("reward", [float("nan"), float("inf"), -1e39])
    def test_a_reward_is_a_number_that_trainers_can_have(self, message, reward):
        message.trajectories[0].reward = reward
        with refused(Reason.ROLLOUT_INVALID, "reward"):
            decode_rollout(message)
        message.trajectories[0].ClearField("reward")
        message.reward = reward
        with refused(Reason.ROLLOUT_INVALID, "reward"):
            decode_rollout(message)

    @pytest.mark.parametrize("name", ["token_rewards", "loss_weights"])
    @pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e39])
    def test_numbers_of_a_loss_are_finite(self, message, name, value):
        column = message.trajectories[0].columns[name]
        column.axis = column_pb2.COLUMN_AXIS_TOKEN
        column.tensor.CopyFrom(encode_tensor(np.array([0, 1, value])))
        with refused(Reason.ROLLOUT_INVALID, f"column {name} has numbers that are not finite"):
            decode_rollout(message)

    @pytest.mark.parametrize("name", ["token_rewards", "loss_weights"])
    @pytest.mark.parametrize("shape", [(1,), (3, 2)])
    def test_numbers_of_a_loss_are_one_per_token(self, message, name, shape):
        column = message.trajectories[0].columns[name]
        is_row = shape == (1,)
        column.axis = column_pb2.COLUMN_AXIS_ROW if is_row else column_pb2.COLUMN_AXIS_TOKEN
        column.tensor.CopyFrom(encode_tensor(np.ones(shape, np.float32)))
        with refused(Reason.ROLLOUT_INVALID, f"column {name} is not one number per token"):
            decode_rollout(message)

    def test_a_failure_with_a_reward_is_refused(self, message):
        message.outcome = rollout_pb2.OUTCOME_INFRA_ERROR

        with refused(Reason.ROLLOUT_INVALID, "has no reward"):
            decode_rollout(message)

    def test_64_bit_tokens_are_refused(self, message):
        tokens = encode_tensor(np.array([5, 6, 7]))
        message.trajectories[0].tokens.CopyFrom(tokens)

        with refused(Reason.INVALID_FIELD, "tokens"):
            decode_rollout(message)

    @pytest.mark.parametrize("field", ["rollout_id", "task_id", "group_id", "outcome"])
    def test_what_it_needs_must_be_there(self, message, field):
        message.ClearField(field)

        with refused(Reason.INVALID_FIELD, field) as caught:
            decode_rollout(message)

        assert caught.value.metadata == {"field": field}

    @pytest.mark.parametrize(
        ("values", "fault"),
        [
            (np.zeros((2, 1, 2), np.uint16), "one entry per token"),
            (np.zeros((3, 1, 2), np.int32), "u16"),
            (np.zeros((3, 2), np.uint16), "layers, k"),
        ],
    )
    def test_routes_of_another_shape_are_refused(self, message, values, fault):
        column = message.trajectories[0].columns[ROUTED_EXPERTS]
        column.axis = column_pb2.COLUMN_AXIS_TOKEN
        column.tensor.CopyFrom(encode_tensor(values))

        with refused(Reason.ROLLOUT_INVALID, fault):
            decode_rollout(message)

    def test_routes_of_a_row_are_refused(self, message):
        column = message.trajectories[0].columns[ROUTED_EXPERTS]
        column.axis = column_pb2.COLUMN_AXIS_ROW
        column.tensor.CopyFrom(encode_tensor(np.zeros((1, 1, 2), np.uint16)))

        with refused(Reason.ROLLOUT_INVALID, "u16"):
            decode_rollout(message)


class TestScan:
    """The reader in C says what protobuf's classes say, or leaves it to them."""

    @pytest.fixture
    def full(self, message) -> rollout_pb2.Rollout:
        message.reward_parts["format"] = 0.5
        message.metrics["turns"] = -3.0
        message.reward_code_digest = b"digest"
        message.traceparent = "00-trace"
        message.start_time.FromNanoseconds(1_234_567_890_123_456_789)
        message.finish_time.FromNanoseconds(1_234_567_891_000_000_000)
        (first,) = message.trajectories
        first.agent, first.engine, first.reward = "writer", "embedded", 0.25
        first.sampling.temperature = 0.5
        first.sampling.stop_token_ids.extend([2, 3])
        branch = message.trajectories.add()
        branch.CopyFrom(first)
        branch.trajectory_id, branch.parent_trajectory_id = "t2", "t1"
        branch.branch_offset, branch.segment_index = 1, 1
        branch.version_spans[0].policy_id = "other"
        branch.version_spans[0].kv = trajectory_pb2.KV_POLICY_KEEP
        long = message.trajectories.add()
        long.CopyFrom(first)
        for name in ("tokens", "sampled_mask", "logprobs"):
            long.ClearField(name)
        long.trajectory_id = "t3"
        long.payload.name, long.payload.digest = "a-1", bytes(range(32))
        long.payload.nbytes, long.payload.token_count = 1 << 40, 1 << 20
        return message

    def test_usual_ones_are_read_by_it(self, message, full):
        assert scan(message.SerializeToString()) is not None
        assert scan(full.SerializeToString()) is not None
        assert scan(b"") is None

    def test_columns_of_a_payload_are_left(self, full):
        full.trajectories[2].payload.columns.add(name="own", axis=1, dtype=1)
        assert scan(full.SerializeToString()) is None
        (*_, long) = decode_rollout(full).trajectories
        assert [each.name for each in long.payload.columns] == ["own"]

    def test_arrays_beside_a_payload_are_refused(self, full):
        full.trajectories[2].tokens.CopyFrom(full.trajectories[0].tokens)
        with refused(Reason.INVALID_FIELD, "here or there"):
            decode_rollout(full)

    def test_columns_and_failures_are_left(self, message):
        message.failure.message = "why"
        assert scan(message.SerializeToString()) is None

    def test_arrays_lie_over_the_bytes(self, message):
        data = message.SerializeToString()
        (trajectory,) = read_rollout(data)[0].trajectories
        assert trajectory.tokens.base is data
        assert not trajectory.tokens.flags.writeable

    def test_a_trajectory_is_passed_on_as_it_came(self, full):
        came = read_rollout(full.SerializeToString())[0].trajectories
        assert [_passed_on(each) for each in came] == [
            each.SerializeToString() for each in full.trajectories
        ]

    def test_a_copy_with_other_values_is_no_longer_what_came(self, full):
        came = read_rollout(full.SerializeToString())[0].trajectories[0]
        copy = replace(came, reward=0.75)
        assert came.received is not None
        assert copy.received is None
        assert trajectory_pb2.Trajectory.FromString(_passed_on(copy)).reward == 0.75

    @pytest.mark.parametrize("byte_count", [1, 2, 4, 5, 8])
    @pytest.mark.parametrize("place", ["tag", "length"])
    def test_numbers_in_more_bytes_than_needed_are_read_alike(self, message, place, byte_count):
        data = message.SerializeToString()
        at = 0 if place == "tag" else 1
        # Rollout.rollout_id comes first; zeros follow the seven bits that say something.
        more = bytes([data[at] | 0x80, *[0x80] * (byte_count - 1), 0])
        data = data[:at] + more + data[at + 1 :]
        try:
            known = _plain(decode_rollout(rollout_pb2.Rollout.FromString(data)))
        except DecodeError:
            with refused(Reason.INVALID_FIELD, "rollout"):
                read_rollout(data)
            return
        assert _plain(read_rollout(data)[0]) == known

    @pytest.mark.parametrize("seed", range(8))
    def test_changed_bytes_are_read_alike(self, full, monkeypatch, seed):
        whole, dice = full.SerializeToString(), Random(seed)
        both = 0
        for _ in range(500):
            data = _changed(whole, dice)
            try:
                rollout_pb2.Rollout.FromString(data)
            except DecodeError:
                # What is passed on has to be readable.
                with refused(Reason.INVALID_FIELD, "rollout|sampling"):
                    read_rollout(data)
                continue
            both += scan(data) is not None
            read = _said(data)
            monkeypatch.setattr(rollout_module, "scan", None)
            assert read == _said(data), data
            monkeypatch.undo()
            for trajectory in _trajectories(data):
                sent = trajectory_pb2.Trajectory.FromString(_passed_on(trajectory))
                assert _plain(decode_trajectory(sent)) == _plain(trajectory), data
        assert both > 20


class TestItems:
    """Messages of a node are taken apart without protobuf's classes, or left to them."""

    @pytest.fixture
    def sent(self, message) -> raas_service_pb2.StreamRolloutsRequest:
        request = raas_service_pb2.StreamRolloutsRequest()
        request.items.add(rollout=message)
        request.items.add(result=rollout_pb2.TaskResult(task_id="task", rollout_count=1))
        request.items.add(rollout=message)
        return request

    def test_each_item_comes_as_its_bytes(self, sent, message):
        data = sent.SerializeToString()
        assert split(data) is not None
        assert read_items(data) == [
            (True, message.SerializeToString()),
            (False, sent.items[1].result.SerializeToString()),
            (True, message.SerializeToString()),
        ]

    def test_an_item_of_nothing_has_no_name(self):
        data = raas_service_pb2.StreamRolloutsRequest(
            items=[raas_service_pb2.RolloutItem()]
        ).SerializeToString()
        assert split(data) is None
        assert read_items(data) == [(False, b"")]

    @pytest.mark.parametrize("seed", range(4))
    def test_changed_bytes_are_taken_apart_alike(self, sent, monkeypatch, seed):
        whole, dice = sent.SerializeToString(), Random(seed)
        both = 0
        for _ in range(500):
            data = _changed(whole, dice)
            try:
                monkeypatch.setattr(rollout_module, "split", None)
                known = read_items(data)
            except AstraflowError:
                known = None
            monkeypatch.undo()
            both += split(data) is not None
            try:
                found = [_item_said(*item) for item in read_items(data)]
            except AstraflowError:
                found = None
            # What protobuf's classes refuse as a whole may be refused by its item.
            assert found is None or known is None or found == [_item_said(*item) for item in known]
            assert known is not None or found is None or None in found
        assert both > 20


class TestSizes:
    """What takes a hundred times its bytes in objects is refused before any is made."""

    @pytest.fixture(params=["C", "Python"])
    def reader(self, request, monkeypatch):
        if request.param == "Python":
            monkeypatch.setattr(rollout_module, "fits", None)

    @pytest.mark.usefixtures("reader")
    @pytest.mark.parametrize("place", ["items", "trajectories", "version_spans", "columns"])
    def test_millions_of_empty_parts_are_refused(self, place):
        match place:
            case "items":
                data = b"\x0a\x02\x0a\x00" * (2 << 20)
            case "trajectories":
                data = _field(1, _field(1, b"\x52\x00" * (3 << 20)))
            case "version_spans":
                data = _field(1, _field(1, _field(10, b"\x3a\x00" * (3 << 20))))
            case _:
                data = _field(1, _field(1, _field(10, b"\x72\x02\x0a\x00" * (2 << 20))))

        with refused(Reason.MESSAGE_TOO_LARGE, "2097152 bytes beside"):
            read_items(data)

    @pytest.mark.usefixtures("reader")
    def test_arrays_may_be_as_large_as_messages(self, message):
        (trajectory,) = message.trajectories
        trajectory.tokens.CopyFrom(encode_tensor(np.zeros(1 << 20, np.int32)))
        trajectory.columns["own"].tensor.CopyFrom(encode_tensor(np.zeros(1 << 20)))
        request = raas_service_pb2.StreamRolloutsRequest()
        request.items.add(rollout=message)

        assert len(read_items(request.SerializeToString())) == 1

    @pytest.mark.parametrize("seed", range(4))
    def test_changed_bytes_are_measured_alike(self, message, seed):
        column = message.trajectories[0].columns["own"]
        column.tensor.CopyFrom(encode_tensor(np.zeros((3, 2))))
        request = raas_service_pb2.StreamRolloutsRequest()
        request.items.add(rollout=message)
        request.items.add(result=rollout_pb2.TaskResult(task_id="task", rollout_count=1))
        whole, dice = request.SerializeToString(), Random(seed)
        # tokens i32, logprobs f32 and sampled_mask bool; f64 in the column.
        assert _least(fits, whole) == len(whole) - 3 * 9 - 6 * 8
        for _ in range(300):
            data = _changed(whole, dice)
            assert _least(fits, data) == _least(fits_in_python, data), data


def _field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def _least(fits, data: bytes) -> int:
    """Return how many bytes a message has beside its arrays."""
    return bisect_left(range(len(data)), True, key=lambda most: fits(data, most))


def _item_said(is_rollout: bool, data: bytes) -> bytes | None:
    kind = rollout_pb2.Rollout if is_rollout else rollout_pb2.TaskResult
    try:
        return kind.FromString(data).SerializeToString(deterministic=True)
    except DecodeError:
        return None


def _passed_on(trajectory: Trajectory) -> bytes:
    source = RowSource(trajectory=trajectory, advantage=0.0)
    part = BatchPart(
        batch_id="b1",
        index=0,
        row_offsets=np.array([0, 3]),
        trajectory_ids=("t",),
        rollout_ids=("r",),
        columns={},
        sources=(source,),
    )
    message = batch_pb2.BatchPart.FromString(b"".join(batch_part_pieces(part)))
    return message.sources[0].trajectory.SerializeToString()


def _trajectories(data: bytes) -> tuple[Trajectory, ...]:
    try:
        return read_rollout(data)[0].trajectories
    except AstraflowError:
        return ()


def _changed(data: bytes, dice: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 4))):
        place = dice.randrange(len(changed))
        match dice.randrange(4):
            case 0:
                changed[place] = dice.randrange(256)
            case 1:
                changed[place] ^= 1 << dice.randrange(8)
            case 2:
                del changed[place : place + dice.randrange(1, 4)]
            case _:
                changed[place:place] = changed[: dice.randrange(1, 40)]
    return bytes(changed)


def _said(data: bytes) -> object:
    try:
        return _plain(read_rollout(data)[0])
    except AstraflowError as error:
        return error.reason, error.message


def _plain(value: object) -> object:
    if is_dataclass(value):
        return [
            _plain(getattr(value, each.name, None))
            for each in fields(value)
            if each.name != "received"
        ]
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    return [*map(_plain, value)] if isinstance(value, tuple) else repr(value)

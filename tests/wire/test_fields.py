from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype
from astraflow.wire.fields import (
    DTYPES,
    decode_json,
    decode_span,
    decode_tensor,
    decode_time,
    decode_vector,
    encode_json,
    encode_tensor,
    encode_time,
)
from astraflow_proto.common.v1 import tensor_pb2

KINDS = ["?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"]


def refused(message):
    return pytest.raises(AstraflowError, match=message)


class TestTensor:
    @given(data=st.data(), kind=st.sampled_from(KINDS))
    def test_keeps_bits_and_shape(self, data, kind):
        shape = data.draw(arrays.array_shapes(min_dims=0, min_side=0))
        values = data.draw(arrays.arrays(kind, shape))

        decoded = decode_tensor(encode_tensor(values))

        assert decoded.dtype == values.dtype
        assert decoded.shape == values.shape
        assert decoded.tobytes() == values.tobytes()

    def test_is_row_major_and_little_endian_whatever_it_was(self):
        values = np.arange(6, dtype=">i4").reshape(2, 3).T

        message = encode_tensor(values)

        assert message.data == np.array([[0, 3], [1, 4], [2, 5]], "<i4").tobytes()
        assert list(message.shape) == [3, 2]

    def test_is_not_copied_when_read(self):
        decoded = decode_tensor(encode_tensor(np.arange(4)))

        assert not decoded.flags.owndata
        assert not decoded.flags.writeable

    def test_bf16_comes_as_its_bits(self):
        message = tensor_pb2.Tensor(
            dtype=DTYPES.encode(Dtype.BF16), shape=[2], data=b"\x80\x3f\x00\x40"
        )

        assert decode_tensor(message).tolist() == [0x3F80, 0x4000]

    @pytest.mark.parametrize("shape", [[3], [2, 2], [-1], [-1, -2], [2**62, 4]])
    def test_size_must_be_that_of_the_shape(self, shape):
        message = tensor_pb2.Tensor(dtype=DTYPES.encode(Dtype.I32), shape=shape, data=b"12345678")

        with refused("8 bytes are no i32") as caught:
            decode_tensor(message, "tokens")

        assert caught.value.reason is Reason.INVALID_FIELD
        assert caught.value.metadata == {"field": "tokens"}

    def test_a_shape_of_thousands_of_axes_is_not_multiplied(self):
        """The product of a megabyte of them took hours."""
        message = tensor_pb2.Tensor(dtype=DTYPES.encode(Dtype.I32), shape=[2**62] * 3000)

        with pytest.raises(AstraflowError, match="no array has 3000 axes"):
            decode_tensor(message)

    @pytest.mark.parametrize(("shape", "data"), [([0, 2**62, 2**62], b""), ([1] * 65, b"1234")])
    def test_shape_must_be_one_that_an_array_can_have(self, shape, data):
        message = tensor_pb2.Tensor(dtype=DTYPES.encode(Dtype.I32), shape=shape, data=data)

        with refused("no array has") as caught:
            decode_tensor(message, "routes")

        assert caught.value.metadata == {"field": "routes"}

    def test_dtype_must_be_given(self):
        with refused("is no dtype"):
            decode_tensor(tensor_pb2.Tensor(shape=[0]))

    def test_bool_is_0_or_1(self):
        message = tensor_pb2.Tensor(dtype=DTYPES.encode(Dtype.BOOL), shape=[2], data=b"\x01\x02")

        with refused("neither 0 nor 1"):
            decode_tensor(message)

    def test_objects_do_not_travel(self):
        with refused("does not travel"):
            encode_tensor(np.array([{}]))

    @pytest.mark.parametrize("values", [np.zeros(2, np.int64), np.zeros((1, 2), np.int32)])
    def test_vector_has_one_dimension_and_its_dtype(self, values):
        with refused(r"tokens: must be i32\[n\]"):
            decode_vector(encode_tensor(values), Dtype.I32, "tokens")


class TestTime:
    def test_is_utc_wherever_it_was_taken(self):
        taken = datetime(2026, 1, 2, 3, 4, 5, 6, timezone(timedelta(hours=5)))

        decoded = decode_time(encode_time(taken))

        assert decoded == taken
        assert decoded.tzinfo is UTC

    def test_beyond_the_calendar_is_refused(self):
        with refused("time"):
            decode_time(Timestamp(seconds=2**60))

    def test_span_beyond_the_calendar_is_refused(self):
        with refused("duration"):
            decode_span(Duration(seconds=2**60))


class TestJson:
    def test_empty_takes_no_bytes(self):
        assert encode_json({}) == b""
        assert decode_json(b"", "options") == {}

    @pytest.mark.parametrize(
        "data", [b"[1]", b"3", b"{", b"\xff", b'{"a":1} x', b'{"a":' + 100_000 * b"["]
    )
    def test_anything_but_an_object_is_refused(self, data):
        with refused("options") as caught:
            decode_json(data, "options")

        assert caught.value.metadata == {"field": "options"}

import struct

import pytest
from blake3 import blake3

from astraflow.core.errors import AstraflowError
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import CodecProfile, PatchInfo, VersionInfo
from astraflow.wire.versions import (
    decode_version_info,
    decode_version_report,
    encode_version_info,
)
from astraflow.wire.weights import chunk_digest, decode_layout, encode_layout, layout_digest
from astraflow_proto.common.v1 import tensor_pb2
from astraflow_proto.weights.v1 import patch_pb2
from astraflow_proto.weights.v1.version_service_pb2 import ReportVersionRequest


def canonical(message) -> bytes:
    """The rule of layout.proto, followed field by field for any message."""
    return b"".join(_field(message, field) for field in message.DESCRIPTOR.fields)


def _field(message, field) -> bytes:
    value = getattr(message, field.name)
    if field.is_repeated:
        return struct.pack("<q", len(value)) + b"".join(_value(each) for each in value)
    if field.has_presence:
        is_set = message.HasField(field.name)
        return struct.pack("<q", is_set) + (_value(value) if is_set else b"")
    return _value(value)


def _value(value) -> bytes:
    match value:
        case int():
            return struct.pack("<q", value)
        case str():
            return _value(value.encode())
        case bytes():
            return struct.pack("<q", len(value)) + value
        case _:
            return canonical(value)


@pytest.fixture
def layout() -> Layout:
    return Layout.of(
        [
            ("lm_head.weight", Dtype.BF16, (3, 5)),
            ("norm.weight", Dtype.F32, ()),
            ("ä", Dtype.U8, (0,)),
        ]
    )


def version_info(**fields):
    patch = PatchInfo(
        base_version=6,
        version=7,
        profile=CodecProfile.FAST,
        codec_version=1,
        root_digest=bytes(32),
        chunk_count=1,
        payload_nbytes=10,
    )
    return encode_version_info(
        VersionInfo(
            policy_id="solver",
            version=7,
            layout_digest=bytes(32),
            content_digest=bytes(16),
            patches=(patch,),
            **fields,
        )
    )


class TestDigests:
    def test_layout_digest_is_that_of_the_canonical_form(self, layout):
        assert layout_digest(layout) == blake3(canonical(encode_layout(layout))).digest()

    def test_chunk_digest_is_that_of_the_canonical_form(self):
        header = patch_pb2.ChunkHeader(
            index=3,
            offset=64,
            nbytes=128,
            dtype=tensor_pb2.DTYPE_BF16,
            encoding=patch_pb2.ENCODING_SPARSE_FAST,
            compression=patch_pb2.COMPRESSION_ZSTD,
            payload_nbytes=5,
            changed_count=2,
        )

        expected = blake3(canonical(header) + _value(b"bytes")).digest()

        assert chunk_digest(header, b"bytes") == expected
        assert chunk_digest(header, memoryview(b"bytes")) == expected


class TestLayout:
    def test_a_size_that_the_shape_does_not_give_is_refused(self, layout):
        message = encode_layout(layout)
        message.tensors[0].nbytes += 1

        with pytest.raises(AstraflowError, match=r"lm_head.weight has 30, not 31"):
            decode_layout(message)

    def test_tensors_that_overlap_are_refused(self, layout):
        message = encode_layout(layout)
        message.tensors[1].offset = 0

        with pytest.raises(AstraflowError, match="overlaps"):
            decode_layout(message)


class TestVersionReport:
    def test_a_number_that_is_no_state_is_refused_by_its_field(self):
        message = ReportVersionRequest(policy_id="solver", version=1)

        with pytest.raises(AstraflowError, match="0 is no version_state") as caught:
            decode_version_report(message)

        assert caught.value.metadata == {"field": "state"}


class TestVersionInfo:
    @pytest.mark.parametrize(
        "field", ["layout_digest", "content_digest", "scrub_digest", "policy_id"]
    )
    def test_a_digest_of_another_size_or_no_policy_is_refused(self, field):
        message = version_info()
        setattr(message, field, "" if field == "policy_id" else b"short")

        with pytest.raises(AstraflowError, match=field):
            decode_version_info(message)

    def test_a_patch_that_leads_elsewhere_is_refused(self):
        message = version_info()
        message.patches[0].version = 8

        with pytest.raises(AstraflowError, match="does not lead to version 7"):
            decode_version_info(message)

    def test_a_base_that_is_not_older_is_refused(self):
        message = version_info()
        message.patches[0].base_version = 7

        with pytest.raises(AstraflowError, match="not older"):
            decode_version_info(message)

    def test_base_0_is_not_from_nothing(self):
        message = version_info()
        message.patches[0].base_version = 0

        assert decode_version_info(message).patches[0].base_version == 0

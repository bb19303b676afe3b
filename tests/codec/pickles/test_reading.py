"""Bodies that peers pickle are read; everything else is refused before it costs anything."""

import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch

from astraflow.codec.pickles import read_pickle
from astraflow.core.errors import AstraflowError, Reason

PROTOCOLS = range(6)


def refusal(body, **limits):
    with pytest.raises(AstraflowError) as caught:
        read_pickle(body, **limits)
    assert caught.value.reason is Reason.INVALID_FIELD
    return caught.value.message


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_data_comes_as_it_is(protocol):
    value = {
        "whole": [0, -1, 255, 1 << 20, 1 << 40, -(1 << 40)],
        "rest": (1.5, None, True, False, "text", "ä\n€", b"bytes", b"", ()),
        "ordered": OrderedDict(a={}, b=[]),
        3: "x" * 300,
    }
    assert read_pickle(pickle.dumps(value, protocol=protocol)) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", ["?", "i1", "i2", "i4", "i8", "u1", "f2", "f4", "f8"])
def test_arrays_come_bit_by_bit(protocol, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    for given in (array, array.T, array[:0], array[1, 1]):
        read = read_pickle(pickle.dumps({"a": given}, protocol=protocol))["a"]
        assert np.array_equal(read, given)
        assert not isinstance(read, np.ndarray) or read.dtype == given.dtype


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("name", ["bool", "int32", "int64", "uint8", "float16", "float32"])
def test_tensors_come_as_arrays(protocol, name):
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    for given in (tensor, tensor.T, tensor[1:], tensor[:0], tensor[0, 1], tensor[:1].expand(4, 3)):
        read = read_pickle(pickle.dumps([given], protocol=protocol))[0]
        assert read.dtype.name == name
        assert np.array_equal(read, given.numpy())


def test_bf16_comes_as_f32():
    tensor = torch.tensor([1.0, -2.5, float("inf")], dtype=torch.bfloat16)
    assert read_pickle(pickle.dumps(tensor)).tolist() == tensor.tolist()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"(S'true'\nt.", "makes what is no plain data"),
        (b"cos\nsystem\n(Vtrue\ntR.", "names os.system"),
        (b"\x8c\x02os\x8c\x06system\x93.", "names os.system"),
        (b"cbuiltins\neval\n(V1\ntR.", "names builtins.eval"),
        (b"(Vtrue\nios\nsystem\n.", "makes what is no plain data"),
        (b"cnumpy\nndarray\n(K\x01tR.", "calls a class"),
        (b"cnumpy\nndarray\n.", "is a Symbol"),
        (b"ctorch.storage\n_load_from_bytes\n.", "is a Symbol"),
        (b"P1\n.", "makes what is no plain data"),
        (b"NQ.", "persistent ids"),
        (b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "not well formed"),
        (b"X\x10\x00\x00\x00abc.", "not well formed"),
        (b"\x8b\xff\xff\xff\x7f.", "not well formed"),
        (b"\x8b\x11\x00\x00\x00" + b"a" * 17 + b".", "more than 16 bytes"),
        (b"I" + b"9" * 5000 + b"\n.", "not well formed"),
        (b"I" + b"9" * 40 + b"\n.", "more than 16 bytes"),
        (b"V" + b"a" * (1 << 20) + b"\n.", "not well formed"),
        (b"]q\x00h\x00a.", "values within values"),
        (b"}(K\x01K\x01\x86Nu.", "key of a dict"),
        (b"h\x07.", "not well formed"),
        (b"Np%d\n." % (1 << 61), "can be made to collide"),
        (b"c\\d\n\\q\n.", "refused"),
        (b"t.", "not well formed"),
        (b".", "not well formed"),
        (b"R.", "where there is none"),
        (b"N.N", "1 bytes follow its end"),
        (b"\x80\x06N.", "protocol after 5"),
        (b"N", "has no end"),
        (b"", "has no end"),
    ],
)
def test_anything_else_is_refused(body, why):
    assert why in refusal(body)


def test_a_value_that_doubles_in_every_step_is_refused():
    assert "values within values" in refusal(b"]" + b"q\x00h\x00h\x00\x86" * 40 + b".")


def test_what_was_remembered_is_not_copied_for_ever():
    text = b"X\x00\x10\x00\x00" + b"a" * 4096
    again = b"c_codecs\nencode\n(h\x00Vlatin1\ntR0"
    assert "4 times its size" in refusal(text + b"q\x00" + again * 200 + b".")


def test_steps_are_bounded():
    assert "too many instructions" in refusal(b"]" * 20 + b".", step_count=10)


def torch_file(*, key=b"X\x01\x00\x00\x000", keys=b"X\x01\x00\x00\x000", before=b""):
    """Return a storage of no elements, as bytes of a body under 0 and what reads them under 1."""
    head = b"".join(pickle.dumps(each, protocol=2) for each in (0x1950A86A20F9469CFC6C, 1001))
    about = pickle.dumps({"little_endian": True}, protocol=2)
    described = b"(X\x07\x00\x00\x00storagectorch\nIntStorage\n" + key + b"NK\x00NtQ."
    raw = before + head + about + described + b"](" + keys + b"e." + bytes(8)
    sent = b"B" + len(raw).to_bytes(4, "little") + raw + b"q\x00"
    return sent + b"ctorch.storage\n_load_from_bytes\nq\x01"


def test_lines_are_paid_for_whenever_they_are_read():
    """A file of torch is written once, and may be read a million times."""
    body = torch_file(before=b"F" + b"1" * 10_000 + b"\n0")
    assert read_pickle(body + b"h\x01h\x00\x85R0N.") is None
    assert "4 times its size" in refusal(body + b"h\x01h\x00\x85R0" * 10 + b"N.")


def test_keys_that_double_in_every_step_are_not_compared():
    doubled = b"]" + b"q\x00h\x00h\x00\x86" * 60
    body = torch_file(key=doubled, keys=doubled)
    assert "no file of torch" in refusal(body + b"h\x01h\x00\x85R.")


@pytest.mark.parametrize("code", [b"R", b"b"])
def test_many_arguments_are_not_passed_a_million_times(code):
    made = b"cnumpy._core.multiarray\n_reconstruct\n"
    body = made + b"(" + b"N" * 17 + b"tR." if code == b"R" else made + b")R(" + b"N" * 17 + b"tb."
    assert "no arguments" in refusal(body)


def test_an_array_larger_than_its_bytes_is_refused_before_it_is_made():
    body = pickle.dumps(np.zeros(3, np.float32), protocol=4)
    assert "has 12 bytes" in refusal(body.replace(b"K\x03\x85", b"J\xff\xff\xff\x7f\x85"))


def test_a_tensor_that_reaches_over_its_storage_is_refused():
    body = pickle.dumps(torch.zeros(3), protocol=4)
    assert "reaches element" in refusal(body.replace(b"K\x00K\x03\x85", b"K\x01K\x03\x85"))


def test_a_storage_with_other_bytes_than_it_says_is_refused():
    body = pickle.dumps(torch.zeros(3), protocol=4)
    assert "a storage of 4 elements" in refusal(body.replace(b"K\x03Nt", b"K\x04Nt"))


def test_an_array_of_objects_is_refused():
    assert "neither of numbers" in refusal(pickle.dumps(np.array([{}], object)))

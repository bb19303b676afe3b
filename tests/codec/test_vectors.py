"""The committed vectors are what this codec writes, and it reads them."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from astraflow.codec.chunks import CODEC_VERSION, Chunk, ChunkHeader, Encoding
from astraflow.codec.decode import decode_change, decode_whole
from astraflow.core.tensors import Dtype

ROOT = Path(__file__).parent.parent.parent
VECTORS = sorted((Path(__file__).parent / "vectors").glob("*.json"))


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location(
        "make_codec_vectors", ROOT / "scripts" / "make_codec_vectors.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_vectors_are_those_that_are_written(maker, level):
    written = maker.files()

    assert sorted(written) == [path.name for path in VECTORS]
    for path in VECTORS:
        assert json.loads(path.read_text()) == json.loads(written[path.name]), path.name


def test_together_they_hold_every_encoding():
    entries = [chunk for path in VECTORS for chunk in json.loads(path.read_text())["chunks"]]

    assert {entry["encoding"] for entry in entries} == set(Encoding)


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_a_committed_vector_leads_to_its_target(path, maker, level):
    vector = json.loads(path.read_text())
    layout = maker.Layout.of(maker.TENSORS[path.name.split(".")[0]])
    flat = maker.versions(path.name.split(".")[0], layout)[0]
    tables = bytes.fromhex(vector["shared_tables"])
    assert vector["codec_version"] == CODEC_VERSION

    for entry in vector["chunks"]:
        chunk = read(entry)
        part = flat[chunk.header.offset : chunk.header.end].view(chunk.header.dtype.bits)
        if vector["base_blake3"] is None:
            part[:] = decode_whole(chunk)
        elif (change := decode_change(chunk, part.copy(), tables)) is not None:
            change.apply(flat)

    assert blake3(flat.data).hexdigest() == vector["target_blake3"]


def read(entry):
    payload = bytes.fromhex(entry["payload"])
    header = ChunkHeader(
        index=0,
        offset=entry["offset"],
        nbytes=entry["nbytes"],
        dtype=Dtype(entry["dtype"]),
        encoding=Encoding(entry["encoding"]),
        payload_nbytes=len(payload),
        changed_count=entry["changed_count"],
    )
    return Chunk(header=header, payload=payload)


def test_a_vector_is_small():
    assert np.sum([path.stat().st_size for path in VECTORS]) < 200_000

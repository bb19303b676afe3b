"""Write the test vectors of the weight codec, for decoders in other languages.

    python scripts/make_codec_vectors.py [--check]

`tests/codec/vectors/README.md` says what is in them. The values come from a formula, so that this
script and a decoder elsewhere agree on every input without a file of weights.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from astraflow.codec.chunks import CODEC_VERSION, Chunk, Profile, Runs
from astraflow.codec.encode import encode_patch, encode_whole, flat_bits
from astraflow.codec.state_digest import StateDigest
from astraflow.core.tensors import Dtype, Layout
from astraflow.wire.weights import digest_of, root_digest

FOLDER = Path(__file__).parent.parent / "tests" / "codec" / "vectors"
TENSORS: dict[str, list[tuple[str, Dtype, tuple[int, ...]]]] = {
    "one-bf16": [("w", Dtype.BF16, (60_000,))],
    "few-changes": [("w", Dtype.BF16, (3000,))],
    "many-dtypes": [
        ("a", Dtype.BF16, (101, 7)),
        ("b", Dtype.F8_E4M3, (1000,)),
        ("c", Dtype.F32, (900,)),
        ("d", Dtype.I64, (300,)),
        ("e", Dtype.F16, ()),
        ("f", Dtype.U8, (300,)),
    ],
}
SHARES = {"one-bf16": 30, "few-changes": 30, "many-dtypes": 4}


def noise(count: int, stream: int) -> np.ndarray:
    """Return u64[count]: splitmix64 from a start that depends on the stream."""
    with np.errstate(over="ignore"):
        x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(stream) * np.uint64(0xD1342543DE82EF95)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def versions(name: str, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Return base and target, u8[nbytes] each.

    An element is the lowest bits of the AND of two streams, one in `SHARES` of them is raised by
    1, and one in 16 of those replaced by a fifth stream. Of i64, streams have 10 bits only.
    """
    base = np.zeros(layout.nbytes, np.uint8)
    target = base.copy()
    for number, spec in enumerate(layout.tensors):
        count, bits = spec.element_count, spec.dtype.bits
        streams = [noise(count, 8 * number + place) for place in range(5)]
        keep = np.uint64(1023 if spec.dtype is Dtype.I64 else 2**64 - 1)
        old = (streams[0] & streams[1] & keep).astype(bits)
        new = old.copy()
        changed = streams[2] % np.uint64(SHARES[name]) == 0
        far = changed & (streams[3] % np.uint64(16) == 0)
        new[changed] += bits.type(1)
        new[far] = (streams[4] & keep).astype(bits)[far]
        layout.view(base, spec.name)[...] = old.reshape(spec.shape)
        layout.view(target, spec.name)[...] = new.reshape(spec.shape)
    return base, target


def describe(chunk: Chunk) -> dict[str, Any]:
    """Return a chunk as JSON has it."""
    header = chunk.header
    return {
        "offset": header.offset,
        "nbytes": header.nbytes,
        "dtype": header.dtype.value,
        "encoding": header.encoding.value,
        "changed_count": header.changed_count,
        "digest": digest_of(chunk).hex(),
        "payload": bytes(chunk.payload).hex(),
    }


def vector(name: str, profile: Profile, *, is_whole: bool) -> dict[str, Any]:
    """Return one file."""
    layout = Layout.of(TENSORS[name])
    base, target = versions(name, layout)
    runs, bits = Runs(layout), flat_bits(target)
    start = StateDigest.of(layout, base)
    if is_whole:
        chunks, tables = encode_whole(runs, bits, profile=profile), b""
    else:
        patch = encode_patch(runs, bits, flat_bits(base), start, profile=profile)
        chunks, tables = patch.chunks, patch.shared_tables
    return {
        "codec_version": CODEC_VERSION,
        "profile": profile.value,
        "tensors": [
            {"name": t.name, "dtype": t.dtype.value, "shape": t.shape, "offset": t.offset}
            for t in layout.tensors
        ],
        "state_nbytes": layout.nbytes,
        "base_blake3": None if is_whole else blake3(base.data).hexdigest(),
        "target_blake3": blake3(target.data).hexdigest(),
        "base_state_digest": None if is_whole else start.to_bytes().hex(),
        "target_state_digest": StateDigest.of(layout, target).to_bytes().hex(),
        "shared_tables": tables.hex(),
        "root_digest": root_digest([digest_of(chunk) for chunk in chunks], tables).hex(),
        "chunks": [describe(chunk) for chunk in chunks],
    }


def files() -> dict[str, str]:
    """Return the text of each file by name."""
    found: dict[str, str] = {}
    for profile in Profile:
        for name in TENSORS:
            entry = vector(name, profile, is_whole=False)
            found[f"{name}.{profile.value}.json"] = json.dumps(entry, indent=1) + "\n"
        entry = vector("many-dtypes", profile, is_whole=True)
        found[f"many-dtypes.whole-{profile.value}.json"] = json.dumps(entry, indent=1) + "\n"
    return found


def main() -> None:
    """Write the files, or say which are not as they would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    FOLDER.mkdir(exist_ok=True)
    stale: list[str] = []
    for name, text in files().items():
        path = FOLDER / name
        if check and (not path.exists() or path.read_text() != text):
            stale.append(name)
        if not check:
            path.write_text(text)
    if stale:
        sys.exit(f"not up to date: {', '.join(stale)}; run scripts/make_codec_vectors.py")


if __name__ == "__main__":
    main()

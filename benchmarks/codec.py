"""The weight codec against what others publish: bytes per changed element, and time per core.

    python benchmarks/codec.py --json codec.json

GB/s are bytes of one bf16 copy of the model per second of CPU time of one core (`thread_time`),
best of `--repeats`. Encoding includes every digest: of chunks, root and state. Decoding includes
them too, and writing the changes into the state. Bytes include headers, digests and tables.

The corpus: fp32 master weights from N(0, 0.02), one step of Adam in its stationary state (betas
.9 and .999: steps from N(0, 1) times sqrt(0.1 / 1.9)), learning rate such that the wanted share
of bf16 values changes. Values of real training fit it closely.

Baselines, in the same run: positions as u32 and raw values (6 bytes; above 2^32 elements u64, 10
bytes), the same two versions XORed and packed, and gaps with raw values packed.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from astraflow.codec import kernels
from astraflow.codec.chunks import Chunk, Profile
from astraflow.codec.decode import decode_change, decode_whole
from astraflow.codec.encode import Encoded, EncodedPatch, encode_patch, encode_whole, flat_bits
from astraflow.codec.runs import Runs
from astraflow.codec.state_digest import StateDigest
from astraflow.core.dtype import Dtype
from astraflow.core.layout import Layout
from astraflow.wire.patches import digest_of, encode_chunk_header, root_digest

ADAM_STEP = (0.1 / 1.9) ** 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Two versions of one tensor of bf16 values: u16[n] each."""

    old: np.ndarray
    new: np.ndarray
    changed_count: int

    @property
    def nbytes(self) -> int:
        """Of one copy."""
        return self.old.nbytes


def rounded(values: np.ndarray) -> np.ndarray:
    """Round f32[n] to bf16, to the nearest even one: u16[n]."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def stepped(master: np.ndarray, steps: np.ndarray, rate: float) -> np.ndarray:
    return rounded(master - np.float32(rate) * steps)


def make_corpus(count: int, share: float, seed: int) -> Corpus:
    old, new = np.empty((2, count), np.uint16)
    rate = find_rate(share, seed)
    for number, first in enumerate(range(0, count, 1 << 22)):
        rng = np.random.default_rng([seed, number])
        part = slice(first, min(first + (1 << 22), count))
        master, steps = draw(rng, part.stop - part.start)
        old[part], new[part] = rounded(master), stepped(master, steps, rate)
    return Corpus(old=old, new=new, changed_count=int(np.count_nonzero(old != new)))


def draw(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    master = rng.standard_normal(count, np.float32) * np.float32(0.02)
    return master, rng.standard_normal(count, np.float32) * np.float32(ADAM_STEP)


def find_rate(share: float, seed: int) -> float:
    """Return the learning rate with which a share of the values changes."""
    master, steps = draw(np.random.default_rng([seed, 1 << 20]), 1 << 20)
    old, low, high = rounded(master), 1e-9, 1e-3
    for _ in range(30):
        rate = (low * high) ** 0.5
        if np.mean(old != stepped(master, steps, rate)) < share:
            low = rate
        else:
            high = rate
    return high


def best_s(work: Callable[[], Any], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return best


class Bench:
    """Codes one corpus in all ways; each row is checked to come back bit by bit."""

    def __init__(self, corpus: Corpus, repeats: int) -> None:
        """Lay out both versions."""
        self.corpus, self.repeats = corpus, repeats
        self.layout = Layout.of([("w", Dtype.BF16, self.corpus.old.shape)])
        self.runs = Runs(self.layout)
        self.base = padded(self.corpus.old, self.layout)
        self.target = padded(self.corpus.new, self.layout)
        self.start = StateDigest.of(self.layout, self.base)

    def row(self, name: str, nbytes: int, encode: Callable[[], Any], decode: Any) -> dict[str, Any]:
        """Measure and print one format."""
        rates = [self.corpus.nbytes / best_s(work, self.repeats) / 1e9 for work in (encode, decode)]
        row = {
            "format": name,
            "bytes_per_change": nbytes / self.corpus.changed_count,
            "bytes_per_element": nbytes / len(self.corpus.old),
            "encode_gb_per_s": rates[0],
            "decode_gb_per_s": rates[1],
        }
        print(
            f"  {name:22} {row['bytes_per_change']:8.4f} B/change {row['bytes_per_element']:8.5f}"
            f" B/element  encode {rates[0]:6.2f}  decode + verify + apply {rates[1]:6.2f} GB/s",
            flush=True,
        )
        return row

    def patch(self, profile: Profile) -> dict[str, Any]:
        """Code what changed."""

        def encode() -> tuple[EncodedPatch, bytes]:
            patch = encode_patch(
                self.runs,
                flat_bits(self.target),
                flat_bits(self.base),
                self.start,
                profile=profile,
            )
            return patch, root_of(patch)

        patch, root = encode()
        state = self.base.copy()

        def decode() -> None:
            digests = [digest_of(chunk) for chunk in patch.chunks]
            assert root_digest(digests, patch.shared_tables) == root
            digest = self.start
            changes = [
                decode_change(chunk, bits_of(chunk, self.base), patch.shared_tables)
                for chunk in patch.chunks
            ]
            for change in changes:
                if change is not None:
                    digest = digest.after(change)
            assert digest == patch.digest
            for change in changes:
                if change is not None:
                    change.apply(state)

        decode()
        assert (state == self.target).all()
        return self.row(profile.value, wire_nbytes(patch), encode, decode)

    def whole(self, profile: Profile) -> dict[str, Any]:
        """Code the new version from nothing."""

        def encode() -> tuple[Encoded, bytes]:
            whole = encode_whole(self.runs, flat_bits(self.target), profile=profile)
            return whole, root_of(whole)

        whole, root = encode()
        state = np.zeros_like(self.target)

        def decode() -> None:
            assert root_digest([digest_of(chunk) for chunk in whole.chunks]) == root
            for chunk in whole.chunks:
                part = state[chunk.header.offset : chunk.header.end]
                part.view(chunk.header.dtype.bits)[:] = decode_whole(chunk)
            StateDigest.of(self.layout, state)

        decode()
        assert (state == self.target).all()
        return self.row(f"whole, {profile.value}", wire_nbytes(whole), encode, decode)

    def published(self, index: str) -> dict[str, Any]:
        """Code positions and raw values."""
        old, new = self.corpus.old, self.corpus.new

        def encode() -> tuple[np.ndarray, np.ndarray]:
            places = np.flatnonzero(old != new)
            return places.astype(index), new[places]

        places, values = encode()
        state = old.copy()

        def decode() -> None:
            state[places] = values

        decode()
        assert (state == new).all()
        return self.row(f"{index} + raw", places.nbytes + values.nbytes, encode, decode)

    def xor(self) -> dict[str, Any]:
        """Pack both versions XORed."""
        old, new = self.corpus.old, self.corpus.new

        def encode() -> bytes:
            return zstandard.ZstdCompressor(level=1).compress((old ^ new).data)

        packed = encode()

        def decode() -> np.ndarray:
            return old ^ np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), np.uint16)

        assert (decode() == new).all()
        return self.row("xor, zstd-1", len(packed), encode, decode)

    def gaps(self) -> dict[str, Any]:
        """Pack gaps and raw values."""
        old, new = self.corpus.old, self.corpus.new

        def encode() -> bytes:
            places = np.flatnonzero(old != new)
            steps = np.diff(places, prepend=0)
            # LEB128 in two bytes at most, which these gaps fit into but for very few.
            is_wide = steps >= 128
            stream = np.empty((len(steps), 2), np.uint8)
            stream[:, 0] = steps & 127 | is_wide << 7
            stream[:, 1] = np.minimum(steps >> 7, 255)
            keep = np.stack([np.ones_like(is_wide), is_wide], 1)
            parts = (stream[keep].tobytes(), new[places].tobytes())
            return b"".join(zstandard.ZstdCompressor(level=1).compress(each) for each in parts)

        nbytes = len(encode())
        return self.row("gaps + raw, zstd-1", nbytes, encode, lambda: None) | {
            "decode_gb_per_s": None
        }


def bits_of(chunk: Chunk, flat: np.ndarray) -> np.ndarray:
    return flat[chunk.header.offset : chunk.header.end].view(chunk.header.dtype.bits)


def padded(bits: np.ndarray, layout: Layout) -> np.ndarray:
    flat = np.zeros(layout.nbytes, np.uint8)
    flat[: bits.nbytes] = bits.view(np.uint8)
    return flat


def root_of(patch: Encoded | EncodedPatch) -> bytes:
    return root_digest([digest_of(chunk) for chunk in patch.chunks], patch.shared_tables)


def wire_nbytes(patch: Encoded | EncodedPatch) -> int:
    """Payloads, headers, digests and tables."""
    headers = sum(encode_chunk_header(chunk.header).ByteSize() + 32 for chunk in patch.chunks)
    return headers + len(patch.shared_tables) + sum(len(chunk.payload) for chunk in patch.chunks)


def measure(options: argparse.Namespace, share: float) -> dict[str, Any]:
    corpus = make_corpus(options.elements, share, options.seed)
    changed = corpus.changed_count / options.elements
    print(f"{options.elements:,} elements, {changed:.3%} changed", flush=True)
    bench = Bench(corpus, options.repeats)
    rows = [bench.patch(Profile.FAST), bench.patch(Profile.COMPACT)]
    rows += [bench.published("uint32"), bench.published("uint64"), bench.gaps()]
    rows += [bench.xor(), bench.whole(Profile.FAST), bench.whole(Profile.COMPACT)]
    by_name = {row["format"]: row for row in rows}
    fast, published = by_name["fast"], by_name["uint32 + raw"]
    ratio = fast["encode_gb_per_s"] / published["encode_gb_per_s"]
    print(f"  fast encodes {ratio:.2f} times as fast as positions and values by numpy")
    return {"share": changed, "rows": rows, "fast_to_published_encode": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--elements", type=int, default=64 << 20)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.005, 0.01, 0.024])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"kernels: {kernels.level().name.lower()}, load {os.getloadavg()[0]:.1f}")
    result = {
        "kernels": kernels.level().name.lower(),
        "machine": platform.processor() or platform.machine(),
        "load": os.getloadavg(),
        "elements": options.elements,
        "corpora": [measure(options, share) for share in options.shares],
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

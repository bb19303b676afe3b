"""`astraflow bench codec`: how small and how fast weights are coded.

Weights that are made up change as in a step of an optimizer, from a seed: fp32 master weights from
N(0, 0.02), one step of Adam in its stationary state (betas .9 and .999: steps from N(0, 1) times
sqrt(0.1 / 1.9)), learning rate such that the wanted share of bf16 values changes. Values of real
training fit it closely (`benchmarks/corpus.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from astraflow.codec import kernels
from astraflow.codec.chunks import Chunk, Profile, Runs
from astraflow.codec.decode import decode_change, decode_whole
from astraflow.codec.encode import EncodedPatch, encode_patch, encode_whole, flat_bits
from astraflow.codec.rates import cpu_s_of
from astraflow.codec.state_digest import StateDigest
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.tensors import Dtype, Layout
from astraflow.launch.weights import print_json
from astraflow.storage.weight_files import flatten, read_weights
from astraflow.wire.weights import digest_of, encode_chunk_header, root_digest

_ADAM_STEP: Final = (0.1 / 1.9) ** 0.5

_PART: Final = 1 << 22

_RATE_SAMPLE: Final = 1 << 20


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


def make_corpus(count: int, share: float, seed: int) -> Corpus:
    """Return two versions of `count` values, of which about a share differs."""
    old, new = np.empty((2, count), np.uint16)
    rate = _find_rate(share, seed)
    for number, first in enumerate(range(0, count, _PART)):
        rng = np.random.default_rng([seed, number])
        part = slice(first, min(first + _PART, count))
        master, steps = _draw(rng, part.stop - part.start)
        old[part], new[part] = _rounded(master), _stepped(master, steps, rate)
    return Corpus(old=old, new=new, changed_count=int(np.count_nonzero(old != new)))


def _rounded(values: np.ndarray) -> np.ndarray:
    """Round f32[n] to bf16, to the nearest even one: u16[n]."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _stepped(master: np.ndarray, steps: np.ndarray, rate: float) -> np.ndarray:
    return _rounded(master - np.float32(rate) * steps)


def _draw(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    master = rng.standard_normal(count, np.float32) * np.float32(0.02)
    return master, rng.standard_normal(count, np.float32) * np.float32(_ADAM_STEP)


def _find_rate(share: float, seed: int) -> float:
    """Return the learning rate with which a share of the values changes."""
    master, steps = _draw(np.random.default_rng([seed, 1 << 20]), _RATE_SAMPLE)
    old, low, high = _rounded(master), 1e-9, 1e-3
    for _ in range(30):
        rate = (low * high) ** 0.5
        if np.mean(old != _stepped(master, steps, rate)) < share:
            low = rate
        else:
            high = rate
    return high


Work = Callable[[], Any]

_DIGEST_NBYTES = 32

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TwoVersions:
    """Two versions of one model.

    Attributes:
        layout: Of both.
        old: u8[layout.nbytes].
        new: u8[layout.nbytes].
    """

    layout: Layout
    old: np.ndarray
    new: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coding:
    """One way of coding the new version.

    Attributes:
        name: For people.
        nbytes: Of what travels: payloads, headers, digests, tables.
        encode: Does it, every digest included.
        prepare: Comes before each decoding, and is not timed.
        decode: Verifies everything and leaves the new version in `state`.
        state: u8[layout.nbytes].
    """

    name: str
    nbytes: int
    encode: Work
    prepare: Work
    decode: Work
    state: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRate:
    """What a way of coding is worth on this machine.

    Attributes:
        name: Of the way.
        nbytes: Of what travels.
        encode_gb_per_s: Bytes of one copy of the model by CPU seconds of one core.
        decode_gb_per_s: The same of decoding.
    """

    name: str
    nbytes: int
    encode_gb_per_s: float
    decode_gb_per_s: float


def codings(versions: TwoVersions) -> Iterator[Coding]:
    """Yield all ways; each is checked first to give the new version back bit by bit.

    Raises:
        AstraflowError: INTERNAL when one does not.
    """
    for make in (patch_coding, whole_coding):
        for profile in Profile:
            coding = make(versions, profile)
            coding.prepare()
            coding.decode()
            _require(np.array_equal(coding.state, versions.new))
            yield coding


def measure(coding: Coding, *, copy_nbytes: int, repeats: int) -> CodecRate:
    """Return the best of some repeats."""
    encode_s = best_cpu_s(coding.encode, repeats)
    decode_s = best_cpu_s(coding.decode, repeats, coding.prepare)
    return CodecRate(
        name=coding.name,
        nbytes=coding.nbytes,
        encode_gb_per_s=copy_nbytes / encode_s / _GB,
        decode_gb_per_s=copy_nbytes / decode_s / _GB,
    )


def best_cpu_s(work: Work, repeats: int, prepare: Work | None = None) -> float:
    """Return the least CPU time of this thread, in seconds."""
    best = float("inf")
    for _ in range(repeats):
        if prepare is not None:
            prepare()
        best = min(best, cpu_s_of(work))
    return best


def patch_coding(versions: TwoVersions, profile: Profile) -> Coding:
    """Return how a patch of a profile is made and applied."""
    runs, start = Runs(versions.layout), StateDigest.of(versions.layout, versions.old)

    def encode() -> tuple[EncodedPatch, bytes]:
        new, old = flat_bits(versions.new), flat_bits(versions.old)
        patch = encode_patch(runs, new, old, start, profile=profile)
        return patch, _root_of(patch.chunks, patch.shared_tables)

    def apply() -> None:
        """Verify and apply as a puller does: chunks, root, resulting state, then the write."""
        digests = [digest_of(chunk) for chunk in patch.chunks]
        _require(root_digest(digests, patch.shared_tables) == root)
        tables, digest = patch.shared_tables, start
        decoded = (decode_change(chunk, _bits_of(chunk, state), tables) for chunk in patch.chunks)
        changes = [change for change in decoded if change is not None]
        for change in changes:
            digest = digest.after(change)
        _require(digest == patch.digest)
        for change in changes:
            change.apply(state)

    (patch, root), state = encode(), versions.old.copy()
    return Coding(
        name=profile.value,
        nbytes=_wire_nbytes(patch.chunks) + len(patch.shared_tables),
        encode=encode,
        prepare=partial(np.copyto, state, versions.old),
        decode=apply,
        state=state,
    )


def whole_coding(versions: TwoVersions, profile: Profile) -> Coding:
    """Return how a version of a profile is made from nothing and read."""
    runs = Runs(versions.layout)

    def encode() -> tuple[Sequence[Chunk], bytes]:
        whole = encode_whole(runs, flat_bits(versions.new), profile=profile)
        return whole, _root_of(whole)

    def read() -> None:
        _require(root_digest([digest_of(chunk) for chunk in whole]) == root)
        for chunk in whole:
            _bits_of(chunk, state)[:] = decode_whole(chunk)
        StateDigest.of(versions.layout, state)

    (whole, root), state = encode(), np.zeros_like(versions.new)
    return Coding(
        name=f"whole, {profile.value}",
        nbytes=_wire_nbytes(whole),
        encode=encode,
        prepare=lambda: None,
        decode=read,
        state=state,
    )


def _require(is_true: bool) -> None:
    if not is_true:
        raise AstraflowError(Reason.INTERNAL, "what was decoded is not what was encoded")


def _bits_of(chunk: Chunk, flat: np.ndarray) -> np.ndarray:
    return flat[chunk.header.offset : chunk.header.end].view(chunk.header.dtype.bits)


def _root_of(chunks: Sequence[Chunk], shared_tables: bytes = b"") -> bytes:
    return root_digest([digest_of(chunk) for chunk in chunks], shared_tables)


def _wire_nbytes(chunks: Sequence[Chunk]) -> int:
    return sum(
        encode_chunk_header(each.header).ByteSize() + _DIGEST_NBYTES + len(each.payload)
        for each in chunks
    )


def made_up(count: int, share: float) -> TwoVersions:
    """Return two versions of one bf16 tensor, as a step of Adam would make them.

    Args:
        count: Elements.
        share: Of them change.
    """
    corpus, layout = make_corpus(count, share, 0), Layout.of([("w", Dtype.BF16, (count,))])
    old, new = np.zeros((2, layout.nbytes), np.uint8)
    old[: corpus.nbytes], new[: corpus.nbytes] = (
        corpus.old.view(np.uint8),
        corpus.new.view(np.uint8),
    )
    return TwoVersions(layout=layout, old=old, new=new)


def from_files(old: Path, new: Path) -> TwoVersions:
    """Return two versions from safetensors files, or folders of them.

    Raises:
        AstraflowError: INVALID_FIELD when they are not sound; LAYOUT_MISMATCH when they are not
            versions of one model.
    """
    (layout, first), (other, second) = (flatten(read_weights(path)) for path in (old, new))
    if layout != other:
        raise AstraflowError(
            Reason.LAYOUT_MISMATCH,
            f"{old} and {new} have other tensors: see `astraflow weights diff`",
        )
    return TwoVersions(layout=layout, old=first, new=second)


def show_codec(versions: TwoVersions, *, repeats: int, as_json: bool) -> None:
    """Measure all ways of coding, and print them.

    Raises:
        AstraflowError: INTERNAL when one does not give the new version back.
    """
    copy_nbytes, changed = versions.layout.nbytes, 0
    for spec in versions.layout.tensors:
        part = slice(spec.offset, spec.offset + spec.nbytes)
        old, new = (each[part].view(spec.dtype.bits) for each in (versions.old, versions.new))
        changed += int(np.count_nonzero(old != new))
    rates = [
        measure(coding, copy_nbytes=copy_nbytes, repeats=repeats) for coding in codings(versions)
    ]
    if as_json:
        fields = {"model_nbytes": copy_nbytes, "changed": changed, "kernels": kernels.level().name}
        print_json({**fields, "ways": [asdict(rate) for rate in rates]})
        return
    console = Console()
    console.print(_table(rates, copy_nbytes, changed))
    console.print(_advice(rates[0], rates[1], copy_nbytes))


def _table(rates: Sequence[CodecRate], copy_nbytes: int, changed: int) -> Table:
    title = f"{copy_nbytes / 1e6:,.1f} MB, {changed:,} elements changed; one core"
    table = Table("way", "bytes", "of a copy", "per change", "encode", "decode", title=title)
    for rate in rates:
        table.add_row(
            rate.name,
            f"{rate.nbytes:,}",
            f"{rate.nbytes / copy_nbytes:.2%}",
            f"{rate.nbytes / max(1, changed):.2f} B",
            f"{rate.encode_gb_per_s:.2f} GB/s",
            f"{rate.decode_gb_per_s:.2f} GB/s",
        )
    return table


def _advice(fast: CodecRate, compact: CodecRate, copy_nbytes: int) -> str:
    """Say below which goodput fewer bytes are worth the time that they take to code."""
    compact_s, fast_s = (
        copy_nbytes / _GB * (1 / rate.encode_gb_per_s + 1 / rate.decode_gb_per_s)
        for rate in (compact, fast)
    )
    slower_s = compact_s - fast_s
    if slower_s <= 0 or compact.nbytes >= fast.nbytes:
        return f"{min(fast, compact, key=lambda each: each.nbytes).name} is better over every link"
    bound = (fast.nbytes - compact.nbytes) / slower_s
    return (
        f"compact pays below {bound * 8 / 1e6:,.0f} Mbit/s per reader; the choice is made per link"
    )

"""Readers that are behind: one patch over several versions, the chain, and the whole version.

    python benchmarks/catchup.py --json catchup.json

Versions are those of `corpus.py`: a transformer of about 11 M parameters, trained by reward with
fp32 masters, 20 consecutive versions for each learning rate. They are published one after the
other; for every span it is counted what a reader so far behind has to pull, headers, digests and
tables included, and what making the patch costs. Every patch is applied, and the result compared
bit by bit. The baseline is what is done without one patch over several versions: every patch
again, or the whole version.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import corpus
from astraflow.codec import kernels
from astraflow.codec.state_digest import StateDigest
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.core.versions import CodecProfile
from astraflow.weights.patches.layouts import ShardLayout
from astraflow.weights.patches.patch import Patch, make_patch
from astraflow.weights.patches.state import HeldState, stage
from astraflow.weights.patches.store import PatchStore
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.wire.weights import SentChunk, encode_patch_index, encode_sent_chunk

SPANS = (1, 2, 4, 8, 16)


def main() -> None:
    """Measure every learning rate, print a table, write JSON."""
    given = arguments()
    size = corpus.size_of(given)
    started = time.perf_counter()
    model = corpus.pretrained(size, given.seed)
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameter_count / 1e6:.1f} M parameters in {time.perf_counter() - started:.0f} s")
    rows: list[dict[str, Any]] = []
    for rate in given.rates:
        made = [*corpus.versions(model, size, rate=rate, count=given.count, seed=given.seed)]
        rows += [{"rate": rate, **row} for row in measured(made)]
    show(rows)
    result = {
        "benchmark": "catchup",
        "machine": {"cores": os.cpu_count(), "processor": platform.processor()},
        "kernels": kernels.level(),
        "parameter_count": parameter_count,
        "rows": rows,
        "bars": bars(rows),
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 5e-6])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    corpus.add_size(parser)
    return parser.parse_args()


def measured(made: Sequence[corpus.Version]) -> list[dict[str, Any]]:
    """Publish versions, and return a row for each span."""
    layout = Layout.of((name, Dtype.BF16, bits.shape) for name, bits in made[0].items())
    publisher = WeightPublisher(PolicyId("corpus"), layout)
    publish_s, infos = [], []
    for version, tensors in enumerate(made):
        started = time.thread_time()
        infos.append(publisher.publish(version, tensors))
        publish_s.append(time.thread_time() - started)
    digests = {info.version: info.content_digest for info in infos}
    newest = len(made) - 1
    whole = make_patch(publisher.history, None, newest, profile=CodecProfile.COMPACT)
    base_row = {
        "raw_nbytes": layout.nbytes,
        "whole_nbytes": sent_nbytes(publisher.store, whole),
        "publish_s": min(publish_s[1:]),
    }
    spans = [span for span in SPANS if span <= newest]
    return [base_row | span_row(publisher, made, newest - span, newest, digests) for span in spans]


def span_row(
    publisher: WeightPublisher,
    made: Sequence[corpus.Version],
    base: int,
    version: int,
    digests: dict[int, bytes],
) -> dict[str, Any]:
    """Return what leads from one version to another, and what it costs."""
    history, store = publisher.history, publisher.store
    row: dict[str, Any] = {
        "span": version - base,
        "changed": changed_share(made[base], made[version]),
    }
    for profile in CodecProfile:
        started = time.thread_time()
        one = make_patch(history, base, version, profile=profile)
        row[f"{profile}_make_s"] = time.thread_time() - started
        row[f"{profile}_nbytes"] = sent_nbytes(store, one)
        chain = [make_patch(history, at, at + 1, profile=profile) for at in range(base, version)]
        row[f"{profile}_chain_nbytes"] = sum(sent_nbytes(store, each) for each in chain)
        started = time.thread_time()
        check(store, one, made, digests)
        row[f"{profile}_check_s"] = time.thread_time() - started
    return row


def sent_nbytes(store: PatchStore, patch: Patch) -> int:
    """Return the bytes of a patch on the wire: its index and every chunk with its header."""
    store.offer([patch])
    chunks = [store.chunk(patch.info, index) for index in range(patch.info.chunk_count)]
    return encode_patch_index(patch.index).ByteSize() + sum(
        encode_sent_chunk(SentChunk(patch_index=0, chunk=chunk)).ByteSize() for chunk in chunks
    )


def check(
    store: PatchStore,
    patch: Patch,
    made: Sequence[corpus.Version],
    digests: dict[int, bytes],
) -> None:
    """Apply a patch to its base, and compare bit by bit."""
    info = patch.info
    chunks = tuple(store.chunk(info, index) for index in range(info.chunk_count))
    held = held_of(store.frame, made[info.base_version or 0], info.base_version or 0)
    complete = Patch(patch.index, dict(enumerate(chunks)))
    state = stage(store.frame, held, [complete], digests).commit()
    for name, bits in made[info.version].items():
        if not np.array_equal(store.frame.layout.view(state.flat, name), bits):
            raise AssertionError(f"{name} differs after {info.base_version} -> {info.version}")


def held_of(frame: ShardLayout, tensors: corpus.Version, version: int) -> HeldState:
    flat = np.zeros(frame.layout.nbytes, np.uint8)
    for name, bits in tensors.items():
        frame.layout.view(flat, name)[...] = bits
    digest = StateDigest.of(frame.layout, flat)
    return HeldState(frame=frame, version=version, flat=flat, digest=digest)


def changed_share(old: corpus.Version, new: corpus.Version) -> float:
    changed = sum(int(np.count_nonzero(bits != new[name])) for name, bits in old.items())
    return changed / sum(bits.size for bits in old.values())


def bars(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the longest span of the smallest rate costs, of the chain and of all."""
    rate = min(row["rate"] for row in rows)
    row = max((row for row in rows if row["rate"] == rate), key=lambda each: each["span"])
    return {
        "span": row["span"],
        "of_chain": row["compact_nbytes"] / row["compact_chain_nbytes"],
        "of_raw": row["compact_nbytes"] / row["raw_nbytes"],
        "whole_bytes_per_parameter": 2 * row["whole_nbytes"] / row["raw_nbytes"],
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(
        f"{'rate':>7} {'span':>4} {'changed':>8} | {'one':>9} {'chain':>9} {'of it':>6}"
        f" {'of raw':>7} {'make s':>7} | {'fast one':>9} {'chain':>9} {'of it':>6}"
    )
    for row in rows:
        compact, chain = row["compact_nbytes"], row["compact_chain_nbytes"]
        fast, fast_chain = row["fast_nbytes"], row["fast_chain_nbytes"]
        print(
            f"{row['rate']:7.0e} {row['span']:4} {row['changed']:8.2%} | {compact:9,} {chain:9,}"
            f" {compact / chain:6.1%} {compact / row['raw_nbytes']:7.2%}"
            f" {row['compact_make_s']:7.3f} | {fast:9,} {fast_chain:9,} {fast / fast_chain:6.1%}"
        )


if __name__ == "__main__":
    main()

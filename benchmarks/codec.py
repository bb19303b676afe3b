"""The weight codec against what others publish: bytes per changed element, and time per core.

    python benchmarks/codec.py --json codec.json

GB/s are bytes of one bf16 copy of the model per second of CPU time of one core (`thread_time`),
best of `--repeats`. Encoding includes every digest: of chunks, root and state. Decoding includes
them too, and writing the changes into the state ("decode" in the table). Bytes include headers,
digests and tables.

The corpus is that of `astraflow bench codec`. Decoding reads the state that it then writes into,
as a puller's does; between the repeats it is made anew, which is not timed.

Baselines, in the same run: positions as u32 and raw values (6 bytes; above 2^32 elements u64, 10
bytes), gaps with raw values packed, and the same two versions XORed and packed. They have no
digests: their rows are measured as they are, and `verified` with BLAKE3 of all that is sent, at
both ends, which is less than what the codec verifies (it knows the state that results, too).

`--rates` adds real versions (see `corpus.py`; about a minute): the last step of a run of 20.

`--sizes` measures no time: bytes of compact patches for one of fast ones, at shares of changed
elements from 10^-4 to 1 (all of them drawn anew), and of versions that are 1 to 16 steps of Adam,
SGD and Muon apart (`corpus.py`, some minutes; `--optimizers` names fewer).

`--choice` forces each level of the kernels, and says what a source's choice of the profile costs a
reader against the better one, over links of 1 MB/s to 10 GB/s: it knows what the reader measured
of itself before. Decoding and the link take turns.
"""

import argparse
import json
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from astraflow.codec import kernels
from astraflow.codec.chunks import Profile
from astraflow.codec.rates import measured_rates
from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.launch.bench.codec import (
    Coding,
    Corpus,
    TwoVersions,
    Work,
    best_cpu_s,
    codings,
    make_corpus,
    patch_coding,
)
from astraflow.weights.patches.routes import decoding_s
from astraflow.wire.transfers import TransferSpec
from codec_baselines import BASELINES, Baseline, Parts

SIZE_SHARES = (1e-4, 1e-3, 0.01, 0.05, 0.1, 0.3, 0.45, 0.5, 0.52, 0.6, 0.75, 0.85, 1.0)
MOST_BY_STEPS = 0.85
"""More do not change by small steps."""

SPANS = (1, 2, 4, 8, 16)
OPTIMIZER_RATES = {"adam": 1e-5, "sgd": 1e-2, "muon": 1e-3}


class Bench:
    """Codes one corpus in all ways; each row is checked to come back bit by bit."""

    def __init__(self, corpus: Corpus, repeats: int) -> None:
        """Lay out both versions."""
        self.corpus, self.repeats = corpus, repeats
        layout = Layout.of([("w", Dtype.BF16, self.corpus.old.shape)])
        self.versions = TwoVersions(
            layout=layout,
            old=padded(self.corpus.old, layout),
            new=padded(self.corpus.new, layout),
        )

    def rates(self, encode: Work, decode: Work, prepare: Work | None = None) -> list[float]:
        """Return GB/s of one copy of the model; before each decoding comes what is not timed."""
        seconds = (best_cpu_s(encode, self.repeats), best_cpu_s(decode, self.repeats, prepare))
        return [self.corpus.nbytes / each / 1e9 for each in seconds]

    def row(
        self, name: str, nbytes: int, encode: Work, decode: Work, prepare: Work | None = None
    ) -> dict[str, Any]:
        """Measure and print one format."""
        rates = self.rates(encode, decode, prepare)
        row = {
            "format": name,
            "bytes_per_change": nbytes / self.corpus.changed_count,
            "bytes_per_element": nbytes / len(self.corpus.old),
            "encode_gb_per_s": rates[0],
            "decode_gb_per_s": rates[1],
        }
        print(
            f"  {name:22} {row['bytes_per_change']:8.4f} B/change {row['bytes_per_element']:8.5f}"
            f" B/element  encode {rates[0]:6.2f}  decode {rates[1]:6.2f} GB/s",
            flush=True,
        )
        return row

    def coded(self, coding: Coding) -> dict[str, Any]:
        """Code as we do."""
        return self.row(coding.name, coding.nbytes, coding.encode, coding.decode, coding.prepare)

    def baseline(self, name: str, form: Baseline) -> dict[str, Any]:
        """Code what changed as others do."""
        old, new = self.corpus.old, self.corpus.new
        parts, state = form.encode(old, new), old.copy()
        digest = blake3_of(parts)

        def encode_verified() -> None:
            blake3_of(form.encode(old, new))

        def decode_verified() -> None:
            assert blake3_of(parts) == digest
            form.apply(parts, state)

        def prepare() -> None:
            state[:] = old

        form.apply(parts, state)
        assert (state == new).all()
        nbytes = sum(len(memoryview(each).cast("B")) for each in parts)
        row = self.row(
            name, nbytes, lambda: form.encode(old, new), lambda: form.apply(parts, state), prepare
        )
        rates = self.rates(encode_verified, decode_verified, prepare)
        print(f"  {'  verified':64} {rates[0]:6.2f}  {'':6} {rates[1]:6.2f} GB/s", flush=True)
        return row | {
            "encode_verified_gb_per_s": rates[0],
            "decode_verified_gb_per_s": rates[1],
        }


def blake3_of(parts: Parts) -> bytes:
    hasher = blake3()
    for each in parts:
        hasher.update(memoryview(each).cast("B"))
    return hasher.digest()


def padded(bits: np.ndarray, layout: Layout) -> np.ndarray:
    flat = np.zeros(layout.nbytes, np.uint8)
    flat[: bits.nbytes] = bits.view(np.uint8)
    return flat


def measure(corpus: Corpus, repeats: int) -> dict[str, Any]:
    """Return the rows of one corpus."""
    changed = corpus.changed_count / len(corpus.old)
    print(f"{len(corpus.old):,} elements, {changed:.3%} changed", flush=True)
    bench = Bench(corpus, repeats)
    rows = [bench.coded(coding) for coding in codings(bench.versions)]
    rows += [bench.baseline(name, form) for name, form in BASELINES.items()]
    by_name = {row["format"]: row for row in rows}
    fast, published = by_name["fast"], by_name["uint32 + raw"]
    ratio = fast["encode_gb_per_s"] / published["encode_gb_per_s"]
    print(f"  fast encodes {ratio:.2f} times as fast as positions and values by numpy")
    return {"share": changed, "rows": rows, "fast_to_published_encode": ratio}


def real_corpora(rates: Sequence[float], seed: int) -> Iterator[tuple[float, Corpus]]:
    """Train the model of `corpus.py`, and yield its last two versions for each learning rate."""
    if not rates:
        return
    # It needs torch, which nothing else here does.
    import corpus as real  # noqa: PLC0415

    size = real.Size()
    model = real.pretrained(size, seed)
    for rate in rates:
        made = [*real.versions(model, size, rate=rate, count=20, seed=seed)][-2:]
        old, new = (np.concatenate([each[name].ravel() for name in each]) for each in made)
        yield rate, corpus_of(old, new)


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    results = [
        measure(make_corpus(options.elements, share, options.seed), options.repeats)
        for share in options.shares
    ]
    for rate, corpus in real_corpora(options.rates, options.seed):
        print(f"real versions, learning rate {rate:g}:", end=" ")
        results.append({"rate": rate} | measure(corpus, options.repeats))
    return results


def size_row(corpus: Corpus, **about: Any) -> dict[str, Any]:
    """Return the bytes of both profiles, and print them."""
    bench = Bench(corpus, 1)
    fast, compact = (patch_coding(bench.versions, profile).nbytes for profile in Profile)
    changed = corpus.changed_count / len(corpus.old)
    words = " ".join(f"{name} {value}" for name, value in about.items())
    print(
        f"  {words:28} {changed:8.3%} changed  fast {fast:12,}  compact {compact:12,}"
        f"  {compact / fast:.3f}",
        flush=True,
    )
    return about | {
        "changed": changed,
        "fast_nbytes": fast,
        "compact_nbytes": compact,
        "ratio": compact / fast,
    }


def corpus_of(old: np.ndarray, new: np.ndarray) -> Corpus:
    return Corpus(old=old, new=new, changed_count=int(np.count_nonzero(old != new)))


def measure_sizes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each share, and for each optimizer and number of steps."""
    rows: list[dict[str, Any]] = []
    for share in SIZE_SHARES:
        made = make_corpus(options.elements, min(share, MOST_BY_STEPS), options.seed)
        if share > MOST_BY_STEPS:
            made = corpus_of(made.old, make_corpus(options.elements, share, options.seed + 1).new)
        rows.append(size_row(made, share=share))
    if not options.optimizers:
        return rows
    # It needs torch, which nothing else here does.
    import corpus as real  # noqa: PLC0415

    size = real.Size()
    model = real.pretrained(size, options.seed)
    for name in options.optimizers:
        made = real.versions(
            model,
            size,
            rate=OPTIMIZER_RATES[name],
            count=SPANS[-1] + 1,
            seed=options.seed,
            optimizer=name,
        )
        flats = [np.concatenate([each[key].ravel() for key in each]) for each in made]
        rows += [
            size_row(corpus_of(flats[-1 - span], flats[-1]), optimizer=name, steps=span)
            for span in SPANS
        ]
    return rows


def choice_row(corpus: Corpus, level: kernels.KernelLevel, repeats: int) -> dict[str, Any]:
    """Return the worst of what choices cost over all links, and print it."""
    bench, rates = Bench(corpus, repeats), tuple(measured_rates().decode.values())
    found = [patch_coding(bench.versions, profile) for profile in Profile]
    decode_s = [best_cpu_s(each.decode, repeats, each.prepare) for each in found]
    worst = {"regret": 0.0}
    for goodput in 10.0 ** np.arange(6, 10.01, 0.125):
        spec = TransferSpec(
            policy_id=PolicyId("bench"),
            version=1,
            goodput_bytes_per_s=float(goodput),
            core_count=1,
            decode_rates=rates,
        )
        seconds = [each.nbytes / goodput + one for each, one in zip(found, decode_s, strict=True)]
        costs = [
            each.nbytes / goodput + decoding_s(spec, profile, corpus.nbytes, each.nbytes)
            for profile, each in zip(Profile, found, strict=True)
        ]
        regret = float(seconds[int(np.argmin(costs))] / min(seconds) - 1)
        if regret >= worst["regret"]:
            worst = {"regret": regret, "goodput_bytes_per_s": float(goodput)}
    row = {
        "kernels": level.name.lower(),
        "changed": corpus.changed_count / len(corpus.old),
        "decode_gb_per_s": [corpus.nbytes / each / 1e9 for each in decode_s],
    } | worst
    print(
        f"  {row['kernels']:10} {row['changed']:8.3%} changed  decode"
        f" {' '.join(f'{each:6.2f}' for each in row['decode_gb_per_s'])} GB/s"
        f"  at worst {worst['regret']:.1%} above the better one",
        flush=True,
    )
    return row


def measure_choice(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each level and share."""
    rows: list[dict[str, Any]] = []
    for level in kernels.levels():
        with kernels.forced(level):
            rows += [
                choice_row(
                    make_corpus(options.elements, share, options.seed), level, options.repeats
                )
                for share in (0.001, *options.shares, 0.1)
            ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--elements", type=int, default=64 << 20)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.005, 0.01, 0.024])
    parser.add_argument("--rates", type=float, nargs="*", default=[])
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--choice", action="store_true")
    parser.add_argument(
        "--optimizers", nargs="*", choices=OPTIMIZER_RATES, default=[*OPTIMIZER_RATES]
    )
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
        "corpora": [] if options.sizes or options.choice else measure_all(options),
        "choice": measure_choice(options) if options.choice else [],
        "sizes": measure_sizes(options) if options.sizes else [],
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

"""`astraflow bench codec`: for people and machines."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from astraflow.codec import kernels
from astraflow.core.dtype import Dtype
from astraflow.core.errors import AstraflowError, Reason
from astraflow.core.layout import Layout
from astraflow.launch.bench.codec import CodecRate, TwoVersions, codings, measure
from astraflow.launch.bench.synthetic import make_corpus
from astraflow.launch.weights import print_json
from astraflow.storage.weight_files import flatten, read_weights


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
    copy_nbytes, changed = versions.layout.nbytes, _changed_count(versions)
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


def _changed_count(versions: TwoVersions) -> int:
    """Return how many elements differ."""
    count = 0
    for spec in versions.layout.tensors:
        part = slice(spec.offset, spec.offset + spec.nbytes)
        old, new = (each[part].view(spec.dtype.bits) for each in (versions.old, versions.new))
        count += int(np.count_nonzero(old != new))
    return count


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
    slower_s = _coding_s(compact, copy_nbytes) - _coding_s(fast, copy_nbytes)
    if slower_s <= 0 or compact.nbytes >= fast.nbytes:
        return f"{min(fast, compact, key=lambda each: each.nbytes).name} is better over every link"
    bound = (fast.nbytes - compact.nbytes) / slower_s
    return (
        f"compact pays below {bound * 8 / 1e6:,.0f} Mbit/s per reader; the choice is made per link"
    )


def _coding_s(rate: CodecRate, copy_nbytes: int) -> float:
    return copy_nbytes / 1e9 * (1 / rate.encode_gb_per_s + 1 / rate.decode_gb_per_s)

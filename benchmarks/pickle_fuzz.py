"""Fuzz the reader of pickled bodies: nothing runs, nothing fails but by its typed error.

    python benchmarks/pickle_fuzz.py --count 1000000 --json FILE

Bodies are real ones (all protocols, tensors, arrays) and hostile ones, cut, overwritten, spliced
and shuffled; seeded. While bodies are read, an audit hook of the interpreter counts imports, calls
of `exec`, files and processes, of which there must be none. The baseline is `pickle.loads` of
the body that was not changed.
"""

import argparse
import json
import pickle
import random
import resource
import struct
import sys
import time
import tracemalloc
from collections import Counter, OrderedDict
from contextlib import suppress
from pathlib import Path

import numpy as np

from astraflow.codec.pickles import pickle_chunks, read_pickle
from astraflow.core.errors import AstraflowError, Reason

STEPS = 100_000
WATCHED = (
    "import",
    "exec",
    "compile",
    "open",
    "os.",
    "subprocess.",
    "socket.",
    "ctypes.",
    "shutil.",
)
SPLICES = (
    b"cos\nsystem\n(S'true'\ntR",
    b"\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R",
    b"cbuiltins\neval\n(X\x01\x00\x00\x001tR",
    b"ctorch.storage\n_load_from_bytes\n",
    b"cnumpy._core.multiarray\n_reconstruct\n",
    b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x8b\xff\xff\xff\x7f",
    b"(" * 50,
    b"]" * 50,
    b"222222",
    b"ttttt",
    b"\x94\x94",
    b"h\x00h\x00\x86\x94" * 5,
    b"Np2305843009213693951\n",
    b"c\\d\n\\q\n",
    b"F1e999\n",
)


def seeds() -> list[bytes]:
    """Return bodies that are read, and some that try to do harm."""
    values: list[object] = [
        {"train_batch_size": 256, "model_id": "solver", "sender_endpoint": "h:1"},
        {"version": 3, "run_eval": False, "x": [1.5, None, (1, "a", b"b"), OrderedDict(a=1)]},
        {
            "n": np.arange(6, dtype=np.float32).reshape(2, 3).T,
            "s": np.float64(2),
            "b": np.ones(3, bool),
        },
    ]
    bodies = [pickle.dumps(value, protocol=p) for value in values for p in range(6)]
    bodies.append(b"".join(pickle_chunks({"input_ids": np.zeros((2, 4), np.int32), "l": [1]})))
    bodies += [splice + b"." for splice in SPLICES]
    return bodies


def mutated(dice: random.Random, bodies: list[bytes]) -> bytes:
    """Return a body with one to four faults."""
    body = bytearray(dice.choice(bodies))
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(body) + 1)
        match dice.randrange(6):
            case 0:
                del body[at:]
            case 1:
                body[at : at + 1] = bytes([dice.randrange(256)])
            case 2:
                body[at:at] = dice.choice(SPLICES)
            case 3:
                other = dice.choice(bodies)
                start = dice.randrange(len(other))
                body[at:at] = other[start : start + dice.randrange(64)]
            case 4:
                del body[at : at + dice.randrange(1, 9)]
            case _:
                body[at : at + 4] = struct.pack("<I", dice.choice((0, 1 << 31, (1 << 32) - 1, 255)))
    return bytes(body)


class Watch:
    """Counts what a body must not bring about; a hook of the interpreter stays for ever."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.is_on = False
        sys.addaudithook(self._note)

    def _note(self, event: str, _: tuple[object, ...]) -> None:
        if self.is_on and event.startswith(WATCHED):
            self.seen[event] += 1


def fuzz(count: int, *, seed: int) -> dict[str, float]:
    """Read that many bodies; raise what is not the typed error.

    Raises:
        RuntimeError: A body brought something about.
    """
    dice, bodies, watch = random.Random(seed), seeds(), Watch()
    read = refused = 0
    spent_s = 0.0
    for _ in range(count):
        body = mutated(dice, bodies)
        watch.is_on, began = True, time.process_time()
        try:
            read_pickle(body, step_count=STEPS)
            read += 1
        except AstraflowError as error:
            refused += error.reason is Reason.INVALID_FIELD
        finally:
            spent_s += time.process_time() - began
            watch.is_on = False
    if watch.seen or read + refused != count:
        raise RuntimeError(f"bodies brought about {dict(watch.seen)} or another error")
    return {"count": count, "read": read, "refused": refused, "cpu_s": round(spent_s, 3)}


def peak_nbytes(count: int, *, seed: int) -> int:
    """Return the most memory that one of some bodies took."""
    dice, bodies, peak = random.Random(seed), seeds(), 0
    tracemalloc.start()
    for _ in range(count):
        body = mutated(dice, bodies)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with suppress(AstraflowError):
            read_pickle(body, step_count=STEPS)
        peak = max(peak, tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    return peak


def baseline_s(count: int) -> float:
    """Return the CPU seconds that pickle takes for a sound body so often."""
    body, began = seeds()[0], time.process_time()
    for _ in range(count):
        pickle.loads(body)
    return round(time.process_time() - began, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--peaks", type=int, default=20_000, help="bodies whose memory is traced")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = fuzz(args.count, seed=args.seed)
    found["peak_nbytes"] = peak_nbytes(args.peaks, seed=args.seed + 1)
    found["max_rss_nbytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found["pickle_loads_cpu_s"] = baseline_s(args.count)
    print(json.dumps(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

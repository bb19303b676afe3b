"""What a version costs where the weights are on a GPU: compared there, and compared on the host.

    python benchmarks/device_publish.py --json device_publish.json
    python benchmarks/device_publish.py --device cpu --gb 0.1

Weights are bf16 of which a share changes by one unit with each version. Comparing reads both
versions, so the rate is twice the size of the weights by the seconds of a publication; the limit is
what a copy within the device's memory reads and writes. The stall is what steps of a training,
matrix products on the device's default stream, take longer while another thread publishes, beside
the seconds for which the weights must not change. Without a GPU there is nothing to measure, and it
says so; `--device cpu` runs the same code on the host, to see that it works.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from astraflow.core.ids import PolicyId
from astraflow.core.tensors import Dtype, Layout
from astraflow.weights.publish.publisher import WeightPublisher

_TENSOR_NBYTES: Final = 64 << 20


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda:0", help="where the weights are")
    parser.add_argument("--gb", type=float, default=4.0, help="of bf16 weights")
    parser.add_argument("--share", type=float, default=0.01, help="of elements that change")
    parser.add_argument("--versions", type=int, default=5, help="of each kind")
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        result: dict[str, Any] = {"skipped": "there is no GPU"}
        print("skipped: there is no GPU; --device cpu runs the same code on the host")
    else:
        result = _measured(device, args)
        for name, value in result.items():
            print(f"{name:28} {value}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _measured(device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    weights = _weights(device, int(args.gb * 1e9))
    nbytes = sum(each.numel() * 2 for each in weights.values())
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    result: dict[str, Any] = {
        "device": what,
        "nbytes": nbytes,
        "share": args.share,
        "limit_gb_per_s": round(_copy_rate(device), 1),
    }
    step = _step(device)
    alone_s = statistics.median(_seconds(device, step) for _ in range(20))
    for name in ("device", "host"):
        publisher = _publisher(weights, on_device=name == "device")
        seconds, beside = [], []
        for version in range(1, args.versions + 1):
            _change(weights, args.share)
            took_s, steps_s = _published_beside(publisher, version, weights, device, step)
            seconds.append(took_s)
            beside += steps_s
        median_s = statistics.median(seconds)
        result |= {
            f"{name}_publish_s": round(median_s, 4),
            f"{name}_gb_per_s": round(2 * nbytes / median_s / 1e9, 2),
            f"{name}_steps_slowed": round(statistics.median(beside) / alone_s - 1, 3),
        }
    result["of_limit"] = round(result["device_gb_per_s"] / result["limit_gb_per_s"], 3)
    return result


def _weights(device: torch.device, nbytes: int) -> dict[str, torch.Tensor]:
    count = max(1, nbytes // _TENSOR_NBYTES)
    shape = (1024, min(nbytes, _TENSOR_NBYTES) // 2048)
    made = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(count))
    return {f"w{number:04}": each for number, each in enumerate(made)}


def _publisher(weights: dict[str, torch.Tensor], *, on_device: bool) -> WeightPublisher:
    layout = Layout.of((name, Dtype.BF16, tuple(each.shape)) for name, each in weights.items())
    publisher = WeightPublisher(PolicyId("p"), layout)
    publisher.copies_on_device = on_device
    publisher.publish(0, weights)
    return publisher


def _change(weights: dict[str, torch.Tensor], share: float) -> None:
    """Move a share of all elements by one unit of the last place."""
    for each in weights.values():
        each.view(torch.int16).add_((torch.rand(each.shape, device=each.device) < share).short())


def _published_beside(
    publisher: WeightPublisher,
    version: int,
    weights: dict[str, torch.Tensor],
    device: torch.device,
    step: Callable[[], object],
) -> tuple[float, list[float]]:
    """Publish in a thread while steps go on; return its seconds, and those of the steps."""
    took_s: list[float] = []

    def publish() -> None:
        started = time.perf_counter()
        publisher.publish(version, weights)
        took_s.append(time.perf_counter() - started)

    thread = threading.Thread(target=publish)
    thread.start()
    steps_s = [_seconds(device, step)]
    while thread.is_alive():
        steps_s.append(_seconds(device, step))
    thread.join()
    publisher.flush()
    return took_s[0], steps_s


def _step(device: torch.device) -> Callable[[], object]:
    size = 4096 if device.type == "cuda" else 256
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)

    def step() -> None:
        x = a
        for _ in range(8):
            x = x @ a

    return step


def _copy_rate(device: torch.device) -> float:
    """Return the GB/s that a copy within the device reads and writes."""
    source = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [_seconds(device, lambda: target.copy_(source)) for _ in range(10)]
    return 2 * source.numel() / min(seconds) / 1e9


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        # Of this stream alone: the other one publishes.
        torch.cuda.current_stream(device).synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())

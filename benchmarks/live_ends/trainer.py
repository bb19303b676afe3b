"""A trainer whose optimizer moves a share of the weights by one unit of bf16.

    python -m live_ends.trainer HUB ADDRESS FOLDER SHARE THREADS

Each line of stdin is a step; each answer tells when it was over, and what followed.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from astraflow.client.trainer import TrainerClient
from astraflow.core.members import Contract, RegisterTrainer
from astraflow.core.tensors import Dtype
from astraflow.core.versions import VersionInfo, WeightEndpoint
from astraflow.telemetry.logging import configure_logging
from astraflow.trainers.lora import trained_parameters
from astraflow.trainers.origin import published_layout
from astraflow.weights.publish.publisher import WeightPublisher
from astraflow.weights.serve.server import WeightServer
from live_ends.run import POLICY, TOKEN, say

_UNIT = 1 << 16  # of bf16, in the bits of f32


class Optimizer:
    """Master weights in f32, and steps of which a share shows in bf16."""

    def __init__(self, module: nn.Module, share: float) -> None:
        self._share = share
        self._rng = np.random.default_rng(0)
        # u32 views of the master weights, bf16 values at first
        self._bits = [_rounded(parameter) for parameter in module.parameters()]

    def step(self) -> int:
        """Move weights; return how many changed."""
        return sum(self._move(bits) for bits in self._bits)

    def _move(self, bits: np.ndarray) -> int:
        count = round(bits.size * self._share)
        indices = np.unique(self._rng.integers(0, bits.size, count))
        down = self._rng.random(len(indices), np.float32) < 0.5
        down &= bits[indices] << 1 != 0  # below zero lies no unit, but NaN
        bits[indices] += np.where(down, np.uint32(2**32 - _UNIT), np.uint32(_UNIT))
        return len(indices)


def _rounded(parameter: nn.Parameter) -> np.ndarray:
    values = parameter.detach().view(-1)
    values.copy_(values.to(torch.bfloat16).to(torch.float32))
    return values.numpy().view(np.uint32)


class Publishing:
    """Publishes the versions of one module."""

    def __init__(
        self, module: nn.Module, publisher: WeightPublisher, client: TrainerClient
    ) -> None:
        self._module = module
        self._publisher = publisher
        self._client = client

    def publish(self, version: int) -> dict[str, float]:
        """Publish; return when each stage was over."""
        info = self._publisher.publish(version, dict(self._module.named_parameters()), step=version)
        encoded = time.monotonic()
        self._client.publish_version(info)
        return {
            "encoded": encoded,
            "announced": time.monotonic(),
            "patch_nbytes": _smallest(info),
        }


def _smallest(info: VersionInfo) -> int:
    return min(patch.payload_nbytes for patch in info.patches)


def main() -> None:
    hub, address, folder, share, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    config: Any = LlamaConfig
    module = LlamaForCausalLM(config.from_pretrained(Path(folder)))
    optimizer = Optimizer(module, float(share))
    publisher = WeightPublisher(
        POLICY, published_layout(trained_parameters(module).items(), Dtype.BF16)
    )
    with WeightServer(publisher, listen=f"{address}:0") as server:
        register = RegisterTrainer(
            policy_id=POLICY,
            name="trainer",
            contract=Contract(),
            groups_per_batch=2,
            weight_endpoints=(WeightEndpoint(rank=0, endpoint=server.endpoint),),
        )
        with TrainerClient(hub=hub, token=TOKEN, register=register) as client:
            client.on_transfer_token(server.set_transfer_token)
            publishing = Publishing(module, publisher, client)
            publishing.publish(0)
            say(version=0, parameters=sum(each.numel() for each in module.parameters()))
            for version, _ in enumerate(sys.stdin, start=1):
                changed = optimizer.step()
                stepped = time.monotonic()
                stages = publishing.publish(version)
                publisher.flush()
                say(version=version, changed=changed, stepped=stepped, **stages)


if __name__ == "__main__":
    configure_logging("trainer", level="warning")
    main()

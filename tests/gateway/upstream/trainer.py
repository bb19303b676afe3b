"""Runs the published trainer's side: its client, its weight manager and its sender.

    python trainer.py SERVICE_URL SENDER_PORT STEPS BATCH_SIZE [ENDPOINT]

What needs a GPU is replaced: pinning memory and waiting for copies. Weights change as in the other
tests: version v has v + 1 elements that are not 0. A line of JSON tells every step; the next one
begins with a line of input, as a real step takes longer than a pull.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch

import astraflow.core

torch.cuda.synchronize = lambda *_: None
torch.cuda.cudart = lambda: type("Cudart", (), {"cudaHostRegister": staticmethod(lambda *_: 0)})

from astraflow.core.weight_manager.config import WeightManagerConfig  # noqa: E402
from astraflow.core.weight_manager.transfer.config import (  # noqa: E402
    SenderAgentConfig,
    TransferEngineConfig,
)
from astraflow.core.weight_manager.weight_manager import WeightManager  # noqa: E402

# Alone: its package imports everything that trains on a GPU.
_spec = importlib.util.spec_from_file_location(
    "astraflow_client",
    Path(astraflow.core.__file__).parents[1] / "train_worker" / "trainer" / "astraflow_client.py",
)
published = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(published)

SIZE = 100


def tell(fields):
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def weights_of(version):
    values = torch.zeros(SIZE)
    values[: version + 1] = torch.arange(1.0, version + 2)
    return values.to(torch.bfloat16)


def main():
    url, port, step_count, batch_size = sys.argv[1], *map(int, sys.argv[2:5])
    [endpoint] = sys.argv[5:] or [f"127.0.0.1:{port}"]
    weight = torch.nn.Parameter(weights_of(0), requires_grad=False)
    manager = WeightManager(
        WeightManagerConfig(
            sender_config=SenderAgentConfig(
                trainer_global_rank=0,
                trainer_world_size=1,
                engine_configs=[
                    TransferEngineConfig(local_hostname="127.0.0.1", handshake_port=port + 1)
                ],
                http_bind_port=port,
            ),
            strategies=["full", "delta"],
        )
    )
    manager.initialize([("w", weight)], 0, 0)
    # Only now: with a group it would sum flags on a GPU.
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    client = published.AstraFlowClient(url, model_id="solver")
    client.initialize(max_wait=60, verbose=False)
    client.signal_ready(batch_size, sender_endpoint=endpoint)
    for version in range(step_count):
        batch, _ = client.get_batch(version=version)
        weight.copy_(weights_of(version + 1))
        manager.offload([("w", weight)], version + 1, 0, 1)
        manager.wait_delta_ready()
        client.notify_version(version + 1)
        sampled = batch["versions"][batch["loss_mask"].bool()]
        told = {"step": version, "rows": len(batch["rewards"]), "oldest": int(sampled.min())}
        tell(told)
        sys.stdin.readline()
    manager._sender_process.kill()
    client.close()


if __name__ == "__main__":
    main()

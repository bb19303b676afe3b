"""Runs the published RaaS: its own routes, manager, receiver and registration.

    python raas.py PORT GATEWAY_URL [ADDRESS]

What needs a GPU is replaced: the engine draws random tokens, and reports the digest of every file
of weights that it was given, a line of JSON each. So is the registry of workflows, whose own import
everything that any of them needs.
"""

import asyncio
import hashlib
import json
import random
import sys
import types
from contextlib import asynccontextmanager
from pathlib import Path

import torch
import uvicorn
from safetensors.torch import load_file

import astraflow.core

workflows = types.ModuleType("astraflow.core.workflow")
workflows.__path__ = [str(Path(astraflow.core.__file__).parent / "workflow")]
sys.modules[workflows.__name__] = workflows

from astraflow.core.workflow.api.cli_args import GenerationHyperparameters  # noqa: E402
from astraflow.core.workflow.registry import register_reward, register_workflow  # noqa: E402
from astraflow.core.workflow.utils.data import resolve_prompt_id, results_to_structured  # noqa: E402
from astraflow.raas.server.__main__ import _self_register  # noqa: E402
from astraflow.raas.server.manager import RaaS3Manager  # noqa: E402
from astraflow.raas.server.routes import build_app  # noqa: E402

CONCURRENCY = 16


def tell(fields):
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class RandomEngine:
    """Draws tokens; its weights are only looked at."""

    def __init__(self):
        self.version = 0
        self._dice = random.Random(0)

    @asynccontextmanager
    async def managed_session(self):
        yield self

    def tokens(self, count):
        return [self._dice.randrange(100) for _ in range(count)]

    def set_version(self, version):
        self.version = version

    def pause_generation(self):
        pass

    def continue_generation(self):
        pass

    def load_weights_from_path(self, path, use_lora):
        assert not use_lora
        [weights] = load_file(Path(path) / "model.safetensors").values()
        raw = weights.contiguous().view(torch.uint8).numpy().tobytes()
        tell({"digest": hashlib.sha256(raw).hexdigest()})

    def destroy(self):
        pass


@register_workflow("gateway_digits")
class Digits:
    """Samples of three tokens of prompt and five that are drawn; the reward is a coin."""

    def __init__(self, gconfig, tokenizer=None, **_):
        self._count = gconfig.n_samples

    async def arun_episode(self, engine, data):
        await asyncio.sleep(0)
        return results_to_structured(
            [self._sample(engine) for _ in range(self._count)], prompt_id=resolve_prompt_id(data)
        )

    def _sample(self, engine):
        prompt, answer = [1, 2, 3], engine.tokens(5)
        fields = {
            "input_ids": torch.tensor(prompt + answer, dtype=torch.int32),
            "loss_mask": torch.tensor([0] * 3 + [1] * 5, dtype=torch.int32),
            "logprobs": torch.tensor([0.0] * 3 + [-1.0] * 5),
            "versions": torch.tensor([-1] * 3 + [engine.version] * 5, dtype=torch.int32),
            "attention_mask": torch.ones(8, dtype=torch.bool),
            "rewards": torch.tensor(float(answer[0] % 2)),
        }
        return {name: value.unsqueeze(0) for name, value in fields.items()}


register_reward("gateway_digits")(lambda *_: 0.0)


def main():
    port, gateway = int(sys.argv[1]), sys.argv[2]
    [address] = sys.argv[3:] or [f"127.0.0.1:{port}"]
    seen_host, seen_port = address.split(":")
    manager = RaaS3Manager(service_port=port, service_host="127.0.0.1")
    engine = RandomEngine()
    manager._engine_id = "published"
    manager._engines = {"solver": engine}
    manager._eval_engines = {"solver": engine}
    manager._max_concurrency = CONCURRENCY
    manager._gconfig = GenerationHyperparameters()
    manager._check_engines_healthy = lambda: True
    app = build_app(manager)

    @app.on_event("startup")
    async def start():
        manager._ensure_async_state()
        manager._semaphore = asyncio.Semaphore(CONCURRENCY)
        manager._eval_semaphore = asyncio.Semaphore(CONCURRENCY)
        manager._status = "ready"
        app.state.registering = asyncio.ensure_future(
            _self_register(gateway, "published", seen_host, int(seen_port))
        )

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()

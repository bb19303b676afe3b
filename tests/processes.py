"""What tests have done in processes of their own, forked from one that has imported all of it."""

# ruff: noqa: T201 - a test reads what is said

import json
import os
import queue
import resource
import sys
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import torch
from torch._inductor import config as inductor
from trainers.fsdp.ranks_at_work import (  # noqa: F401 - run by name
    follow,
    join,
    publish_versions,
    work,
)
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM  # noqa: F401 - most make these

from astraflow.cli.main import main
from astraflow.config.recipe import TrainerConfig
from astraflow.config.run_dir import RunDir
from astraflow.conformance.engine_bench import made_batch, weights_of
from astraflow.core.errors import AstraflowError
from astraflow.trainers.blocks import can_compile
from astraflow.trainers.causal_model import load_module
from astraflow.trainers.checkpoints import Checkpoints
from astraflow.trainers.main import GracefulShutdown
from astraflow.trainers.torch_engine import TorchEngine


def run_command(environment: str, *arguments: str) -> None:
    """Be the `astraflow` command, with more variables of the environment, as JSON."""
    os.environ |= json.loads(environment)
    # As torch would find it in the environment, had it not been loaded.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.argv = ["astraflow", *arguments]
    main()


def run_out_of_memory(model_dir: str) -> None:
    """Train on a batch too large for the memory, and on one that is not."""
    engine = TorchEngine(TrainerConfig(max_tokens_per_pass=10**9), model_dir=Path(model_dir))
    engine.prepare()
    small, large = made_batch(14), made_batch(14, row_count=40_000)
    engine.train_step(small)
    before = weights_of(engine)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), resource.RLIM_INFINITY))
    try:
        engine.train_step(large)
    except AstraflowError as error:
        print(error.reason, error.message)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert all((before[name] == bits).all() for name, bits in weights_of(engine).items())
    assert engine.step_count == 1
    engine.train_step(small)
    print("goes on")


def compile_without_a_compiler(cache: str) -> None:
    """Say whether torch can compile, where nothing is compiled already."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    inductor.cpp.cxx = (None, "/nowhere")
    print(can_compile(torch.device("cpu")))


def wait_for_a_batch() -> None:
    """Say who waits, wait for a batch that never comes, and say when that is over."""
    departure, batches = GracefulShutdown(), queue.Queue()

    def take() -> None:
        print(os.getpid())
        batches.get()

    with departure.listening():
        for _ in departure.watch(iter(take, ...)):
            pass
    print("left")


def wait_to_join() -> None:
    """Say who waits, wait for a hub that never answers, and say when that is over."""

    @contextmanager
    def joined():
        print(os.getpid())
        yield queue.Queue().get()

    departure = GracefulShutdown()
    with departure.listening(), departure.entering(joined()):
        pass
    print("left")


def save_half(folder: str) -> None:
    """Save twice; say who is in the middle of the second time, and stay there."""

    class Engine:
        count = 0

        def save(self, directory):
            self.count += 1
            (directory / "weights").write_bytes(b"half")

        def wait_for_save(self):
            if self.count == 2:
                print(os.getpid())
                Event().wait()

    checkpoints = Checkpoints(Engine(), run_dir=RunDir(Path(folder)), policy_id="solver")
    checkpoints.save(step=1, version=1)
    checkpoints.begin(step=2, version=2).result()


def load_empty(small: str, large: str) -> None:
    """Say how large a model is, and by how much this process grows where it is loaded empty."""
    load_module(Path(small), device="cpu", is_empty=True)
    before = _resident_nbytes()
    module = load_module(Path(large), device="cpu", is_empty=True)
    nbytes = sum(each.numel() * 4 for each in module.parameters())
    print(nbytes, _resident_nbytes() - before)


def _resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

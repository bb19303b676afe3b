"""How SGLang is started."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.recipe import EngineSettings
from astraflow.engines.served.dialect import ServerCommand, ServerSetup
from astraflow.engines.sglang.dialect import SglangDialect

CONFIG = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def launched(model_dir: Path, **fields: Any) -> ServerCommand:
    settings = EngineSettings(kind="sglang", **fields)
    place = ServerSetup(
        model_dir=model_dir, port=4000, folder=Path("/shm/x"), settings=settings, max_context=64
    )
    return SglangDialect(Path("/venv/bin/python")).launch(place)


def value_of(started: ServerCommand, flag: str) -> str:
    return started.argv[started.argv.index(flag) + 1]


def test_on_a_cpu_it_computes_with_torch_alone(model_dir: Path):
    started = launched(model_dir, device="cpu", max_batch=8, args=("--log-level", "warning"))
    assert started.argv[0] == "/venv/bin/python"
    assert started.argv[-2:] == ("--log-level", "warning")
    assert value_of(started, "--attention-backend") == "torch_native"
    folder, plugin, stubs = started.env["PYTHONPATH"].split(os.pathsep)
    assert folder == "/shm/x/python"
    assert list(Path(plugin).glob("*.dist-info/entry_points.txt"))
    assert (Path(stubs) / "sgl_kernel" / "__init__.py").is_file()


def test_the_cache_has_room_for_what_fits_the_memory_that_it_may_take(model_dir: Path):
    started = launched(model_dir, device="cpu", max_batch=8)
    assert value_of(started, "--max-total-tokens") == str(2 * 8 * 64)
    # 2 (keys, values) x 2 layers x 4 heads x 16 x 4 bytes = 1024 bytes each
    started = launched(model_dir, device="cpu", max_batch=1024, cache_gib=2**-10)
    assert value_of(started, "--max-total-tokens") == "1024"


def test_on_a_gpu_it_chooses_for_itself(model_dir: Path):
    started = launched(model_dir, device="cuda", memory=0.8, tensor_parallel=2)
    assert "--attention-backend" not in started.argv
    assert value_of(started, "--mem-fraction-static") == "0.8"
    assert value_of(started, "--tensor-parallel-size") == "2"
    assert started.env["PYTHONPATH"].split(os.pathsep)[0] == "/shm/x/python"

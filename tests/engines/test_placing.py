"""Where the servers of a node compute, and what is refused before one is started."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from astraflow.config.recipe import EngineSettings
from astraflow.core.errors import AstraflowError, Reason
from astraflow.engines.devices import (
    Machine,
    free_memory,
    limits_of_groups,
    place_engines,
    visible_gpus,
    whole_memory,
)
from astraflow.engines.served.dialect import ServerSetup

FOUR = Machine(gpus=("4", "5", "6", "7"), has_gpus=True)


def engine(**fields: object) -> EngineSettings:
    return EngineSettings.model_validate({"kind": "vllm", **fields})


def seen(count: int, machine: Machine = FOUR, **fields: object) -> list[str]:
    """Return the GPUs that each server sees."""
    settings = place_engines(engine(**fields), [Path()] * count, machine)
    return [visible_gpus(each, machine).get("CUDA_VISIBLE_DEVICES", "all") for each in settings]


def test_servers_get_gpus_of_their_own():
    assert seen(2) == ["4", "5"]
    assert seen(2, tensor_parallel=2) == ["4,5", "6,7"]


def test_servers_that_share_a_gpu_share_its_memory():
    assert seen(3, tensor_parallel=2) == ["4,5", "6,7", "4,5"]
    shares = place_engines(engine(tensor_parallel=2), [Path()] * 3, FOUR)
    assert [each.memory for each in shares] == [0.45, None, 0.45]
    told = place_engines(engine(memory=0.3), [Path()] * 3, Machine(gpus=("0",), has_gpus=True))
    assert [each.memory for each in told] == [0.3] * 3


def test_a_device_that_is_named_and_gpus_that_are_not_known_are_left_as_they_are():
    assert seen(2, device="cuda:2") == ["6", "6"]
    assert seen(2, machine=Machine(has_gpus=True)) == ["all", "all"]
    assert seen(1, device="cuda") == ["all"]


@pytest.mark.parametrize(
    ("fields", "count", "message"),
    [
        ({"tensor_parallel": 8}, 1, "8 needs as many GPUs, and there are 4"),
        ({"memory": 0.6}, 5, "0.6 for each of 2 servers on one GPU"),
        ({"url": "http://127.0.0.1:8000"}, 2, "is one server, and the policies need 2"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, object], count: int, message: str):
    with pytest.raises(AstraflowError, match=message) as caught:
        place_engines(engine(**fields), [Path()] * count, FOUR)
    assert caught.value.reason is Reason.INVALID_FIELD


def test_models_and_caches_that_do_not_fit_are_refused_before_a_server_is_started(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(bytes(2**20))
    machine = Machine(free_nbytes=5 * 2**30)
    assert len(place_engines(engine(cache_gib=2.4), [tmp_path] * 2, machine)) == 2
    with pytest.raises(AstraflowError, match=r"2 servers of kind vllm need 5\.0 GiB") as caught:
        place_engines(engine(cache_gib=2.5), [tmp_path] * 2, machine)
    assert caught.value.reason is Reason.MEMORY_EXCEEDED


def test_embedded_engines_and_one_attached_server_need_no_place():
    embedded = EngineSettings()
    assert place_engines(embedded, [Path()] * 2, FOUR) == [embedded, embedded]
    attached = engine(url="http://127.0.0.1:8000")
    assert place_engines(attached, [Path()], FOUR) == [attached]


@pytest.mark.parametrize(
    ("config", "dtype", "computed"),
    [
        ({"dtype": "bfloat16"}, "auto", "bf16"),
        ({"torch_dtype": "float16"}, "auto", "bf16"),
        ({"text_config": {"dtype": "bfloat16"}}, "auto", "bf16"),
        ({"dtype": "float32"}, "auto", "f32"),
        ({}, "auto", "f32"),
        ({"dtype": "bfloat16"}, "f32", "f32"),
    ],
)
def test_a_server_computes_in_the_type_of_its_model(tmp_path: Path, config, dtype, computed):
    (tmp_path / "config.json").write_text(json.dumps(config))
    setup = ServerSetup(
        model_dir=tmp_path, port=1, folder=tmp_path, settings=engine(dtype=dtype), max_context=8
    )
    assert setup.dtype == computed


def test_this_machine_knows_its_memory():
    free = Machine.here().free_nbytes
    assert free is None or free > 2**20


# Two GPUs, of which the second one is the smaller.
NVML = """
typedef struct { unsigned long long total, free, used; } memory;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **gpu) {
  *gpu = (void *)(0x100000000ul + i);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *gpu, memory *said) {
  said->total = (unsigned long)gpu == 0x100000000ul ? 80ul << 30 : 40ul << 30;
  return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(("visible", "gpus"), [(None, "0 1"), ("1,-1,0", "1"), ("", "")])
def test_gpus_and_their_memory_are_what_the_driver_says(tmp_path: Path, visible, gpus):
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    code = "from astraflow.engines.devices import Machine; m = Machine.here()"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(m.gpu_nbytes >> 30, *m.gpus)"],
        env=environment if visible is None else {**environment, "CUDA_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"40 {gpus}".strip()


def write_group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, said in files.items():
        (folder / name.replace("_", ".", 1)).write_text(said)


def test_a_job_or_a_container_has_what_the_tightest_of_its_limits_leaves(tmp_path):
    job = tmp_path / "slurm/job_7"
    write_group(job.parent, memory_max="4000\n", memory_current="3000\n", memory_stat="anon 9\n")
    write_group(
        job, memory_max="2000\n", memory_current="900\n", memory_stat="anon 1\ninactive_file 100\n"
    )
    write_group(job / "task", memory_max="max\n", memory_current="5\n", memory_stat="anon 1\n")
    found = list(limits_of_groups(tmp_path, "0::/slurm/job_7/task\n"))
    assert found == [(2000, 1200), (4000, 1000)]
    assert list(limits_of_groups(tmp_path, "0::/\n")) == []


def test_the_group_of_a_container_may_be_where_all_are_mounted(tmp_path):
    names = {"memory_limit_in_bytes": "700\n", "memory_usage_in_bytes": "200\n"}
    write_group(tmp_path / "memory", **names, memory_stat="total_inactive_file 50\n")
    said = "8:pids:/docker/ab\n4:memory:/docker/ab\n0::/\n"
    assert list(limits_of_groups(tmp_path, said)) == [(700, 550)]
    assert 0 < free_memory() <= whole_memory() <= psutil.virtual_memory().total

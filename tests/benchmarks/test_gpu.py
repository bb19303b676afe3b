"""The measurements for a GPU, on the CPU: they run, and write what they found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def measure(tmp_path):
    def measured(*parts):
        found = tmp_path / "gpu.json"
        command = [sys.executable, str(SCRIPT), "--device", "cpu", "--json", str(found)]
        subprocess.run([*command, "--parts", *parts], check=True)
        result = json.loads(found.read_text())
        assert not [name for name, part in result.items() if "failed" in part], result
        return result

    return measured


@pytest.mark.slow
def test_every_part_runs_on_the_cpu(measure):
    result = measure(
        *("trainer", "plain", "deterministic", "packing", "stall", "publish", "engine")
    )
    assert result["trainer"]["tokens_per_s"] > 0
    assert result["packing"]["padded_over_packed"] > 0
    assert result["publish"]["host_gb_per_s"] > 0


@pytest.mark.long
def test_a_run_is_measured_on_the_cpu(measure):
    found = measure("math")["math"]
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert found["steps"] == 2

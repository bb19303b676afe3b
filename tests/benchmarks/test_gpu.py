"""The measurements for a GPU, on the CPU: they run, and write what they found."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu"


def test_every_part_runs_on_the_cpu(tmp_path):
    found = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--json", str(found)]
    subprocess.run(command, check=True)
    result = json.loads(found.read_text())
    assert not [name for name, part in result.items() if "failed" in part], result
    assert result["trainer"]["tokens_per_s"] > 0
    assert result["packing"]["padded_over_packed"] > 0
    assert result["publish"]["host_gb_per_s"] > 0

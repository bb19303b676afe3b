#!/usr/bin/env bash
# Installs SGLang for a machine without a GPU into an environment of its own.
#
#   scripts/install_sglang_cpu.sh DIR [RELEASE]
#
# Then: raas.engine: {kind: sglang, python: DIR/bin/python, device: cpu}
#
# Takes about 2 GB and two minutes. Packages come from where pip is set to look; TORCH_INDEX may
# name a further index that has torch's builds for CPUs. PYTHON (python3) makes the environment.
set -euo pipefail

TORCH=2.13.0+cpu
TORCHVISION=0.28.0  # imported whatever the model; see astraflow/engines/sglang/cpu_stubs

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
  echo "usage: $0 DIR [RELEASE]" >&2
  exit 2
fi
here="$(cd "$(dirname "$0")" && pwd)"
pip=("$1/bin/python" -m pip install --quiet)
if [ -n "${TORCH_INDEX:-}" ]; then
  pip+=(--extra-index-url "$TORCH_INDEX")
fi

"${PYTHON:-python3}" -m venv "$1"
"${pip[@]}" --upgrade pip
# Without what it asks for: that names kernels and builds for CUDA. Of the rest its pins hold.
"${pip[@]}" --no-deps "sglang==${2:-0.5.23}" "torchvision==$TORCHVISION"
"$1/bin/python" - "$TORCH" > "$1/constraints.txt" <<'PINS'
import re, sys
from importlib.metadata import requires
print(f"torch=={sys.argv[1]}")
for said in requires("sglang") or ():
    if re.fullmatch(r"[\w.-]+ *[<>=!~][^;\[]*", said) and not said.startswith("torch"):
        print(said)
PINS
"${pip[@]}" --constraint "$1/constraints.txt" --requirement "$here/sglang-cpu-requirements.txt"
"$1/bin/python" -c "from importlib.metadata import version; print('sglang', version('sglang'))"

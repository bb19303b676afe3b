#!/usr/bin/env bash
# Install vLLM for CPUs into an environment of its own: 2.3 GB, about a minute and a half.
#
#   scripts/install_vllm_cpu.sh VENV [RELEASE]
#
# Packages come from the index of pip's configuration. If torch's CPU builds are elsewhere, name
# that index in TORCH_INDEX.
set -euo pipefail

venv=${1:?usage: install_vllm_cpu.sh VENV [RELEASE]}
release=${2:-0.32.0}
python3 -m venv "$venv"
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check)
"${pip[@]}" install --upgrade pip

# The torch that releases from 0.28 to 0.32 ask for; another one would bring CUDA's.
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
echo "torch==2.13.0+cpu" > "$constraints"
"${pip[@]}" install -c "$constraints" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "vllm-cpu==$release"

# Linked against CUDA, these break `import torchvision` and with it transformers; text models
# need none of them. triton and opencv are a gigabyte that a CPU does not use.
"${pip[@]}" uninstall --yes torchvision torchaudio torchcodec triton opencv-python-headless

"$venv/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'

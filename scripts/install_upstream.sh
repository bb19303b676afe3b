#!/usr/bin/env bash
# Install what the published system needs on a CPU, for the tests marked `upstream`: about two minutes.
#
#   scripts/install_upstream.sh VENV
#
# The system itself is read from a clone of it (see tests/gateway/test_upstream.py).
set -euo pipefail

venv=${1:?usage: install_upstream.sh VENV}
python3 -m venv "$venv"
"$venv/bin/python" -m pip --quiet --disable-pip-version-check install \
  ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
  "$(grep -m 1 '^torch==' "$(dirname "$0")/../constraints-cpu.txt")" \
  aiofiles aiohttp cloudpickle colorama colorlog datasets fastapi flask hydra-core numpy omegaconf \
  orjson pillow psutil pyzmq ray requests safetensors setproctitle torchdata 'transformers>=4.57,<5' \
  uvicorn uvloop

#!/usr/bin/env bash
# Install Tinker's SDK and its cookbook, for the tests marked `tinker`: 2 GB, about two minutes.
#
#   scripts/install_tinker.sh VENV
set -euo pipefail

venv=${1:?usage: install_tinker.sh VENV}
python3 -m venv "$venv"
# The newest cookbook that runs with this SDK; math-rl is what its rl_loop grades answers with.
"$venv/bin/python" -m pip --quiet --disable-pip-version-check install \
  ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
  "$(grep -m 1 '^torch==' "$(dirname "$0")/../constraints-cpu.txt")" \
  tinker==0.38.0 'tinker-cookbook[math-rl]==0.5.8'

"$venv/bin/python" -c 'import tinker; print("tinker", tinker.__version__)'

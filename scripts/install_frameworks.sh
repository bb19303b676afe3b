#!/usr/bin/env bash
# Install agents of others, as they are, for the tests marked `frameworks`: 2.3 GB, two minutes.
#
#   scripts/install_frameworks.sh DIR
#   ASTRAFLOW_FRAMEWORKS=DIR pytest -m frameworks
#
# Packages come from the indexes of pip's and npm's configuration. Terminus is part of Harbor, which
# wants Python 3.12: another interpreter than `python3.12` is named in PYTHON312. What cannot be
# had here is left out with a word, and its tests are skipped.
set -euo pipefail

dir=${1:?usage: install_frameworks.sh DIR}
mkdir -p "$dir/node"
pip=(-m pip --quiet --disable-pip-version-check install --only-binary :all:)

python3 -m venv "$dir/python"
"$dir/python/bin/python" "${pip[@]}" \
  langchain-openai==1.7.3 langgraph==1.2.22 litellm==1.83.0 mini-swe-agent==2.4.6 \
  openai-agents==0.24.0 'smolagents[openai]==1.26.0'

python312=${PYTHON312:-python3.12}
if "$python312" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
  "$python312" -m venv "$dir/terminus"
  "$dir/terminus/bin/python" "${pip[@]}" harbor==0.24.0
  command -v tmux >/dev/null || echo "terminus needs tmux, which is not here" >&2
else
  echo "terminus is left out: $python312 is no Python 3.12" >&2
fi

if command -v npm >/dev/null; then
  npm install --prefix "$dir/node" --silent --no-audit --no-fund \
    @anthropic-ai/claude-code@2.1.330 @openai/codex@0.169.0 opencode-ai@1.18.33
  # Their install scripts link the program for this machine; npm may not run them by itself.
  (cd "$dir/node/node_modules/@anthropic-ai/claude-code" && node install.cjs)
  (cd "$dir/node/node_modules/opencode-ai" && node postinstall.mjs)
else
  echo "claude-code, codex and opencode are left out: there is no npm" >&2
fi

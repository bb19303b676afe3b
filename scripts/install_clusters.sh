#!/usr/bin/env bash
# Install what tests with the markers `slurm` and `ssh` start for themselves.
#
#   scripts/install_clusters.sh
#
# Debian or Ubuntu, as root. Daemons that packages start by themselves are not used. Those with the
# marker `kubernetes` need kubectl (https://kubernetes.io/docs/tasks/tools) and helm, and for the schemas
# `pip install kubernetes-validate`. That with `skypilot` needs `pip install "skypilot[slurm]" uv`, and an index of packages.
set -euo pipefail

apt-get update --quiet --quiet
apt-get install --yes --quiet --no-install-recommends slurm-wlm openssh-server openssh-client rsync

#!/usr/bin/env bash
# Install the PostgreSQL server that tests with the marker `postgres` start for themselves: 60 MB.
#
#   scripts/install_postgres.sh
#
# Debian or Ubuntu, as root. A server that the package starts by itself is not used.
set -euo pipefail

apt-get update --quiet --quiet
apt-get install --yes --quiet --no-install-recommends postgresql
ls /usr/lib/postgresql/*/bin/postgres

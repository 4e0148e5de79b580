#!/usr/bin/env bash
# Installs Slurm and munge on Debian or Ubuntu, for tests/processes/test_slurm.py, which starts its own cluster.
# Usage: sudo scripts/install_slurm.sh
set -euo pipefail
command -v apt-get > /dev/null || {
  printf 'There is no `apt-get` here\n\nhint: install Slurm and munge with the package manager of your system\n' >&2
  exit 1
}
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends slurm-wlm munge

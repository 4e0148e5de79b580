#!/usr/bin/env bash
# Runs the given benchmark programs (by default all of them) one after the other. Installs the packages of the extra
# `bench` if they are missing.
# Usage: scripts/run_benchmarks.sh PYTHON [NAME ...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
"$python" -c "import torch" 2>/dev/null || "$python" -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
[ $# -gt 0 ] || set -- mlp_epoch cnn_epoch resnet20_epoch mirrored_two cluster mpi mpi_floor reduce_scatter memory startup \
  floor accuracy pipelines large_order input_wait sparse gpu
for name in "$@"; do
  printf '\n== %s ==\n' "$name"
  "$python" -m "benchmarks.$name"
done

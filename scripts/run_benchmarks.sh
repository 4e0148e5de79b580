#!/usr/bin/env bash
# Runs the benchmark programs named (all of them without a name), one after the other.
# Usage: scripts/run_benchmarks.sh PYTHON [NAME ...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
"$python" -c "import torch, sympy" 2>/dev/null || "$python" -m pip install --quiet --disable-pip-version-check ".[bench]"
[ $# -gt 0 ] || set -- mlp_epoch cnn_epoch mirrored_two memory startup floor accuracy
for name in "$@"; do
  "$python" -m "benchmarks.$name"
  echo
done

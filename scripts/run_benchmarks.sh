#!/usr/bin/env bash
# Runs the benchmark programs named (all of them without a name), one after the other.
# Usage: scripts/run_benchmarks.sh PYTHON [NAME ...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
"$python" -c "import torch" 2>/dev/null || "$python" -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
[ $# -gt 0 ] || set -- $(cd benchmarks && ls [a-z]*.py | sed 's/\.py$//')
for name in "$@"; do
  "$python" -m "benchmarks.$name"
done

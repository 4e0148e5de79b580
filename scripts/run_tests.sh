#!/usr/bin/env bash
# Runs the tests, spread over the cores: one process a core, since a TensorFlow test keeps about one core busy.
# Usage: scripts/run_tests.sh PYTHON [PATH ...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
exec "$python" -m pytest --numprocesses "${TEST_PROCESSES:-$(nproc)}" --dist worksteal "$@"

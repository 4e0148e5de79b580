#!/usr/bin/env bash
# Runs the tests whose marks match EXPRESSION, such as "not exhaustive"; see `markers` in pyproject.toml.
# Usage: scripts/run_tests.sh PYTHON EXPRESSION [PATH ...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
marks=$2
shift 2

run() {
  "$python" -m pytest "$@" || [ $? -eq 5 ] # exit code 5: there are no such tests
}

# One process per core, because a TensorFlow test keeps about one core busy.
run --numprocesses "${TEST_PROCESSES:-$(nproc)}" --dist worksteal -m "not processes and ($marks)" "$@"
# These tests start several processes each, which often wait for each other; some have a time limit of seconds. In the
# order of their names, the files with few long tests do not come last, when they would leave the other process idle.
cores=$(nproc)
run --numprocesses "$((cores < 4 ? 2 : (cores + 1) / 2))" --dist loadfile --no-loadscope-reorder -m "processes and ($marks)" "$@"

#!/usr/bin/env bash
# Writes both lock files from pyproject.toml in one resolution: what requirements.lock has for `make env` is a part of
# requirements-integrations.lock. Locked versions stay as they are where pyproject.toml allows it.
# Usage: scripts/lock.sh UV [OPTION ...]     UV is the program `uv`; OPTIONs of `uv pip compile`, such as --upgrade
set -euo pipefail
uv=$1
shift
cd "$(dirname "$0")/.."

lock() { # writes the file $1; other arguments are options
  "$uv" pip compile --quiet --universal --generate-hashes --no-header --output-file "$1" pyproject.toml "${@:2}"
}

lock requirements-integrations.lock --extra dev --extra integrations "$@"
cp requirements-integrations.lock requirements.lock # whose versions are kept
lock requirements.lock --extra dev

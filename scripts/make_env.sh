#!/usr/bin/env bash
# Creates the virtual environment from requirements.lock and installs this project into it in editable mode.
# Usage: scripts/make_env.sh VENV PYTHON
set -euo pipefail
venv=$1 python=$2
cd "$(dirname "$0")/.."

"$python" - <<'PY'
import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"tfdist needs Python 3.11 to 3.13, found {sys.version.split()[0]}\n\nhint: use `make PYTHON=python3.12 ...`")
PY
echo "Creating $venv from requirements.lock (several minutes the first time)"
"$python" -m venv "$venv" || {
  printf 'The module `venv` of %s does not work\n\nhint: on Debian and Ubuntu run `apt-get install python3-venv`\n' "$python" >&2
  exit 1
}
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
rm -f "$venv/.horovod" # it was built for the earlier packages
touch "$venv/.installed"

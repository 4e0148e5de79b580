#!/usr/bin/env bash
# Installs Chromium on Debian or Ubuntu, for tests/test_report_page.py, which opens the page of a report in it.
# Usage: sudo scripts/install_chromium.sh
set -euo pipefail
command -v apt-get > /dev/null || {
  printf 'There is no `apt-get` here\n\nhint: install Chromium with the package manager of your system\n' >&2
  exit 1
}
! command -v chromium > /dev/null || exit 0
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends chromium fonts-dejavu-core

#!/usr/bin/env bash
# Installs Java on Debian or Ubuntu, which Spark needs (`tfdist.spark`, tests/processes/test_spark.py).
# Usage: sudo scripts/install_java.sh
set -euo pipefail
command -v apt-get > /dev/null || {
  printf 'There is no `apt-get` here\n\nhint: install Java 17 or newer with the package manager of your system\n' >&2
  exit 1
}
! command -v java > /dev/null || exit 0
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends default-jre-headless

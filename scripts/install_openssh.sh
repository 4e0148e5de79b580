#!/usr/bin/env bash
# Installs the OpenSSH server on Debian or Ubuntu, for tests/processes/test_ssh.py, which starts its own instance.
# Usage: sudo scripts/install_openssh.sh
set -euo pipefail
command -v apt-get > /dev/null || {
  printf 'There is no `apt-get` here\n\nhint: install OpenSSH with the package manager of your system\n' >&2
  exit 1
}
[ ! -e /usr/sbin/sshd ] || exit 0
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends openssh-client openssh-server
# Debian starts the server at installation, which the test does not need.
[ ! -d /run/systemd/system ] || systemctl disable --now ssh

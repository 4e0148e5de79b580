#!/usr/bin/env bash
# Unpacks Debian's or Ubuntu's MPICH `mpiexec` into a folder, for tests/processes/test_two_mpi.py. Installing it might
# replace Open MPI's `mpiexec`.
# Usage: scripts/unpack_mpich.sh FOLDER; then LD_LIBRARY_PATH=FOLDER/usr/lib/ARCHITECTURE FOLDER/usr/bin/mpiexec.mpich
set -euo pipefail
mkdir -p "$1"
cd "$1"
command -v apt-get > /dev/null || {
  echo "there is no apt-get here" >&2
  exit 1
}
libraries=$(apt-cache depends mpich | sed -nE 's/^[ |]*Depends: (lib(slurm|hwloc).*)/\1/p')
# shellcheck disable=SC2086
apt-get download --quiet mpich $libraries
for package in *.deb; do dpkg --extract "$package" .; done
